"""Launcher of the Hopper kernel: what it can run, the state it reuses, its arguments."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fsample_kernels import buffers, tables
from fsample_kernels.chunks import device_of
from fsample_kernels.ops import arguments, hopper_configs
from fsample_kernels.ops.compiling import FUSE, ready
from fsample_kernels.ops.hopper_kernel import hopper_kernel
from fsample_kernels.ops.hopper_workspace import workspace
from fsample_kernels.ops.reduce_candidates import reduce_candidates
from fsample_kernels.types import Problem, SampleResult

LOG2_E = 1.4426950408889634
# Without an entry cap ptxas ignores the register split of the warp-specialised parts; m64n256 needs at least
# 154.
MAX_REGISTERS = 168
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
BESIDE = ("head_bias_stride", "bias_stride_v", "mask_stride_v")  # 1: see `beside`
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def cdiv(a: int, b: int) -> int:
    """ceil(a / b). Triton's own takes constants of its compiler as well, and microseconds for that."""
    return -(-a // b)


def parts_tiles(units: int, ctas: int, blocks_d: int, bv: int) -> bool:
    """Whether `hopper_pipeline.split_work` parts tiles of such a launch, whose sums then need memory."""
    tiles = cdiv(units, bv // 128)
    idle = (cdiv(tiles, ctas) * ctas - tiles) * blocks_d
    return bv > 128 and tiles > ctas and idle > 8 * ctas


def ctas_for(units: int, most: int, blocks_d: int, bv: int) -> int:
    """CTAs a block of rows, of `most` that there could be: as many as are busy to the end.

    1002 tiles are 8 rounds for 132 CTAs and for 126, but of 132 only 78 have a tile in the last, which are
    too few to load it at the pace of memory.
    """
    if parts_tiles(units, most, blocks_d, bv):
        return most
    tiles = max(1, cdiv(units, bv // 128))
    return cdiv(tiles, cdiv(tiles, most))


def tma_fits(x: Tensor) -> bool:
    """Rows of 16-byte multiples at 16-byte addresses, none over another as `expand` has them."""
    rows = x.stride(0) >= x.shape[1] and x.stride(0) * x.element_size() % 16 == 0
    return x.stride(1) == 1 and rows and x.data_ptr() % 16 == 0


def why_not(problem: Problem) -> str | None:
    """The reason why this kernel cannot run the problem, or None."""
    hidden, weight = problem.hidden, problem.weight
    assert hidden is not None and weight is not None
    if hidden.device.type != "cuda" or arguments.architecture(hidden.device) != "sm_90":
        return "it needs a GPU of compute capability 9.0 (H100, H200)"
    if hidden.dtype not in DTYPES:
        return f"it takes bf16 and fp16, not {hidden.dtype}"
    if problem.noise == "online":
        return "it draws with noise='grouped' or 'element', not 'online'"
    if weight.shape[1] % 8 or not tma_fits(weight):
        return "weight rows must be contiguous, of a multiple of 16 bytes, at 16-byte addresses"
    if problem.first_id % 128:
        return f"a shard must start at a multiple of 128, not at {problem.first_id}"
    row_blocks = cdiv(problem.num_rows, 128)
    if row_blocks > sm_count(hidden.device):
        return f"at most {128 * sm_count(hidden.device)} rows a call, got {problem.num_rows}"
    return None


@functools.cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def beside(problem: Problem) -> Problem:
    """The problem with the entries of neighbouring ids side by side in memory, as the kernel reads them."""
    spread = {
        name: table.contiguous()
        for name in ("head_bias", "logit_bias", "mask")
        if (table := getattr(problem, name)) is not None and table.shape[-1] > 1 and table.stride(-1) != 1
    }
    return replace(problem, **spread) if spread else problem


def pitch_16(table: Tensor | None) -> bool:
    """Whether rows of a [V] or [B, V] table lie a multiple of 16 entries apart; a row that serves all of them
    counts as if it were repeated, as `warm_up` has it."""
    return table is None or ((table.dim() > 1 and table.stride(0)) or table.shape[-1]) % 16 == 0


@functools.cache
def box_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[dtype])


def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, columns], box_layout(rows, columns, x.dtype))


def variant(problem: Problem) -> hopper_configs.HopperConfig:
    """The compiled shape of the call: problems that share it, and differ in rows alone, share a kernel."""
    assert problem.weight is not None
    entry = tables.find(problem, "sm_90")
    if entry is not None and entry.config is not None:
        return hopper_configs.HopperConfig(**entry.config)
    return hopper_configs.pick(problem.num_rows, problem.weight.shape[1], problem.num_samples, problem.noise)


def run(problem: Problem) -> SampleResult:
    """Draw ids [B, K] from softmax(transform(hidden @ weight.T) / temperature); see `Problem` for shapes.

    A hidden that TMA cannot read (strided, or at an odd address) is copied first: B * D values; so is a bias
    or mask whose neighbouring ids do not lie side by side. Allocates the ids; with several samples a row,
    logprob or lse also one candidate of 8 to 20 bytes a row, sample and CTA or tile.
    """
    return _run(problem)


def candidates(problem: Problem) -> tuple[SampleResult, Tensor]:
    """The result, which leaves its ids to the keys, and the keys [B, K] int64; see `words.pack_key`."""
    shape = (problem.num_rows, problem.num_samples)
    keys = buffers.empty(shape, torch.int64, device_of(problem))
    return _run(problem, keys), keys


def meets(problem: Problem) -> bool:
    """Whether the kernel can exchange keys with the other ranks itself: it has them at its end."""
    return problem.num_samples == 1 and not (problem.want_logprob or problem.want_lse)


def run_linked(problem: Problem, link: Tensor, ranks: int) -> SampleResult:
    """`run` of all ranks together, for a problem that `meets`: the ids of the best of all shards.

    link: [6 + R] int64, see `ops.link`; its capacity is that of the rows at least.
    """
    return _run(problem, link=link, ranks=ranks)


def _run(
    problem: Problem, keys: Tensor | None = None, link: Tensor | None = None, ranks: int = 0
) -> SampleResult:
    """The result, and the keys [B, K] where asked for: made by the kernel, or by stage 2 from candidates."""
    hidden, weight = problem.hidden, problem.weight
    assert hidden is not None and weight is not None
    device = hidden.device
    B, V, K = problem.num_rows, problem.num_columns, problem.num_samples
    config = variant(problem)
    if not tma_fits(hidden):
        hidden = hidden.clone(memory_format=torch.contiguous_format)
    problem = beside(problem)
    per_id = arguments.table_arguments(problem)
    limit = max(0, min(V, problem.vocab_size - problem.first_id))
    units = cdiv(V if problem.store_logits else limit, 128)
    row_blocks = cdiv(B, config.rows)
    blocks_d = cdiv(weight.shape[1], config.bd)
    ctas = ctas_for(units, max(1, sm_count(device) // row_blocks), blocks_d, config.bv)
    wants_mass = problem.want_logprob or problem.want_lse
    in_one_launch = meets(problem)
    slots = 0 if in_one_launch else (ctas if K == 1 else units)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return buffers.empty(shape, dtype, device)

    with arguments.on_device(device):
        logits = empty(B, V) if problem.store_logits else None
        rows = arguments.row_arguments(problem)
        wide = config.bv > 128
        num_sums = 0
        if parts_tiles(units, ctas, blocks_d, config.bv):
            # a place for two warpgroups a CTA, see `hopper_carry.places`
            num_sums = ctas * row_blocks * 2 * config.rows0 * config.bv
        keeps = wide and K == 1 and problem.noise == "grouped"
        num_kept = ctas * row_blocks * 2 * config.rows0 * 128 if keeps else 0
        num_flags, scratch = 2 * sm_count(device), num_sums + num_kept
        state = workspace(B, scratch, num_flags, device) if in_one_launch or wide else None
        if state and wide:
            buffers.spoil(state.scratch)
        ids = scores = best_ids = winner_logits = tile_max = tile_sum = None
        if in_one_launch:
            ids = empty(B, 1, dtype=torch.int64) if keys is None else keys
        else:
            scores, best_ids = empty(K, B, slots), empty(K, B, slots, dtype=torch.int32)
            if wants_mass:
                winner_logits, tile_max, tile_sum = empty(K, B, slots), empty(B, slots), empty(B, slots)
        w, h = describe(weight, 128, config.bd), describe(hidden, config.box, config.bd)
        # the last before the kernel, so that a GPU which has caught up has nothing else to wait for
        sparse_rows, sparse_ids, sparse_values, starts, spoiled = arguments.sparse_tables(
            problem,
            128,
            units + units % 2,
            0,  # a tile of two units may end past the last
        )
        ready(hopper_kernel)[(ctas * row_blocks,)](
            w=w, h=h,
            keys_ptr=state.keys if state and in_one_launch else None,
            counters_ptr=state.counters if state and in_one_launch else None, ids_ptr=ids,
            kept_ptr=state.scratch[num_sums:] if state and keeps else None,
            sums_ptr=state.scratch if state and wide else None,
            flags_ptr=state.flags if state and wide else None, link_ptr=link,
            num_rows=B, num_columns=V, num_samples=K, size_d=weight.shape[1], units=units, num_slots=slots,
            first_id=problem.first_id, limit=limit, spoiled_ptr=spoiled,
            scale=host_scale(problem.temperature),
            **{name: rows[name] for name in rows if name != "temperature"},
            **{name: per_id[name] for name in per_id if name not in BESIDE},
            sparse_rows_ptr=sparse_rows, sparse_ids_ptr=sparse_ids, sparse_values_ptr=sparse_values,
            sparse_starts_ptr=starts,
            score_ptr=scores, id_ptr=best_ids, logit_ptr=winner_logits, max_ptr=tile_max, sum_ptr=tile_sum,
            logits_ptr=logits,
            HAS_SCALE=problem.logit_scale != 1.0, HAS_SOFTCAP=problem.softcap is not None, SINGLE=K == 1,
            WANT_MASS=wants_mass, GROUPED=problem.noise == "grouped",
            FAST=problem.math == "fast", PITCH_16=pitch_16(problem.logit_bias) and pitch_16(problem.mask),
            BV=config.bv, BD=config.bd, BOX=config.box, MW0=config.rows0, MW1=config.rows1,
            STAGES=config.stages, IN_FLIGHT=config.in_flight,
            CONSUMER_REGS=CONSUMER_REGISTERS, PRODUCER_REGS=PRODUCER_REGISTERS,
            KEYS=in_one_launch and keys is not None, RANKS=ranks,
            num_warps=4, maxnreg=MAX_REGISTERS, enable_fp_fusion=FUSE,
        )  # fmt: skip
        if scores is not None and best_ids is not None:
            launch = arguments.Launch(
                slots, rows, scores, best_ids, winner_logits, tile_max, tile_sum, logits, spoiled
            )
            return reduce_candidates(problem, launch, keys)._replace(implementation="hopper")
        assert ids is not None
        return SampleResult(ids, None, None, logits, "hopper")


def host_scale(temperature: float | Tensor) -> float:
    """c = log2(e) / temperature, 0 for greedy; a tensor of temperatures is divided on the device."""
    if isinstance(temperature, Tensor) or temperature == 0.0:
        return 0.0
    return LOG2_E / temperature
