"""Stage 2: the best of a row's candidates, one a tile or CTA; its log-probability; the row's mass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsample_kernels import buffers
from fsample_kernels.ops.arguments import Launch
from fsample_kernels.ops.compiling import FUSE, ready
from fsample_kernels.ops.device import LN_2, NO_ID, base2_scale
from fsample_kernels.ops.epilogue import greedy_at
from fsample_kernels.types import Problem, SampleResult

BLOCK_T = 1024


@triton.jit(
    do_not_specialize=("num_rows", "num_samples", "num_tiles", "temperature_stride", "position_stride"),
    do_not_specialize_on_alignment=("temperature_ptr", "position_ptr", "spoiled_ptr"),
)
def reduce_candidates_kernel(
    score_ptr, id_ptr, logit_ptr,  # [K, B, T]
    max_ptr, sum_ptr,  # [B, T]
    temperature_ptr, temperature_stride, temperature, position_ptr, position_stride, spoiled_ptr,
    out_ids_ptr, out_logprob_ptr, out_lse_ptr, out_keys_ptr,  # [B, K], [B, K], [B], [B, K]
    num_rows, num_samples, num_tiles,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    sample = pid // num_rows
    row = pid % num_rows
    first = pid.to(tl.int64) * num_tiles
    offs_t = tl.arange(0, BLOCK_T)

    best = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK_T,), NO_ID, tl.int32)
    best_at = tl.zeros((BLOCK_T,), tl.int32)
    t = tl.zeros_like(num_tiles)
    while t < num_tiles:
        mask_t = t + offs_t < num_tiles
        score = tl.load(score_ptr + first + t + offs_t, mask=mask_t, other=float("-inf"))
        candidate = tl.load(id_ptr + first + t + offs_t, mask=mask_t, other=NO_ID)
        wins = (score > best) | ((score == best) & (candidate < best_id))
        best = tl.where(wins, score, best)
        best_id = tl.where(wins, candidate, best_id)
        best_at = tl.where(wins, t + offs_t, best_at)
        t += BLOCK_T
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top, best_id, NO_ID), axis=0)

    if temperature_ptr is None:
        heat = tl.full((), 0.0, tl.float32) + temperature
    else:
        heat = tl.load(temperature_ptr + row * temperature_stride)
    good = (heat >= 0.0) & (heat < float("inf")) & (top < float("inf"))
    if position_ptr is not None:
        position = tl.load(position_ptr + row.to(tl.int64) * position_stride).to(tl.int64)
        good = good & (position >= 0) & (position < 4294967296)
    if spoiled_ptr is not None:
        good = good & (tl.load(spoiled_ptr + row) == 0)
    drawn = good & (top > float("-inf"))
    offs_out = row.to(tl.int64) * num_samples + sample
    chosen = tl.where(drawn, winner, -1).to(tl.int64)
    tl.store(out_ids_ptr + offs_out, chosen)
    if out_keys_ptr is not None:  # words.pack_key: what other shards of the vocabulary compare
        score = tl.where(good, top, float("inf")) + 0.0  # + 0.0 makes -0.0 equal to 0.0
        bits = score.to(tl.int32, bitcast=True)
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        tl.store(out_keys_ptr + offs_out, (ordered << 32) | (0x7FFFFFFF - chosen))

    if max_ptr is not None:
        first = row.to(tl.int64) * num_tiles
        m = tl.full((BLOCK_T,), float("-inf"), tl.float32)
        t = tl.zeros_like(num_tiles)
        while t < num_tiles:
            mask_t = t + offs_t < num_tiles
            m = tl.maximum(m, tl.load(max_ptr + first + t + offs_t, mask=mask_t, other=float("-inf")))
            t += BLOCK_T
        highest = tl.max(m, axis=0)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.zeros((BLOCK_T,), tl.float32)
        t = tl.zeros_like(num_tiles)
        while t < num_tiles:
            mask_t = t + offs_t < num_tiles
            m = tl.load(max_ptr + first + t + offs_t, mask=mask_t, other=float("-inf"))
            total += tl.load(sum_ptr + first + t + offs_t, mask=mask_t, other=0.0) * tl.exp2(m - base)
            t += BLOCK_T
        lse2 = base + tl.log2(tl.sum(total, axis=0))  # -inf where nothing is allowed
        greedy = greedy_at(heat)
        if out_lse_ptr is not None:
            lse = tl.where(greedy, highest, lse2 * LN_2)
            if sample == 0:
                tl.store(out_lse_ptr + row, tl.where(good, lse, float("nan")))
        if out_logprob_ptr is not None:
            # The tile of the winner: scores are equal in it only, or the lower id has won.
            at = tl.min(tl.where((best == top) & (best_id == winner), best_at, NO_ID), axis=0)
            found = at < num_tiles
            y = tl.load(logit_ptr + pid.to(tl.int64) * num_tiles + at, mask=found, other=0.0)
            logprob = tl.minimum((y * base2_scale(heat) - lse2) * LN_2, 0.0)
            tl.store(
                out_logprob_ptr + offs_out, tl.where(drawn, tl.where(greedy, 0.0, logprob), float("nan"))
            )


def kernel_arguments(
    launch: Launch, ids: Tensor, logprob: Tensor | None, lse: Tensor | None, keys: Tensor | None = None
) -> dict[str, object]:
    """Every argument of `reduce_candidates_kernel`, by name."""
    K, B, T = launch.scores.shape
    shared = ("temperature_ptr", "temperature_stride", "temperature", "position_ptr", "position_stride")
    return {
        "score_ptr": launch.scores, "id_ptr": launch.ids, "logit_ptr": launch.winner_logits,
        "max_ptr": launch.tile_max, "sum_ptr": launch.tile_sum, "spoiled_ptr": launch.spoiled,
        **{name: launch.kernel_arguments[name] for name in shared},
        "out_ids_ptr": ids, "out_logprob_ptr": logprob, "out_lse_ptr": lse,
        "out_keys_ptr": keys,
        "num_rows": B, "num_samples": K, "num_tiles": T, "BLOCK_T": BLOCK_T,
    }  # fmt: skip


def reduce_candidates(problem: Problem, launch: Launch, keys: Tensor | None = None) -> SampleResult:
    """Pick each row's winner among the candidates of `launch`; fill keys [B, K] where given."""
    K, B, _ = launch.scores.shape
    device = launch.scores.device
    ids = buffers.empty((B, K), torch.int64, device)
    logprob = buffers.empty((B, K), torch.float32, device) if problem.want_logprob else None
    lse = buffers.empty((B,), torch.float32, device) if problem.want_lse else None
    values = kernel_arguments(launch, ids, logprob, lse, keys)
    ready(reduce_candidates_kernel)[(B * K,)](**values, num_warps=4, enable_fp_fusion=FUSE)
    return SampleResult(ids, logprob, lse, launch.logits, "triton")
