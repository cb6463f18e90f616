"""Merge the draws of tensor-parallel ranks by the masses of their shards: two words a row cross the link."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks, noise


class Merged(NamedTuple):
    """What every rank computes alike from the same candidates."""

    ids: Tensor  # [B, K] int64 global ids, -1 where there is no draw
    rank: Tensor  # [B, K] int64, the rank whose candidate won; -1 where there is no draw
    lse: Tensor  # [B] fp32, natural log-sum-exp over all ranks; NaN in a bad row


def merge_log_mass(
    ids: Tensor, lse: Tensor, *, seed: int | Tensor, position: int | Tensor = 0, greedy: bool | Tensor = False
) -> Merged:
    """Pick one rank's candidate a row and sample, rank r with probability exp(lse[r]) / sum exp(lse).

        winner[b, k] = argmax over r of lse[r, b] + g[r, b, k],    g Gumbel from the words (RANK, unit r)

    With each rank's candidate drawn from its own shard, the result is exact in distribution for any split
    of the vocabulary (Algorithm I.4); it does not depend on the order in which candidates arrive, and every
    rank that runs it gets the same ids bit for bit: scores are compared, never summed.

    Args:
        ids: [R, B, K] int64, global ids; rank r's candidates are ids[r]. R >= 1, B <= 2**24, K <= 2**32.
        lse: [R, B] fp32 on the device of ids, natural log-sum-exp of y / temperature over the rank's shard,
            as `sample` returns it: -inf for a shard without an allowed id, never chosen beside one that has
            mass; NaN spoils the row.
        seed, position: as in `sample`, the same on every rank; a seed is required for that reason.
        greedy: bool, or a bool tensor, 0-d or [B]: rows drawn at temperature 0. There lse is the largest y,
            compared without noise; the lower rank wins a tie, which is the lower id when ranks hold rising
            ids.

    Returns:
        Merged. As with `sample`, a row where no rank has mass has id and rank -1, lse -inf; one with a NaN or
        +inf among its lse, or with a position on the device outside [0, 2**32), id and rank -1, lse NaN.
        lse log2(e) beyond fp32 counts as infinite (in a greedy row lse itself). Where a negative id is drawn,
        which no rank with mass has, id and rank are -1. No row disturbs another.

    Raises:
        ValueError: naming argument, rule and value, before any launch. The host reads no tensor on a GPU.

    Example:
        >>> import torch
        >>> ids = torch.tensor([[[3]], [[150]]])
        >>> merge_log_mass(ids, torch.tensor([[-50.0], [2.0]]), seed=1).ids.tolist()
        [[150]]
    """
    num_rows = _check_candidates(ids, lse)
    if isinstance(greedy, Tensor):
        checks.per_row("greedy", greedy, ids, num_rows, (torch.bool,))
    else:
        checks.flag("greedy", greedy)
    seed = checks.seed_bits(seed, ids, num_rows)
    position = checks.steps(position, ids, num_rows)
    with torch.no_grad():
        merged = merge_checked(ids, _spoiled(lse, position, greedy), seed, position, greedy)
    none = merged.ids < 0
    return merged._replace(ids=merged.ids.masked_fill(none, -1), rank=merged.rank.masked_fill(none, -1))


def _check_candidates(ids: Tensor, lse: Tensor) -> int:
    """The number of rows. Raises ValueError."""
    checks.check_tensor("ids", ids)
    if ids.dim() != 3 or ids.dtype != torch.int64:
        raise ValueError(
            f"ids must be int64 [R, B, K], got {checks.dtype_name(ids.dtype)} {checks.shape_of(ids)}; "
            "stack the ranks first"
        )
    checks.with_data("ids", ids)
    num_ranks, num_rows, num_samples = ids.shape
    if num_ranks == 0:
        raise ValueError("ids must hold at least one rank, got R = 0; pass every rank's candidates")
    checks.batch_size(num_rows)
    checks.sample_count(num_samples)
    checks.check_tensor("lse", lse)
    checks.same_device("lse", lse, ids)
    if lse.shape != (num_ranks, num_rows) or lse.dtype != torch.float32:
        raise ValueError(
            f"lse must be float32 [R, B] = [{num_ranks}, {num_rows}] (from ids), "
            f"got {checks.dtype_name(lse.dtype)} {checks.shape_of(lse)}; stack the ranks first"
        )
    return num_rows


def _spoiled(lse: Tensor, position: int | Tensor, greedy: bool | Tensor) -> Tensor:
    """lse [R, B], NaN in rows that are to be -1, and -inf where what is compared would be."""
    compared = torch.where(_greedy_rows(greedy, lse), lse, lse * noise.LOG2_E)
    bad = compared == torch.inf
    if isinstance(position, Tensor):
        bad = bad | (position < 0) | (position >= noise.MAX_POSITION)
    return lse.masked_fill(compared == -torch.inf, -torch.inf).masked_fill(bad, torch.nan)


def _greedy_rows(greedy: bool | Tensor, lse: Tensor) -> Tensor:
    """On the device: a captured graph copies nothing from the host."""
    return torch.full((), greedy, device=lse.device) if isinstance(greedy, bool) else greedy


def merge_checked(
    ids: Tensor, lse: Tensor, seed: int | Tensor, position: int | Tensor, greedy: bool | Tensor
) -> Merged:
    """`merge_log_mass` of candidates that ranks have drawn, from the arguments of a checked call."""
    num_samples = ids.shape[2]
    if ids.is_cuda:
        from ..ops import pick_rank  # needs Triton

        rank = pick_rank.pick_rank(lse, num_samples, seed, position, greedy)
    else:
        rank = _pick_rank(lse, num_samples, seed, position, greedy)
    total = torch.where(_greedy_rows(greedy, lse), lse.amax(0), torch.logsumexp(lse, 0))
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
    return torch.where(_greedy_rows(greedy, lse), plain, score).argmax(0).t().contiguous()
