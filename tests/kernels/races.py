"""How often the lighter of two sides wins a race of log-mass + Gumbel, from all the words either can get.

Side i wins where E_i / mass_i is the smaller, E_i from its 64-bit word. Beside one word of the heavier side
the lighter wins with a run of words, 0 and up, whose end is found by bisection: a share of all words that
must be 1 - exp(-E ratio), and that rises with the heavier side's word. So the words at which it is asked for,
0 and the last among them, part all 2^64 into strata, and the shares at the ends bound the probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fsample_kernels import noise
from tests.kernels import stage_kernels

Halves = tuple[Tensor, Tensor]  # of 64-bit words, upper first, int64 [n]
Wins = Callable[[Halves, Halves], Tensor]  # heavier, lighter -> whether the lighter wins, bool [n]
Uint64s = np.ndarray[tuple[int], np.dtype[np.uint64]]

LAST = (1 << 64) - 1
CUT = 1.0 - 2.0**-24  # of u


class Race(NamedTuple):
    """What was found, relative to what is right."""

    off: float  # of the shares, beyond what rounding u explains
    lower: float  # bounds of the probability
    upper: float

    def __str__(self) -> str:
        return (
            f"share off by {self.off:.2g} relative at most, "
            f"probability within {self.lower:.4f} to {self.upper:.4f} of the right one"
        )


def heavy_words() -> Uint64s:
    """Words by which E grows 0.8 % a step from 2^-8 up, powers of two, 0 and the last; rising."""
    e = np.geomspace(2.0**-8, -math.log1p(-CUT), 960)
    u = -np.expm1(-e[:-1])
    words = (u * 2.0**64).astype(np.uint64)
    powers = np.uint64(1) << np.arange(57, dtype=np.uint64)
    return np.unique(np.concatenate([words, powers, np.array([0, LAST], dtype=np.uint64)]))


def winning_words(wins: Wins, heavy: Uint64s, device: str = "cpu") -> Uint64s:
    """How many words of the lighter side win beside each word of the heavier one. The last is not asked."""
    given = halves(heavy, device)
    low, high = np.zeros_like(heavy), np.full_like(heavy, LAST)
    for _ in range(64):
        word = low + (high - low) // np.uint64(2)
        won = wins(given, halves(word, device)).cpu().numpy() & (low < high)
        low, high = np.where(won, word + np.uint64(1), low), np.where(won, high, np.maximum(word, low))
    assert (low == high).all()
    return low


def halves(words: Uint64s, device: str) -> Halves:
    return (
        torch.from_numpy((words >> np.uint64(32)).astype(np.int64)).to(device),
        torch.from_numpy((words & np.uint64(0xFFFFFFFF)).astype(np.int64)).to(device),
    )


def assert_race(wins: Wins, ratio: float, tolerance: float, device: str = "cpu") -> Race:
    """Hold the lighter side, of mass `ratio` times the heavier's, to 1 % of its probability, and every share
    to `tolerance`, a quarter of which then bounds the total variation.

    A share is allowed what its own word's u lost as it was rounded: near 1, 2^-24 of 1 - u.
    """
    heavy = heavy_words()
    share = winning_words(wins, heavy, device).astype(np.float64) * 2.0**-64
    u = np.minimum((heavy.astype(np.float64) + 0.5) * 2.0**-64, CUT)
    e = -np.log1p(-u)
    right = -np.expm1(-e * ratio)
    wrong = np.abs(share - right) - 2.0**-63 - right * 2.0**-24 / ((1 - u) * e)
    off = max(float((wrong / right).max()), 0.0)
    assert off <= tolerance, (off, int(heavy[(wrong / right).argmax()]))
    width = np.diff(heavy.astype(np.float64)) * 2.0**-64
    probability = ratio / (1 + ratio)
    lower, upper = (float((width * at).sum()) / probability for at in (share[:-1], share[1:]))
    assert 0.99 <= lower <= upper <= 1.01, (lower, upper)
    return Race(off, lower, upper)


def kernel_race(gap: float, rank: bool, fast: bool) -> tuple[Wins, float]:
    """The race of the kernels' scores, of ranks or groups, the lighter second, and the ratio of masses."""
    light = torch.tensor(gap * math.log(2) if rank else gap, dtype=torch.float32).item()

    def wins(heavier: Halves, lighter: Halves) -> Tensor:
        best = stage_kernels.race_scores(0.0, *heavier, rank, fast)
        return stage_kernels.race_scores(light, *lighter, rank, fast) > best

    return wins, math.exp(light) if rank else 2.0**light


def serve(monkeypatch: pytest.MonkeyPatch, domain: int, table: dict[int, Halves]) -> None:
    """Serve the words of `table` by unit and row in one domain, for calls whose row i has the seed i.

    Other units and domains get a word in the middle.
    """

    def words(self: noise.RowStreams, unit: Tensor, sample: noise.Word, of: noise.Word) -> noise.Words:
        rows, units = torch.broadcast_tensors(self.key0, unit)  # type: ignore[no-untyped-call]
        high, low = torch.full_like(rows, 1 << 31), torch.full_like(rows, 1 << 31)
        if of == domain:
            for number, (upper, lower) in table.items():
                high = torch.where(units == number, upper[rows], high)
                low = torch.where(units == number, lower[rows], low)
        return high, low, high, low

    monkeypatch.setattr(noise.RowStreams, "words", words)
