"""What the kernels have in common on the host: the arguments of one launch, made from a `Problem`.

No device-to-host copy and no synchronisation: everything here can be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from fsample_kernels import buffers
from fsample_kernels.ops.sort_sparse import sort_sparse
from fsample_kernels.types import Problem

INTERPRETED = triton.knobs.runtime.interpret
REACH = 1 << 31  # values: the kernels count to a row's parameters in 32 bits

# Numbers that change from call to call must not make new compiled variants, and neither must a slice of a
# tensor of per-row parameters that starts at an odd address. Strides of [B, V] tables are here as well: known
# to be 1, they invite wide loads that hold a second tile of registers, and the matmul then spills.
UNSPECIALIZED = (
    "num_rows", "num_columns", "num_tiles", "num_samples", "shift", "first_id", "limit", "temperature_stride",
    "seed_stride", "seed_low", "seed_high", "position_stride", "position", "numbered", "num_words",
    "bias_stride_b", "bias_stride_v", "mask_stride_b", "mask_stride_v",
)  # fmt: skip
ANY_ALIGNMENT = (
    "temperature_ptr", "seed_ptr", "position_ptr", "head_bias_ptr", "bias_ptr", "mask_ptr", "bits_ptr",
    "sparse_rows_ptr", "sparse_ids_ptr", "sparse_values_ptr", "sparse_starts_ptr",
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """Arguments of one launch and the buffers it fills."""

    num_tiles: int
    kernel_arguments: dict[str, object]
    scores: Tensor  # [K, B, T] fp32, base 2; +inf: poisoned, -inf: nothing allowed in the tile
    ids: Tensor  # [K, B, T] int32, global ids, -1 where poisoned
    winner_logits: Tensor | None  # [K, B, T] fp32, y of the candidate
    tile_max: Tensor | None  # [B, T] fp32, base 2 (greedy rows: y)
    tile_sum: Tensor | None  # [B, T] fp32
    logits: Tensor | None  # [B, V] fp32
    spoiled: Tensor | None  # [B] bool: rows whose sparse bias is no good


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make the tensors' GPU current: Triton launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def architecture(device: torch.device) -> str:
    """ "sm_90", "gfx942", ...; "" on the CPU, where the interpreter runs."""
    if device.type != "cuda":
        return ""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def signed32(word: int) -> int:
    """The int32 with the bits of a 32-bit word: every word then has one and the same kernel type."""
    return word - (1 << 32) if word >= 1 << 31 else word


def row_tensor(value: object) -> Tensor | None:
    """A row parameter that is a tensor, 0-d or [B]; copied, B values, where a row of it is out of REACH."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] * value.stride(0) < REACH:
        return value if isinstance(value, Tensor) else None
    return value.clone(memory_format=torch.contiguous_format)


def stride_of(tensor: Tensor | None) -> int:
    """Stride over rows: 0 for a 0-d tensor, which serves all of them."""
    return tensor.stride(0) if tensor is not None and tensor.dim() else 0


def row_strides(tensor: Tensor | None) -> tuple[int, int]:
    """Strides of a [V] or [B, V] table; a [V] table serves every row."""
    if tensor is None:
        return 0, 0
    return (0, tensor.stride(0)) if tensor.dim() == 1 else (tensor.stride(0), tensor.stride(1))


def row_arguments(problem: Problem) -> dict[str, object]:
    """What belongs to a row: temperature, seed and position, each a tensor with its stride or a number."""
    temperature, seed, position = problem.temperature, problem.seed, problem.position
    temperature_tensor = row_tensor(temperature)
    seed_tensor = row_tensor(seed)
    position_tensor = row_tensor(position)
    return {
        "temperature_ptr": temperature_tensor, "temperature_stride": stride_of(temperature_tensor),
        "temperature": 1.0 if isinstance(temperature, Tensor) else temperature,
        "seed_ptr": seed_tensor, "seed_stride": stride_of(seed_tensor),
        "seed_low": 0 if isinstance(seed, Tensor) else signed32(seed & 0xFFFFFFFF),
        "seed_high": 0 if isinstance(seed, Tensor) else signed32(seed >> 32),
        "position_ptr": position_tensor, "position_stride": stride_of(position_tensor),
        "position": 0 if isinstance(position, Tensor) else signed32(position),
        "numbered": 0 if seed_tensor is not None and seed_tensor.dim() else 1,
    }  # fmt: skip


