"""How often the lighter of two sides wins a race of log-mass + Gumbel, from all the words either can get.

Side i wins where E_i / mass_i is the smaller, E_i from its word of 64 bits, by `element` of 32. Beside one
word of the heavier side the lighter wins with a run of words, 0 and up, whose end is found by bisection: a
share of all words that must be 1 - exp(-E ratio), and that rises with the heavier side's word. So the words
at which it is asked for, 0 and the last among them, part all words into strata, and the shares at the ends
bound the probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fsample_kernels import noise
from tests.kernels import stage_kernels

Halves = tuple[Tensor, Tensor]  # of 64-bit words, upper first, int64 [n]; or twice a 32-bit word
Wins = Callable[[Halves, Halves], Tensor]  # heavier, lighter -> whether the lighter wins, bool [n]
Uint64s = np.ndarray[tuple[int], np.dtype[np.uint64]]

Side = Literal["rank", "group", "element"]

CUT = 1.0 - 2.0**-24  # of u


class Race(NamedTuple):
    """What was found, relative to what is right."""

    off: float  # of the shares, beyond what rounding u explains
    lower: float  # bounds of the probability
    upper: float
    error: (
        float  # of the probability, between them: by the trapezoid rule, of which the right shares are freed
    )

    def __str__(self) -> str:
        return (
            f"share off by {self.off:.2g} relative at most, "
            f"probability within {self.lower:.4f} to {self.upper:.4f} of the right one"
        )


def heavy_words(bits: int) -> Uint64s:
    """Words by which E grows 0.8 % a step from 2^-8 up, powers of two, 0 and the last; rising."""
    e = np.geomspace(2.0**-8, -math.log1p(-CUT), 960)
    u = -np.expm1(-e[:-1])
    words = (u * 2.0**bits).astype(np.uint64)
    powers = np.uint64(1) << np.arange(bits - 7, dtype=np.uint64)
    return np.unique(np.concatenate([words, powers, np.array([0, (1 << bits) - 1], dtype=np.uint64)]))


def winning_words(wins: Wins, heavy: Uint64s, device: str = "cpu", bits: int = 64) -> Uint64s:
    """How many words of the lighter side win beside each word of the heavier one. The last is not asked."""
    given = halves(heavy, device, bits)
    low, high = np.zeros_like(heavy), np.full_like(heavy, (1 << bits) - 1)
    for _ in range(bits):
        word = low + (high - low) // np.uint64(2)
        won = wins(given, halves(word, device, bits)).cpu().numpy() & (low < high)
        low, high = np.where(won, word + np.uint64(1), low), np.where(won, high, np.maximum(word, low))
    assert (low == high).all()
    return low


def halves(words: Uint64s, device: str, bits: int) -> Halves:
    return (
        torch.from_numpy((words >> np.uint64(bits - 32)).astype(np.int64)).to(device),
        torch.from_numpy((words & np.uint64(0xFFFFFFFF)).astype(np.int64)).to(device),
    )


def race(wins: Wins, ratio: float, device: str = "cpu", bits: int = 64) -> Race:
    """What is found of a lighter side whose mass is `ratio` times the heavier's.

    A share is allowed half a word, of 64-bit ones two, and what its own word's u lost as it was rounded: near
    1, 2^-24 of 1 - u.
    """
    heavy = heavy_words(bits)
    share = winning_words(wins, heavy, device, bits).astype(np.float64) * 2.0**-bits
    u = np.minimum((heavy.astype(np.float64) + 0.5) * 2.0**-bits, CUT)
    e = -np.log1p(-u)
    right = -np.expm1(-e * ratio)
    words = 2.0**-63 if bits == 64 else 2.0**-33
    wrong = np.abs(share - right) - words - right * 2.0**-24 / ((1 - u) * e)
    width = np.diff(heavy.astype(np.float64)) * 2.0**-bits
    probability = ratio / (1 + ratio)
    lower, upper = (float((width * at).sum()) / probability for at in (share[:-1], share[1:]))
    error = float((width * (share - right)[:-1] + width * (share - right)[1:]).sum()) / 2 / probability
    return Race(max(float((wrong / right).max()), 0.0), lower, upper, error)


def assert_race(wins: Wins, ratio: float, tolerance: float, device: str = "cpu", bits: int = 64) -> Race:
    """Hold the lighter side to 1 % of its probability, and every share to `tolerance`, a quarter of which
    then bounds the total variation. Of 32 bits, a probability below 2^-30 is held to 2^-32 absolute.
    """
    found = race(wins, ratio, device, bits)
    assert found.off <= tolerance, found
    probability = ratio / (1 + ratio)
    budget = 0.01 if bits == 64 or probability >= 2.0**-30 else 2.0**-32 / probability
    assert 1 - budget <= found.lower <= found.upper <= 1 + budget, found
    return found


def kernel_race(gap: float, side: Side, fast: bool) -> tuple[Wins, float]:
    """The race of the kernels' scores, the lighter second, and the ratio of masses."""
    light = torch.tensor(gap if side == "group" else gap * math.log(2), dtype=torch.float32).item()

    def wins(heavier: Halves, lighter: Halves) -> Tensor:
        best = stage_kernels.race_scores(0.0, *heavier, side, fast)
        return stage_kernels.race_scores(light, *lighter, side, fast) > best

    return wins, 2.0**light if side == "group" else math.exp(light)


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
