"""What rounding leaves of the claim where y / temperature is large: the worst pairs there are, enumerated.

x = y log2(e), a group's L = m + log2(S), and a score are each rounded to fp32. No two ids, and no two groups,
are further from their ratio of masses than a pair whose x and L round in opposite ways; in a tie the lower id
wins, so it is put where that adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fsample_kernels import noise, sample_logits
from fsample_kernels.types import Noise
from tests.kernels import bisection, races

Say = Callable[[str], None]
LARGEST = 2.0**14  # |y / temperature| up to which the claim is printed
SIZES = [1.0, 60.0, 1000.0, LARGEST]
# Beside group or id 0; draw_in_block compares the groups of one block, GroupDraws those of two.
OTHER = {"one block": 1, "two blocks": 4, "element": 1}
ALONE, ANY = range(1, 2), range(1, 33)  # ids of one group


class Pair(NamedTuple):
    """Two logits, and how many ids have each."""

    light: float
    heavy: float
    light_ids: int
    heavy_ids: int

    @property
    def ratio(self) -> float:
        return math.exp(self.light - self.heavy) * self.light_ids / self.heavy_ids


def variation_claimed(size: float) -> float:
    return 2.0**-20 + 2.0**-23 * size


def worst_pair(size: float, gap: float, light_up: bool, members: range) -> Pair:
    """The pair up to `size`, some `gap` apart, whose log-masses in fp32 are furthest off in opposite ways."""
    light = worst_side(size - gap, 1 if light_up else -1, members)
    heavy = worst_side(size, -1 if light_up else 1, members)
    return Pair(light[0], heavy[0], light[1], heavy[1])


def worst_side(top: float, sign: int, members: range) -> tuple[float, int]:
    """The logit in [top - 1/2, top), and the number of such ids, whose log2 mass is off most to that side."""
    step = max(float(np.spacing(np.float32(abs(top) / 2))), 2.0**-13)
    y = top - step * torch.arange(1, int(0.5 / step), dtype=torch.float64)
    count = torch.tensor(list(members), dtype=torch.float64)[:, None]
    mass = (y.float() * torch.tensor(noise.LOG2_E)) + count.float().log2()
    off = sign * (mass.double() - y.float().double() * noise.LOG2_E - count.log2())
    number, at = divmod(int(off.argmax()), len(y))
    return float(y[at].float()), members[number]


def race_of(pair: Pair, place: str, first: bool, patch: pytest.MonkeyPatch) -> races.Race:
    """By `sample_logits`, the lighter of the lower ids if `first`; `element`'s ids share a Philox call."""
    unit = OTHER[place]
    light, heavy = (0, unit) if first else (unit, 0)
    name: Noise = "element" if place == "element" else "grouped"
    logits = torch.full((256,), -math.inf)
    for side, y, number in ((light, pair.light, pair.light_ids), (heavy, pair.heavy, pair.heavy_ids)):
        logits[side if name == "element" else noise.id_of(torch.tensor(side), torch.arange(number))] = y

    def wins(heavier: races.Halves, lighter: races.Halves) -> Tensor:
        if name == "element":
            races.serve(
                patch, noise.ELEMENT, {0: (lighter[0], heavier[0]) if first else (heavier[0], lighter[0])}
            )
        else:
            races.serve(patch, noise.GROUP, {light: lighter, heavy: heavier})
        rows = len(heavier[0])
        ids = sample_logits(logits.expand(rows, -1), seed=torch.arange(rows), noise=name).ids[:, 0]
        return (ids if name == "element" else noise.group_of(ids)) == light

    return races.race(wins, pair.ratio, bits=32 if name == "element" else 64)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", list(OTHER))
def test_the_worst_pairs_hold_the_claim(
    place: str, size: float, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    """Two about as heavy, where the total variation is largest, and a lighter one, whose own error is."""
    for gap, up in ((0.0, True), (min(5.0, size), True), (min(5.0, size), False)):
        pair = worst_pair(size, gap, up, ALONE if place == "element" else ANY)
        found = race_of(pair, place, up, monkeypatch)
        share = pair.ratio / (1 + pair.ratio)
        variation = abs(found.error) * share
        say(
            f"{place}, |y| {size:g}, p {share:.3g}: {found}, off by {found.error:.2g} relative, "
            f"total variation {variation:.2g}, by the shares under {found.off / 4:.2g}"
        )
        assert 0.99 <= found.lower <= found.upper <= 1.01
        assert max(variation, found.off / 4) <= variation_claimed(size)


@pytest.mark.parametrize("size", SIZES)
def test_the_worst_members_of_a_group_hold_the_claim(
    size: float, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    """Two ids of one group, by bisection over the 2**64 words of the draw inside."""
    for gap, up in ((0.0, True), (min(5.0, size), True), (min(5.0, size), False)):
        pair = worst_pair(size, gap, up, ALONE)
        logits = torch.full((128,), -math.inf)
        logits[:2] = torch.tensor([pair.light, pair.heavy])  # both of group 0

        def member(words: list[int], logits: Tensor = logits) -> list[int]:
            races.serve(monkeypatch, noise.GROUP, {0: bisection.split(words)})
            rows = logits.expand(len(words), -1)
            return sample_logits(rows, seed=torch.arange(len(words))).ids[:, 0].tolist()

        share = pair.ratio / (1 + pair.ratio)
        wrong = bisection.measures(member)[0] / bisection.WORDS - share
        say(
            f"members, |y| {size:g}, p {share:.3g}: off by {wrong / share:.2g} relative, "
            f"total variation {abs(wrong):.2g}"
        )
        assert abs(wrong) <= min(0.01 * share, variation_claimed(size))


@pytest.mark.parametrize("place", list(OTHER))
def test_the_size_is_not_much_understated(place: str, monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    """Eight times as far the lighter side of such a pair is no longer within 1 %."""
    pair = worst_pair(8 * LARGEST, 5.0, True, ALONE if place == "element" else ANY)
    found = race_of(pair, place, True, monkeypatch)
    say(f"{place}, |y| {8 * LARGEST:g}: {found}, off by {found.error:.2g} relative")
    assert found.lower > 1.01
