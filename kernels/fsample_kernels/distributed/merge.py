"""Merge the draws of tensor-parallel ranks by the masses of their shards: two words a row cross the link."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import noise


class Merged(NamedTuple):
    """What every rank computes alike from the same candidates."""

    ids: Tensor  # [B, K] int64 global ids, -1 in rows without a draw
    rank: Tensor  # [B, K] int64, the rank whose candidate won; -1 in rows without a draw
    lse: Tensor  # [B] fp32, natural log-sum-exp over all ranks; NaN in a bad row


def merge_log_mass(
    ids: Tensor, lse: Tensor, *, seed: int | Tensor, position: int | Tensor = 0, greedy: bool | Tensor = False
) -> Merged:
    """Pick one rank's candidate a row and sample, rank r with probability exp(lse[r]) / sum exp(lse).

        winner[b, k] = argmax over r of lse[r, b] + g[r, b, k],    g Gumbel from the words (RANK, unit r)

    With each rank's candidate drawn from its own shard, the result is exact in distribution for any split
    of the vocabulary (Algorithm I.4); it does not depend on the order in which candidates arrive, and every
    rank that runs it gets the same ids bit for bit: scores are compared, never summed.

    Args: ids: [R, B, K] int64, global ids; rank r's candidates are ids[r]. lse: [R, B] fp32, natural
        log-sum-exp of y / temperature over the rank's shard, as `sample` returns it: -inf
            for a shard without an allowed id, never chosen beside one that has mass; NaN spoils the row.
        seed, position: as in `sample`, the same on every rank; a seed is required for that reason.
        greedy: bool, or [B] bool: rows drawn at temperature 0. There lse is the largest y, compared without
            noise; the lower rank wins a tie, which is the lower id when ranks hold rising ids.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.

    Example:
        >>> import torch
        >>> ids = torch.tensor([[[3]], [[150]]])
        >>> merge_log_mass(ids, torch.tensor([[-50.0], [2.0]]), seed=1).ids.tolist()
        [[150]]
    """
    if ids.dim() != 3 or ids.dtype != torch.int64:
        raise ValueError(
            f"ids must be int64 [R, B, K], got {ids.dtype} {list(ids.shape)}; stack the ranks first"
        )
    num_ranks, num_rows, num_samples = ids.shape
    if num_ranks == 0:
        raise ValueError("ids must hold at least one rank, got R = 0; pass every rank's candidates")
    if lse.shape != (num_ranks, num_rows) or lse.dtype != torch.float32 or lse.device != ids.device:
        raise ValueError(
            f"lse must be float32 [R, B] = [{num_ranks}, {num_rows}] on {ids.device} (from ids), "
            f"got {lse.dtype} {list(lse.shape)} on {lse.device}"
        )
    for name, value in (("seed", seed), ("position", position), ("greedy", greedy)):
        if isinstance(value, Tensor) and tuple(value.shape) not in ((), (num_rows,)):
            raise ValueError(f"{name} must be 0-d or [B] with B = {num_rows}, got {list(value.shape)}")
    if ids.is_cuda:
        from ..ops import pick_rank  # needs Triton

        rank = pick_rank.pick_rank(lse, num_samples, seed, position, greedy)
    else:
        rank = _pick_rank(lse, num_samples, seed, position, greedy)
    picks = torch.full((), greedy, device=ids.device) if isinstance(greedy, bool) else greedy
    total = torch.where(picks, lse.amax(0), torch.logsumexp(lse, 0))
    dead = (total.isnan() | (total == -torch.inf))[:, None]
    chosen = ids.gather(0, rank[None])[0]
    return Merged(chosen.masked_fill(dead, -1), rank.masked_fill(dead, -1), total)


def _pick_rank(
    lse: Tensor, num_samples: int, seed: int | Tensor, position: int | Tensor, greedy: bool | Tensor
) -> Tensor:
    """The winner [B, K] of lse [R, B]; the lower rank on a tie."""
    num_ranks, num_rows = lse.shape
    streams = noise.row_streams(seed, position, num_rows, lse.device)
    units = torch.arange(num_ranks, device=lse.device)[:, None, None]
    samples = torch.arange(num_samples, device=lse.device)[:, None]
    r0, r1, _, _ = streams.words(units, samples, noise.RANK)  # [R, K, B]
    plain = lse[:, None].expand(-1, num_samples, -1)
    score = noise.log_mass_score(plain * noise.LOG2_E, noise.exponential(noise.uniform64(r0, r1)))
    picks = torch.full((), greedy, device=lse.device) if isinstance(greedy, bool) else greedy
    return torch.where(picks, plain, score).argmax(0).t().contiguous()
