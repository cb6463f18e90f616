"""The draw of a rank by the masses of the shards, one launch: `distributed.merge` on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsample_kernels import buffers, noise
from fsample_kernels.ops import arguments
from fsample_kernels.ops.compiling import FUSE, active, ready
from fsample_kernels.ops.device import log2_exponential, philox, uniform64

BLOCK = 128
LOG2_E = tl.constexpr(noise.LOG2_E)
RANK_DOMAIN = tl.constexpr(noise.RANK << 24)


@triton.jit
def rank_score(lse, r0, r1):
    """Gumbel-max score of a rank in base 2."""
    return lse * LOG2_E - log2_exponential(uniform64(r0, r1), False)


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_samples", "seed_stride", "seed_low", "seed_high", "position_stride", "position",
        "numbered", "greedy_stride",
    ],
    do_not_specialize_on_alignment=["seed_ptr", "position_ptr", "greedy_ptr"],
)  # fmt: skip
def pick_rank_kernel(
    lse_ptr,  # [R, B] fp32
    rank_ptr,  # [B, K] int64
    num_rows, num_samples,
    seed_ptr, seed_stride, seed_low, seed_high, position_ptr, position_stride, position, numbered,
    greedy_ptr, greedy_stride,  # [B] bool, or None: no row is
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sample of BLOCK rows. A tie goes to the lower rank."""
    pid = tl.program_id(0)  # of one dimension, as every grid here: the others end at 65,535
    rows = pid // num_samples * BLOCK + tl.arange(0, BLOCK)
    sample = pid % num_samples
    live = rows < num_rows
    if seed_ptr is None:
        key0 = tl.zeros_like(rows) + seed_low
        key1 = tl.zeros_like(rows) + seed_high
    else:
        seed = tl.load(seed_ptr + rows * seed_stride, mask=live, other=0)
        key0 = seed.to(tl.int32)
        key1 = (seed >> 32).to(tl.int32)
    if position_ptr is None:
        step = tl.zeros_like(rows) + position
    else:
        step = tl.load(position_ptr + rows * position_stride, mask=live, other=0).to(tl.int32)
    word = (rows * numbered).to(tl.uint32, bitcast=True) | RANK_DOMAIN
    key0 = key0.to(tl.uint32, bitcast=True)
    key1 = key1.to(tl.uint32, bitcast=True)
    step = step.to(tl.uint32, bitcast=True)
    counter = tl.zeros_like(rows) + sample
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    rank = tl.zeros((BLOCK,), tl.int64)
    for r in tl.static_range(RANKS):
        lse = tl.load(lse_ptr + r * num_rows + rows, mask=live, other=0.0)
        unit = tl.zeros_like(rows) + r
        r0, r1, _, _ = philox(
            unit.to(tl.uint32, bitcast=True), step, counter.to(tl.uint32, bitcast=True), word, key0, key1
        )
        score = rank_score(lse, r0, r1)
        if greedy_ptr is not None:
            score = tl.where(tl.load(greedy_ptr + rows * greedy_stride, mask=live, other=0) != 0, lse, score)
        rank = tl.where(score > best, r, rank)
        best = tl.maximum(score, best)
    tl.store(rank_ptr + rows.to(tl.int64) * num_samples + sample, rank, mask=live)


def pick_rank(
    lse: Tensor, num_samples: int, seed: int | Tensor, position: int | Tensor, greedy: bool | Tensor
) -> Tensor:
    """Rank [B, K] int64 that each sample comes from; lse [R, B] fp32, the rest as `merge_log_mass` takes it.

    A greedy bool serves all rows. Rows whose lse are all -inf, or NaN, get any rank.
    """
    num_ranks, num_rows = lse.shape
    rank = buffers.empty((num_rows, num_samples), torch.int64, lse.device)
    seed_tensor, position_tensor = arguments.row_tensor(seed), arguments.row_tensor(position)
    if isinstance(greedy, bool):
        greedy_tensor = torch.ones((), dtype=torch.bool, device=lse.device) if greedy else None
    else:
        greedy_tensor = arguments.row_tensor(greedy)
    with arguments.on_device(lse.device):
        ready(pick_rank_kernel)[(triton.cdiv(num_rows, BLOCK) * num_samples,)](
            lse.contiguous(), rank, num_rows, num_samples,
            seed_tensor, arguments.stride_of(seed_tensor),
            0 if isinstance(seed, Tensor) else arguments.signed32(seed & 0xFFFFFFFF),
            0 if isinstance(seed, Tensor) else arguments.signed32(seed >> 32 & 0xFFFFFFFF),
            position_tensor, arguments.stride_of(position_tensor),
            0 if isinstance(position, Tensor) else arguments.signed32(position & 0xFFFFFFFF),
            0 if seed_tensor is not None and seed_tensor.dim() else 1,
            greedy_tensor, arguments.stride_of(greedy_tensor),
            RANKS=num_ranks, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=FUSE,
        )  # fmt: skip
    return rank.zero_() if active() else rank  # where nothing was picked: callers index by it
