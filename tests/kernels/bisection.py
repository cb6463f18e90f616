"""What a draw's probabilities are, exactly: of all 2^64 words, where the answer changes, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

WORDS = 1 << 64
Members = Callable[[list[int]], list[int]]
Scores = Callable[[list[int]], list[float]]


def tail_groups() -> dict[str, Tensor]:
    """log2 masses of 32 members: the groups that defeat a draw of fewer bits (kernel-notes 7.7), and plain
    ones.
    """
    shuffled = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    spread = torch.linspace(-18, -58, 24)
    normal = torch.randn(32, generator=torch.Generator().manual_seed(1))
    one, two = torch.tensor([0.0]), torch.tensor([0.0, math.log2(0.31)])
    return {
        "one heavy, the rest 2**-45": torch.cat([one, torch.full((31,), -45.0)]),
        "the last heavy, the rest 2**-39": torch.cat([torch.full((31,), -39.0), one]),
        "two heavy, the rest 2**-40": torch.cat([two, torch.full((30,), -40.0)]),
        "two equal, the rest 2**-38": torch.cat([torch.zeros(2), torch.full((30,), -38.0)]),
        "eight heavy, a spread tail": torch.cat([torch.linspace(0, -3, 8), spread])[shuffled],
        "half heavy, half at 2**-36": torch.cat([torch.zeros(16), torch.full((16,), -36.0)])[shuffled],
        "flat": torch.zeros(32),
        "half of it forbidden": torch.cat([torch.full((16,), -torch.inf), torch.linspace(0, -40, 16)]),
        "one alive": torch.cat([torch.full((13,), -torch.inf), one, torch.full((18,), -torch.inf)]),
        "three alive": torch.cat(
            [one, torch.full((15,), -torch.inf), one - 30, torch.full((14,), -torch.inf), one - 38]
        ),
        "a geometric ladder": -torch.arange(32.0)[shuffled] * 1.5,
        "a steep ladder, high logits": 300.0 - torch.arange(32.0) * 4,
        "normal logits": normal * 3 * math.log2(math.e),
    }


def measures(member: Members, points: int = 63) -> dict[int, int]:
    """How many of the 2^64 words give each member. `member` is asked for up to `points` words at a time.

    The words that give a member must be a run: a draw falls on [0, total) in one order of the members.
    """
    measure: dict[int, int] = {}
    start = 0
    while start < WORDS:
        current = member([start])[0]
        assert current not in measure, "the draw met a member twice"
        end = _first(partial(_others, member, current), start, points)
        measure[current] = end - start
        start = end
    return measure


def _others(member: Members, held: int, words: list[int]) -> list[bool]:
    return [found != held for found in member(words)]


def share_below(score: Scores, limit: float, points: int = 63) -> float:
    """The share of the 2^64 words whose score, which rises with the word, is below the limit."""
    return _first(lambda words: [s >= limit for s in score(words)], -1, points) / WORDS


def _first(holds: Callable[[list[int]], list[bool]], low: int, points: int) -> int:
    """The first word above `low` for which it holds, 2^64 if none; `holds` changes once."""
    high = WORDS
    while high - low > 1:
        step = max(1, (high - low) // (points + 1))
        words = list(range(low + step, high, step))[:points]
        found = holds(words)
        high = min((word for word, yes in zip(words, found, strict=True) if yes), default=high)
        low = max([low, *(word for word, yes in zip(words, found, strict=True) if not yes and word < high)])
    return high


def assert_claim(x: Tensor, measure: dict[int, int]) -> float:
    """Hold the measures of members against 2^x: `assert_probabilities`."""
    assert sum(measure.values()) == WORDS
    return assert_probabilities(x, [measure.get(j, 0) / WORDS for j in range(len(x))])


def assert_probabilities(x: Tensor, found: list[float]) -> float:
    """Hold probabilities against 2^x: 1 % relative down to 2**-40 of the total, 2**-44 absolute below, total
    variation under 2**-20. Returns the largest relative error above 2**-40.
    """
    right = torch.softmax(x.double() * math.log(2), 0)
    got = torch.tensor(found, dtype=torch.float64)
    assert (got[x == -torch.inf] == 0).all()
    wrong = (got - right).abs()
    budget = torch.where(right >= 2.0**-40, 0.01 * right, 2.0**-44)
    assert (wrong <= budget).all(), list(zip(right.tolist(), got.tolist(), strict=True))
    assert wrong.sum() / 2 < 2.0**-20
    return float((wrong / right)[right >= 2.0**-40].max())


def split(words: list[int], device: str = "cpu") -> tuple[Tensor, Tensor]:
    """The two 32-bit halves of 64-bit words, upper first, int64."""
    high = torch.tensor([word >> 32 for word in words], device=device)
    return high, torch.tensor([word & 0xFFFFFFFF for word in words], device=device)
