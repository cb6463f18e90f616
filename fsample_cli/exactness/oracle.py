"""What must come out: the draw in float64, dense, from the contract's words and nothing of the
implementations.

Only the definition of the noise (`fsample_kernels.noise`: counter to word, the map of groups) is shared.
Everything runs on the CPU, one row and one sample at a time where that is simpler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fsample_kernels import noise

# An implementation works in fp32: a logit, its scaling and two logarithms near 30 are each right to a few
# 2^-20, and approximate instructions to a few 2^-20 more. Two base-2 scores closer than this may change
# places.
SCORE_TOLERANCE = 2.0**-15
SUM_ERROR = 2.0**-20  # relative error of an fp32 sum of 32 exponentials, approximate ones included


@dataclass(frozen=True)
class Expected:
    """The token of each row, and whether rounding in fp32 could have led elsewhere."""

    ids: Tensor  # [B] int64
    runner_up: (
        Tensor  # [B] int64: token with the second best score (for groups: the second best group's draw)
    )
    margin: Tensor  # [B] float64: best score minus second best, base 2
    close: Tensor  # [B] bool: the margin, or a turn inside the winning group, lies within fp32's error


def expected(
    logits: Tensor,
    temperature: float | Tensor,
    seed: int | Tensor,
    position: int | Tensor,
    sample: int,
    algorithm: str,
) -> Expected:
    """logits [B, V] (y, -inf where forbidden) -> what `algorithm` must draw; temperature > 0, one or [B].

    seed and position as in `fsample_kernels.sample`. Rows without a finite logit are not meant for this.
    """
    degrees = torch.as_tensor(temperature, dtype=torch.float64).expand(logits.shape[0])
    x = logits.detach().cpu().double() * (noise.LOG2_E / degrees)[:, None]  # [B, V] base 2
    streams = noise.row_streams(_host(seed), _host(position), x.shape[0], torch.device("cpu")).lanes()
    if algorithm == "element":
        return _element(x, streams, sample)
    if algorithm == "grouped":
        return _grouped(x, streams, sample, 0)
    if algorithm == "online":
        return _online(x, streams, sample)
    raise ValueError(f"algorithm must be element, grouped or online, got {algorithm!r}")


def _host(value: int | Tensor) -> int | Tensor:
    return value.cpu() if isinstance(value, Tensor) else value


def _element(x: Tensor, streams: noise.RowStreams, sample: int) -> Expected:
    vocab = x.shape[1]
    unit = torch.arange(-(-vocab // 4))
    words = torch.stack(streams.words(unit, sample, noise.ELEMENT), dim=-1)  # [B, ceil(V / 4), 4]
    word = words.flatten(-2).expand(x.shape[0], -1)[:, :vocab]
    u = noise.uniform32(word, torch.float64).clamp(max=1 - 2.0**-24)
    return _best(x - torch.log2(-torch.log1p(-u)))


def _best(score: Tensor) -> Expected:
    """score [B, N] over ids 0..N-1."""
    if score.shape[1] == 1:
        rows = score.shape[0]
        zero = torch.zeros(rows, dtype=torch.int64)
        return Expected(
            zero, zero, torch.full((rows,), math.inf).double(), torch.zeros(rows, dtype=torch.bool)
        )
    top = score.topk(2, dim=1)
    margin = top.values[:, 0] - top.values[:, 1]
    return Expected(score.argmax(1), top.indices[:, 1], margin, margin < SCORE_TOLERANCE)


def _grouped(x: Tensor, streams: noise.RowStreams, sample: int, first_block: int) -> Expected:
    """One Gumbel per group of 32 ids and one draw inside the winning group; ids count from 128 *
    first_block.
    """
    rows, vocab = x.shape
    blocks = -(-vocab // noise.BLOCK)
    padded = torch.full((rows, blocks * noise.BLOCK), -math.inf, dtype=torch.float64)
    padded[:, :vocab] = x
    ids = torch.arange(blocks * noise.BLOCK)
    members = torch.empty(blocks * 4, noise.GROUP_SIZE, dtype=torch.int64)
    members[noise.group_of(ids), noise.member_of(ids)] = ids
    inside = padded[:, members]  # [B, groups, 32]
    log_mass = torch.logsumexp(inside * math.log(2), dim=-1) / math.log(2)
    groups = torch.arange(blocks * 4) + 4 * first_block
    words = streams.words(groups, sample, noise.GROUP)  # four of [B or 1, groups]
    r0, r1, r2, r3 = (word.expand(rows, -1) for word in words)
    u = noise.uniform64(r2, r3, torch.float64).clamp(max=1 - 2.0**-24)
    order = _best(log_mass - torch.log2(-torch.log1p(-u)))
    drawn = [_turns(inside[b, g], int(r0[b, g]), int(r1[b, g])) for b, g in enumerate(order.ids.tolist())]
    others = [
        _turns(inside[b, g], int(r0[b, g]), int(r1[b, g])) for b, g in enumerate(order.runner_up.tolist())
    ]
    place = torch.tensor([member for member, _ in drawn])
    other = torch.tensor([member for member, _ in others])
    base = first_block * noise.BLOCK
    return Expected(
        members[order.ids, place] + base,
        members[order.runner_up, other] + base,
        order.margin,
        order.close | torch.tensor([close for _, close in drawn]),
    )


def _turns(x: Tensor, r0: int, r1: int) -> tuple[int, bool]:
    """Member drawn from x [32] by the 64-bit uniform, the lighter half first at each of five turns.

    Also whether any turn came within fp32's error of going the other way: the error of the sums it compares
    with and of what was subtracted before.
    """
    if not bool(torch.isfinite(x).any()):
        return 0, False
    sums = torch.exp2(x - x.max())
    levels = []
    for half in (16, 8, 4, 2, 1):
        levels.append(sums)
        sums = sums[:half] + sums[half:]
    t = (r0 + (r1 + 0.5) * 2.0**-32) * 2.0**-32 * float(sums[0])
    member, close, error = 0, False, float(sums[0]) * 2.0**-44
    for bit, level in enumerate(reversed(levels)):
        left, right = float(level[member]), float(level[member + (1 << bit)])
        light = min(left, right)
        close |= light > 0 and abs(t - light) <= light * SUM_ERROR + error
        takes_light = t < light
        if not takes_light:
            t -= light
            error += light * SUM_ERROR
        member += ((left <= right) != takes_light) << bit
    return member, close


def _online(x: Tensor, streams: noise.RowStreams, sample: int) -> Expected:
    """Blocks of 4096 ids drawn by groups, each taking over from those before with the odds of its mass."""
    rows, vocab = x.shape
    size = noise.ONLINE_BLOCK
    best: Expected | None = None
    total = torch.full((rows,), -math.inf, dtype=torch.float64)
    for number in range(-(-vocab // size)):
        part = x[:, number * size : (number + 1) * size]
        new = _grouped(part, streams, sample, number * size // noise.BLOCK)
        mass = torch.logsumexp(part * math.log(2), dim=1) / math.log(2)
        if best is None:
            best, total = new, mass
            continue
        r0, r1, _, _ = streams.words(torch.tensor([number]), sample, noise.ONLINE)
        u = noise.uniform64(r0, r1, torch.float64).expand(rows, 1)[:, 0]
        joint = torch.logaddexp2(total, mass)
        old_share, new_share = torch.exp2(total - joint), torch.exp2(mass - joint)
        light = torch.minimum(old_share, new_share)
        takes_light = u < light
        replace = takes_light == (new_share < old_share)
        close = ((u - light).abs() <= light * SUM_ERROR * 8) & (light > 0)
        best = Expected(
            torch.where(replace, new.ids, best.ids),
            torch.where(replace, best.ids, new.ids),
            torch.where(replace, new.margin, best.margin),
            torch.where(replace, new.close, best.close) | close,
        )
        total = joint
    assert best is not None
    return best
