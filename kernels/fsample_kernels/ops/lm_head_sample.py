"""Stage 1 of the portable path: the LM-head matmul, tile by tile, with the draw in its epilogue.

Batch rows lie on the M side and ids on the N side of the tile, so that in tensor-core accumulators a thread
holds many ids of few rows and the draw and the reduction over ids are almost entirely in-thread. Small
batches do the product the other way round, with W on the M side: their few rows are not padded to 64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsample_kernels import buffers
from fsample_kernels.chunks import device_of
from fsample_kernels.ops import arguments, configs
from fsample_kernels.ops.compiling import FUSE, ready
from fsample_kernels.ops.epilogue import finish_tile
from fsample_kernels.ops.reduce_candidates import reduce_candidates
from fsample_kernels.types import Problem, SampleResult


@triton.jit(do_not_specialize=arguments.UNSPECIALIZED, do_not_specialize_on_alignment=arguments.ANY_ALIGNMENT)
def lm_head_sample_kernel(
    hidden_ptr, hidden_stride_b, hidden_stride_d,  # [B, D]
    weight_ptr, weight_stride_v, weight_stride_d,  # [V, D]
    num_rows, num_columns, num_tiles, num_samples, shift, first_id, limit,
    temperature_ptr, temperature_stride, temperature, seed_ptr, seed_stride, seed_low, seed_high,
    position_ptr, position_stride, position, numbered,
    head_bias_ptr, head_bias_stride, logit_scale, softcap,
    bias_ptr, bias_stride_b, bias_stride_v, mask_ptr, mask_stride_b, mask_stride_v,
    bits_ptr, bits_stride_b, bits_stride_w, num_words,
    sparse_rows_ptr, sparse_ids_ptr, sparse_values_ptr, sparse_starts_ptr,
    score_ptr, id_ptr, logit_ptr, max_ptr, sum_ptr, logits_ptr,
    HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, GROUPED: tl.constexpr, SPLIT: tl.constexpr,
    SINGLE: tl.constexpr, FAST: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr, D: tl.constexpr, VOCAB_ON_M: tl.constexpr, STREAM_WEIGHT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    # The row tiles of one vocabulary tile are neighbours in time: its weights come from memory once.
    tiles_b = tl.cdiv(num_rows, BLOCK_B)
    tile_v = pid // tiles_b
    tile_b = pid % tiles_b
    # Rows and columns past the end repeat the last one: no mask in the loop; the epilogue drops them.
    offs_b = tl.minimum(tile_b * BLOCK_B + tl.arange(0, BLOCK_B), num_rows - 1).to(tl.int64)
    offs_v = tile_v * BLOCK_V - shift + tl.arange(0, BLOCK_V)
    offs_v = tl.minimum(tl.maximum(offs_v, 0), num_columns - 1).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    hidden_ptrs = (
        hidden_ptr + offs_b[:, None] * hidden_stride_b + offs_d[None, :].to(tl.int64) * hidden_stride_d
    )
    weight_ptrs = (
        weight_ptr + offs_v[:, None] * weight_stride_v + offs_d[None, :].to(tl.int64) * weight_stride_d
    )
    if VOCAB_ON_M:
        y = tl.zeros((BLOCK_V, BLOCK_B), tl.float32)
    else:
        y = tl.zeros((BLOCK_B, BLOCK_V), tl.float32)
    block_d = tl.full((), BLOCK_D, tl.int64)  # a step along D can pass 2^31 values
    for d in range(0, D, BLOCK_D):
        if D % BLOCK_D == 0:
            h = tl.load(hidden_ptrs)
            if STREAM_WEIGHT:
                w = tl.load(weight_ptrs, eviction_policy="evict_first")
            else:
                w = tl.load(weight_ptrs)
        else:
            mask_d = (offs_d < D - d)[None, :]
            h = tl.load(hidden_ptrs, mask=mask_d, other=0.0)
            w = tl.load(weight_ptrs, mask=mask_d, other=0.0)
        if VOCAB_ON_M:
            y = tl.dot(w, tl.trans(h), y, input_precision="ieee")
        else:
            y = tl.dot(h, tl.trans(w), y, input_precision="ieee")
        hidden_ptrs += block_d * hidden_stride_d
        weight_ptrs += block_d * weight_stride_d
    if VOCAB_ON_M:
        y = tl.trans(y)

    finish_tile(
        y, tile_b, tile_v, num_rows, num_tiles, num_samples, shift,
        (temperature_ptr, temperature_stride, temperature, seed_ptr, seed_stride, seed_low, seed_high,
         position_ptr, position_stride, position, numbered),
        (first_id, num_columns, limit, head_bias_ptr, head_bias_stride, logit_scale, softcap,
         bias_ptr, bias_stride_b, bias_stride_v, mask_ptr, mask_stride_b, mask_stride_v,
         bits_ptr, bits_stride_b, bits_stride_w, num_words,
         sparse_rows_ptr, sparse_ids_ptr, sparse_values_ptr, sparse_starts_ptr),
        (score_ptr, id_ptr, logit_ptr, max_ptr, sum_ptr, logits_ptr),
        HAS_SCALE, HAS_SOFTCAP, GROUPED, SPLIT, SINGLE, FAST, BLOCK_B, BLOCK_V,
    )  # fmt: skip


def kernel_arguments(problem: Problem, config: configs.Config, launch: arguments.Launch) -> dict[str, object]:
    """Every argument of `lm_head_sample_kernel`, by name."""
    hidden, weight = problem.hidden, problem.weight
    assert hidden is not None and weight is not None
    return {
        "hidden_ptr": hidden, "hidden_stride_b": hidden.stride(0), "hidden_stride_d": hidden.stride(1),
        "weight_ptr": weight, "weight_stride_v": weight.stride(0), "weight_stride_d": weight.stride(1),
        **launch.kernel_arguments,
        "BLOCK_B": config.block_b, "BLOCK_V": config.block_v, "BLOCK_D": config.block_d, "D": weight.shape[1],
        "VOCAB_ON_M": config.vocab_on_m, "STREAM_WEIGHT": read_once(problem, config),
    }  # fmt: skip


def read_once(problem: Problem, config: configs.Config) -> bool:
    """Whether one tile holds every row, so that weights need not stay in the cache."""
    return problem.num_rows <= config.block_b


def variant(problem: Problem) -> tuple[configs.Config, bool]:
    """The compiled shape of the call: problems that share it, and differ in rows alone, share a kernel."""
    hidden = problem.hidden
    assert hidden is not None
    config = configs.pick(hidden.dtype, problem.num_rows, arguments.architecture(hidden.device))
    return config, read_once(problem, config)


def run(problem: Problem) -> SampleResult:
    """Draw ids [B, K] from softmax(transform(hidden @ weight.T) / temperature); see `Problem` for shapes.

    Allocates the results and the candidates: 8 bytes a row, sample and vocabulary tile, 20 with logprob.
    """
    return _run(problem)


def candidates(problem: Problem) -> tuple[SampleResult, Tensor]:
    """The result and the keys of its ids, [B, K] int64; see `words.pack_key`."""
    shape = (problem.num_rows, problem.num_samples)
    keys = buffers.empty(shape, torch.int64, device_of(problem))
    return _run(problem, keys), keys


def _run(problem: Problem, keys: Tensor | None = None) -> SampleResult:
    assert problem.hidden is not None
    device = problem.hidden.device
    config, _ = variant(problem)
    with arguments.on_device(device):
        launch = arguments.prepare(problem, config.block_v)
        ready(lm_head_sample_kernel)[(launch.num_tiles * triton.cdiv(problem.num_rows, config.block_b),)](
            **kernel_arguments(problem, config, launch),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=FUSE,
        )
        return reduce_candidates(problem, launch, keys)