def table_arguments(problem: Problem) -> dict[str, object]:
    """What belongs to an id, or to a row and an id, sparse biases aside."""
    mask = problem.mask.view(torch.uint8) if problem.mask is not None else None
    bias, bits = problem.logit_bias, problem.bitmask
    return {
        "head_bias_ptr": problem.head_bias, "head_bias_stride": stride_of(problem.head_bias),
        "logit_scale": problem.logit_scale, "softcap": problem.softcap or 1.0,
        "bias_ptr": bias, "bias_stride_b": row_strides(bias)[0], "bias_stride_v": row_strides(bias)[1],
        "mask_ptr": mask, "mask_stride_b": row_strides(mask)[0], "mask_stride_v": row_strides(mask)[1],
        "bits_ptr": bits, "bits_stride_b": row_strides(bits)[0], "bits_stride_w": row_strides(bits)[1],
        "num_words": bits.shape[-1] if bits is not None else 0,
    }  # fmt: skip


def prepare(problem: Problem, block_v: int) -> Launch:
    """Allocate candidates and results and list the kernel's arguments."""
    source = problem.hidden if problem.hidden is not None else problem.logits
    assert source is not None
    device = source.device
    B, V, K = problem.num_rows, problem.num_columns, problem.num_samples
    # Tiles start at global multiples of 128, so that groups and noise do not depend on where a shard begins.
    shift = problem.first_id % 128
    T = triton.cdiv(V + shift, block_v)
    limit = max(0, min(V, problem.vocab_size - problem.first_id))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return buffers.empty(shape, dtype, device)

    scores = empty(K, B, T)
    ids = empty(K, B, T, dtype=torch.int32)
    winner_logits = empty(K, B, T) if problem.want_logprob else None
    wants_mass = problem.want_logprob or problem.want_lse
    tile_max = empty(B, T) if wants_mass else None
    tile_sum = empty(B, T) if wants_mass else None
    logits = empty(B, V) if problem.store_logits else None

    sparse_rows, sparse_ids, sparse_values, starts, spoiled = sparse_tables(problem, block_v, T, shift)
    kernel_arguments: dict[str, object] = {
        "num_rows": B, "num_columns": V, "num_tiles": T, "num_samples": K, "shift": shift,
        "first_id": problem.first_id, "limit": limit,
        **row_arguments(problem), **table_arguments(problem),
        "sparse_rows_ptr": sparse_rows, "sparse_ids_ptr": sparse_ids, "sparse_values_ptr": sparse_values,
        "sparse_starts_ptr": starts,
        "score_ptr": scores, "id_ptr": ids, "logit_ptr": winner_logits,
        "max_ptr": tile_max, "sum_ptr": tile_sum, "logits_ptr": logits,
        "HAS_SCALE": problem.logit_scale != 1.0, "HAS_SOFTCAP": problem.softcap is not None,
        "GROUPED": problem.noise == "grouped", "SPLIT": shift != 0, "SINGLE": K == 1,
        "FAST": problem.math == "fast" and not INTERPRETED and torch.version.hip is None,
    }  # fmt: skip
    return Launch(T, kernel_arguments, scores, ids, winner_logits, tile_max, tile_sum, logits, spoiled)


def sparse_tables(
    problem: Problem, block_v: int, num_tiles: int, shift: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Sparse bias by vocabulary tile as `sort_sparse` gives it, or nothing."""
    if problem.sparse_bias is None:
        return None, None, None, None, None
    return sort_sparse(
        problem.sparse_bias,
        problem.num_rows,
        problem.vocab_size,
        problem.first_id - shift,
        num_tiles,
        block_v,
    )
