"""The claim and the numerics of the device functions as a GPU runs them: every word, none left to chance."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels import bisection, numerics, races, stage_kernels

pytestmark = pytest.mark.gpu
maths = pytest.mark.parametrize("fast", [True, False], ids=["fast", "exact"])
POINTS = 1023  # words a launch
CHUNK = 1 << 26
EVERY_WORD = 1 << 32
INFINITY = 0x7F800000  # its bits
# log2 E in ulps of max(|log2 E|, 1): below u = 2^-6 the series, to 1 - 2^-6 what the budget of its logarithm
# allows at u = 2^-6, where it is largest.
SERIES_ULPS, MIDDLE_ULPS = 8, {True: 44, False: 17}

Say = Callable[[str], None]


def maths_of(fast: bool) -> str:
    return "fast" if fast else "exact"


@maths
@pytest.mark.parametrize("name", list(bisection.tail_groups()))
def test_every_member_of_a_group_has_its_probability(name: str, fast: bool, say: Say) -> None:
    """By bisection over all 2**64 words: 1 % relative down to 2**-40, 2**-44 absolute below, TV < 2**-20."""
    x = bisection.tail_groups()[name]
    on_gpu = x.cuda()
    measure = bisection.measures(lambda words: stage_kernels.members(on_gpu, words, fast), POINTS)
    off = bisection.assert_claim(x, measure)
    say(f"{name}, {maths_of(fast)}: {len(measure)} members, off by {off:.2g} relative at most")


@maths
def test_the_law_of_the_exponential(fast: bool, say: Say) -> None:
    """P(E < 2**-k) over all 2**64 words; beyond 2**-44 single words count."""
    worst = 0.0
    for k in range(-2, 61):
        right = -math.expm1(-(2.0**-k))
        got = bisection.share_below(
            lambda words: stage_kernels.log2_exponentials(words, fast, "cuda"), -k, POINTS
        )
        off = abs(got / right - 1)
        assert off < 2.0**-14 + 2.0 ** (k - 63), (k, off)
        worst = max(worst, off if k <= 44 else 0.0)
    say(f"P(E < 2^-k), {maths_of(fast)}: off by {worst:.2g} relative at most, down to 2^-44")


@pytest.mark.parametrize("side, fast", [("rank", False), ("group", False), ("group", True)])
@pytest.mark.parametrize("gap", [0.0, -20.0, -40.0, -44.0])
def test_a_rank_and_a_group_win_at_their_rate(gap: float, side: races.Side, fast: bool, say: Say) -> None:
    """The lighter of two, of mass 2**gap, from all the words of either: 1 %, beside any one word 2**-14."""
    found = races.assert_race(*races.kernel_race(gap, side, fast), 2.0**-14, "cuda")
    say(f"a {side}, {maths_of(fast)}, of 2^{gap:g} beside 1: {found}")


@maths
@pytest.mark.parametrize("gap", [0.0, -20.0, -29.99, -31.0, -34.0, -40.0])
def test_an_id_wins_at_its_rate_by_element(gap: float, fast: bool, say: Say) -> None:
    """Of two ids, from all 2**32 words of either: 1 % down to 2**-30, 2**-32 absolute below."""
    found = races.assert_race(*races.kernel_race(gap, "element", fast), 2.0**-14, "cuda", 32)
    say(f"an id by element, {maths_of(fast)}, of 2^{gap:g} beside 1: {found}")


@maths
def test_every_32_bit_word(fast: bool, say: Say) -> None:
    """uniform32 and log2 E of all 2**32 words within the budget of their roundings and the ulps above."""
    found = []
    for first in range(0, EVERY_WORD, CHUNK):
        u, log2 = stage_kernels.stages32(first, CHUNK, fast, "cuda")
        words = torch.arange(first, first + CHUNK, device="cuda")
        found.append(numerics.errors(u, log2, words, fast))
    worst = numerics.largest(found)
    say(
        f"log2 E of 2^32 words, {maths_of(fast)}: {worst.series:.2f} below u = 2^-6, "
        f"{worst.middle:.2f} to 1 - 2^-6, {worst.near_one:.2f} above; {worst.of_budget:.2f} of the budget"
    )
    assert worst.of_budget <= 1
    assert worst.series <= SERIES_ULPS and worst.middle <= MIDDLE_ULPS[fast]


def every_float(first: int, count: int) -> Tensor:
    """The fp32 values of the bit patterns first, first + 1, ..."""
    return torch.arange(first, first + count, device="cuda").to(torch.int32).view(torch.float32)


@maths
def test_every_argument_of_exp2(fast: bool, say: Say) -> None:
    """2^x of every fp32 x in [-126, -0]: what a logit weighs beside the largest of its group."""
    worst = 0.0
    for first in range(0x80000000, 0xC2FC0000, CHUNK):
        values = every_float(first - (1 << 32), CHUNK)
        got = stage_kernels.function("exp2", values, fast)
        inside = values >= -126
        worst = max(worst, numerics.exp2_error(values[inside], got[inside]))
    say(f"2^x, {maths_of(fast)}: off by {worst:.2f} units of 2^-23, relative")
    assert worst <= 2  # PTX: ex2.approx is right to 2^-22.5 or so; libdevice to 2 ulp


@maths
def test_every_argument_of_log2(fast: bool, say: Say) -> None:
    """log2 of every fp32 in [1, 32), the totals of groups."""
    worst = 0.0
    for first in range(0x3F800000, 0x42000000, 1 << 23):
        values = every_float(first, 1 << 23)
        worst = max(worst, numerics.log2_error(values, stage_kernels.function("log2", values, fast)))
    say(f"log2 of totals, {maths_of(fast)}: off by {worst:.2f} units of 2^-22, absolute")
    assert worst <= 5


@maths
def test_every_argument_of_the_softcap(fast: bool, say: Say) -> None:
    """30 tanh(y / 30) of every finite fp32 y from 2**-60 up, against its own size and against the cap."""
    worst, of_cap = 0.0, 0.0
    for first in range(0x21800000, INFINITY, CHUNK):
        values = every_float(first, min(CHUNK, INFINITY - first))
        for y in (values, -values):
            got = stage_kernels.function("soft_cap", y, fast, 30.0)
            assert got.abs().max() <= 30
            own, cap = numerics.softcap_error(y, got, 30.0)
            worst, of_cap = max(worst, own), max(of_cap, cap)
    say(f"soft-cap, {maths_of(fast)}: off by {worst:.2f} half ulps, relative; {of_cap:.2f} of the cap")
    assert worst <= 6e-7 * 2.0**24 and of_cap <= 4
