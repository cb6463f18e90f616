"""The draw inside one aligned block of 128 ids by its masses, and the choice between two masses."""

from __future__ import annotations

import torch
from torch import Tensor

from . import noise
from .noise import BLOCK, RowStreams


def merge_masses(old: Tensor, new: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Algorithm I.3, Lemma D.3: log2 of 2**old + 2**new, and whether `u` in (0, 1) picks the new side.

    The new side is picked with probability 2**new / (2**old + 2**new). u * total falls in the lighter side
    first, so that a tiny mass keeps its digits on either side, and a side of mass 0 (-inf) is not picked
    beside another.
    """
    top = torch.maximum(old, new)
    anchor = top.masked_fill(top == -torch.inf, 0.0)
    mass_old, mass_new = torch.exp2(old - anchor), torch.exp2(new - anchor)
    total = mass_old + mass_new
    old_is_light = mass_old <= mass_new
    takes_light = u * total < torch.minimum(mass_old, mass_new)
    return anchor + total.log2(), takes_light ^ old_is_light


def draw_in_block(
    x: Tensor, block: Tensor, streams: RowStreams, sample: Tensor, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    """One grouped draw inside one aligned block of 128 ids for each draw; fp32.

    x: [..., 128] logits in base 2. block: [...] global block number. streams, sample: the words of each draw,
    broadcast to [...]. first_id: where the shard starts. Returns the global ids [...] and their x [...].
    """
    split = x.view(*x.shape[:-1], 16, 4, 2).transpose(-3, -2).flatten(-2)  # [..., 4, 32]: member j of group q
    m = split.amax(-1)
    m = m.masked_fill(m == -torch.inf, 0.0)
    levels = [torch.exp2(split - m[..., None])]
    for half in (16, 8, 4, 2, 1):
        levels.append(levels[-1][..., :half] + levels[-1][..., half:])
    total = levels.pop()[..., 0]  # [..., 4]
    group = block[..., None] * 4 + torch.arange(4, device=x.device)
    r0, r1, r2, r3 = streams.lanes().words(group, sample[..., None], noise.group_domain(group, first_id))
    member = descend(levels, *noise.split_uniform(r0, r1, total))
    score = noise.log_mass_score(m + total.log2(), noise.exponential(noise.uniform64(r2, r3)))
    ids = noise.id_of(group, member)
    tied = score == score.amax(-1, keepdim=True)
    best = torch.where(tied, ids, torch.iinfo(torch.int64).max).amin(-1)  # lowest id of the best score
    # nothing ties beside a NaN: any id, the caller drops the row
    best = torch.where(tied.any(-1), best, ids[..., 0])
    return best, x.gather(-1, (best & (BLOCK - 1))[..., None])[..., 0]


def descend(levels: list[Tensor], hi: Tensor, lo: Tensor) -> Tensor:
    """Member j in 0..31 that t = hi + lo falls on in a tree of partial sums, the lighter side always first.

    levels[k]: [..., 32 >> k], levels[k + 1][j] = levels[k][j] + levels[k][j + (16 >> k)], k = 0..4. hi, lo:
    [...] with 0 < t < total. A side of mass 0 is never entered: as the lighter one, t < 0 is false.
    """
    member = torch.zeros_like(hi, dtype=torch.int64)
    for bit, sums in enumerate(reversed(levels)):
        left = sums.gather(-1, member[..., None])[..., 0]
        right = sums.gather(-1, member[..., None] + (1 << bit))[..., 0]
        left_is_light = left <= right
        rest_hi = hi - torch.minimum(left, right)
        rest = rest_hi + lo
        takes_light = rest < 0
        member = member + ((takes_light ^ left_is_light).long() << bit)
        lo = torch.where(takes_light, lo, lo - (rest - rest_hi))
        hi = torch.where(takes_light, hi, rest)
    return member
