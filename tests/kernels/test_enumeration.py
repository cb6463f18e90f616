"""The claim, by enumeration, and the numerics: of the CPU's functions, of the kernels' in the interpreter.

FSAMPLE_EVERY_WORD=1 walks all 2**32 words, and every argument, of the CPU's functions (`-k on_the_cpu`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fsample_kernels import block_draw, chunks, noise
from fsample_kernels.types import Problem
from tests.kernels import bisection, numerics, races, stage_kernels

MakeProblem = Callable[..., Problem]
Say = Callable[[str], None]

EVERY_WORD = os.environ.get("FSAMPLE_EVERY_WORD") == "1"
COUNT = "all" if EVERY_WORD else "spaced"
CHUNK = 1 << 18
SPACED, REACH = 1 << 22, 1 << 10
FEW, NEAR = 1 << 16, 1 << 5  # in the interpreter
CAP = 30.0
# exp2 and log2 of torch and of numpy are right to two ulps of the result, a soft-cap to three.
EXP2_UNITS, LOG2_UNITS, SOFTCAP_HALF_ULPS = 2.0, 4.0, 6.0

interpreted = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("name", list(bisection.tail_groups()))
def test_every_member_of_a_group_has_its_probability(name: str) -> None:
    """By bisection over all 2**64 words: 1 % relative down to 2**-40, 2**-44 absolute below, TV < 2**-20."""
    x = bisection.tail_groups()[name]
    levels = [torch.exp2(x - x.max())[None]]
    for half in (16, 8, 4, 2, 1):
        levels.append(levels[-1][:, :half] + levels[-1][:, half:])
    total = levels.pop()[:, 0]

    def member(words: list[int]) -> list[int]:
        hi, lo = noise.split_uniform(*bisection.split(words), total.expand(len(words)))
        return block_draw.descend([level.expand(len(words), -1) for level in levels], hi, lo).tolist()

    bisection.assert_claim(x, bisection.measures(member))


def test_the_law_of_the_exponential() -> None:
    """P(E < 2**-k) over all 2**64 words; beyond 2**-44 single words count."""

    def score(words: list[int]) -> list[float]:
        return noise.exponential(noise.uniform64(*bisection.split(words))).log2().tolist()

    assert_law(score, 2.0**-18, 63)


def assert_law(score: bisection.Scores, tolerance: float, points: int, step: int = 1) -> None:
    for k in range(-2, 61, step):
        right = -math.expm1(-(2.0**-k))
        got = bisection.share_below(score, -k, points)
        assert abs(got / right - 1) < tolerance + 2.0 ** (k - 63), (k, got / right - 1)


def test_a_faulty_draw_breaks_the_claim() -> None:
    """A draw from the upper 32 bits alone never meets a member of 2**-45, or gives it 2**-32."""
    x = bisection.tail_groups()["two heavy, the rest 2**-40"]
    edges = torch.softmax(x.double() * math.log(2), 0).cumsum(0)

    def member(words: list[int]) -> list[int]:
        u = torch.tensor([(word >> 32) * 2.0**-32 for word in words], dtype=torch.float64)
        return torch.searchsorted(edges, u, right=True).clamp(max=31).tolist()

    with pytest.raises(AssertionError):
        bisection.assert_claim(x, bisection.measures(member))


# What follows yields neighbourhoods of ends and branch points, and evenly spaced arguments; or all there are,
# in chunks that stay in the caches.
def words32() -> Iterator[Tensor]:
    """Both ends, the neighbours of 2**-6 and of E = 4, where errors are most ulps; every 256th word."""
    if EVERY_WORD:
        yield from (torch.arange(first, first + CHUNK) for first in range(0, 1 << 32, CHUNK))
        return
    near = torch.arange(1 << 16)
    yield from (near, (1 << 32) - 1 - near)
    four = round(-math.expm1(-4.0) * 2**32)
    yield from (edge - (1 << 15) + near for edge in (1 << 26, four))
    yield from (torch.arange(1 << 22) * 1024 + first for first in (77, 333, 589, 845))


def arguments(first: int, stop: int, points: list[float], spaced: int, reach: int) -> Iterator[Tensor]:
    """fp32 values of the bit patterns first to stop - 1: all; or about `spaced`, both ends, and the points'
    neighbours.
    """
    if EVERY_WORD and spaced == SPACED:
        yield from (numerics.floats(at, min(at + CHUNK, stop)) for at in range(first, stop, CHUNK))
        return
    yield torch.cat([numerics.floats(first, first + reach), numerics.floats(stop - reach, stop)])
    yield numerics.neighbours(points, reach)
    yield numerics.floats(first, stop, (stop - first) // spaced)


def exp2_arguments(spaced: int = SPACED, reach: int = REACH) -> Iterator[Tensor]:
    """[-126, -0], a logit beside the largest of its group. Implementations split x at integers and halves."""
    halves = [-0.5 * k for k in range(1, 252)]
    return arguments(0x80000000, 0xC2FC0001, halves, spaced, reach)


def log2_arguments(spaced: int = SPACED, reach: int = REACH) -> Iterator[Tensor]:
    """[1, 32): the totals of groups. Implementations split x at powers of 2, or 3/4 or sqrt 2 of them."""
    points = [2.0**k * part for k in range(1, 5) for part in (0.5**0.5, 0.75, 1.0)]
    return arguments(0x3F800000, 0x42000000, [*points, 24.0, 2.0**4.5], spaced, reach)


def softcap_arguments(spaced: int = SPACED, reach: int = REACH) -> Iterator[Tensor]:
    """Every finite y from 2**-60 up, of either sign, under a cap of 30. The kernels part it at half the cap;
    tanh is 1 from 9 on.
    """
    points = [CAP * part for part in (2.0**-12, 0.25, 0.5, 0.55, 0.625, 1.0, 8.6643, 9.0, 9.01, 18.7, 44.0)]
    for y in arguments(0x21800000, 0x7F800000, points, spaced, reach):
        yield y
        yield -y


def test_log2_of_the_exponential_on_the_cpu(say: Say) -> None:
    found = []
    for words in words32():
        u = noise.uniform32(words)
        found.append(numerics.errors(u, noise.exponential(u).log2(), words, False))
    worst = numerics.largest(found)
    say(
        f"log2 E of {COUNT} 32-bit words, CPU: {worst.series:.2f} below u = 2^-6, "
        f"{worst.middle:.2f} to 1 - 2^-6, {worst.near_one:.2f} above; {worst.of_budget:.2f} of the budget"
    )
    # at E = 4 the rounding of u alone is up to 5 ulps of log2 E
    assert worst.of_budget <= 1 and worst.series <= 2 and worst.middle <= 8, worst


def test_exp2_on_the_cpu(say: Say) -> None:
    worst = max(numerics.exp2_error(x, x.clone().exp2_()) for x in exp2_arguments())
    say(f"2^x of {COUNT} x in [-126, -0], CPU: off by {worst:.2f} units of 2^-23, relative")
    assert worst <= EXP2_UNITS


def test_log2_of_totals_on_the_cpu(say: Say) -> None:
    worst = max(numerics.log2_error(total, total.log2()) for total in log2_arguments())
    say(f"log2 of {COUNT} totals in [1, 32), CPU: off by {worst:.2f} units of 2^-22, absolute")
    assert worst <= LOG2_UNITS


def test_softcap_on_the_cpu(make_problem: MakeProblem, say: Say) -> None:
    """As the walk over the vocabulary applies it."""
    worst = []
    for y in softcap_arguments():
        got = y.clone()[:, None]  # [C, 1]
        chunks._transform(make_problem(1, 1, 1, softcap=CAP, vocab_size=len(y)), got, 0)
        assert got.abs().max() <= CAP
        worst.append(numerics.softcap_error(y, got[:, 0], CAP))
    own, of_cap = (max(errors) for errors in zip(*worst, strict=True))
    say(f"soft-cap of {COUNT} y, CPU: off by {own:.2f} half ulps, relative; {of_cap:.2f} of the cap")
    assert own <= SOFTCAP_HALF_ULPS and of_cap <= SOFTCAP_HALF_ULPS


def test_the_bound_on_numerics_can_fail() -> None:
    words = torch.arange(1 << 12)
    u = noise.uniform32(words)
    log2 = noise.exponential(u).log2()
    assert numerics.errors(u, log2 * (1 + 2.0**-20), words, False).of_budget > 1
    with pytest.raises(AssertionError):
        numerics.errors(u * (1 + 2.0**-20), log2, words, False)
    x, total = -torch.arange(1.0, 100.0), torch.arange(1.0, 32.0)
    assert numerics.exp2_error(x, torch.exp2(x) * (1 + 2.0**-21)) > EXP2_UNITS
    assert numerics.log2_error(total, torch.log2(total) + 2.0**-19) > LOG2_UNITS
    assert numerics.softcap_error(x, CAP * torch.tanh(x / CAP).bfloat16().float(), CAP)[0] > SOFTCAP_HALF_ULPS


class TestInterpreted:
    """The kernels' own functions. An fma rounds twice there, so its groups are those that forgive it."""

    pytestmark = interpreted

    @pytest.mark.parametrize("name", ["one alive", "three alive"])
    def test_every_member_of_a_group_has_its_probability(self, name: str) -> None:
        x = bisection.tail_groups()[name]
        measure = bisection.measures(lambda words: stage_kernels.members(x, words, False), 1023)
        bisection.assert_claim(x, measure)

    def test_the_law_of_the_exponential(self) -> None:
        assert_law(lambda words: stage_kernels.log2_exponentials(words, False, "cpu"), 2.0**-18, 1023, 15)

    @pytest.mark.parametrize("side", ["rank", "group"])
    def test_a_rank_and_a_group_win_at_their_rate(self, side: races.Side, say: Say) -> None:
        found = races.assert_race(*races.kernel_race(-40.0, side, False), 2.0**-18)
        say(f"a {side} of 2^-40 beside 1, interpreter: {found}")

    @pytest.mark.parametrize("gap", [0.0, -29.99, -34.0])
    def test_an_id_wins_at_its_rate_by_element(self, gap: float, say: Say) -> None:
        found = races.assert_race(*races.kernel_race(gap, "element", False), 2.0**-18, bits=32)
        say(f"an id of 2^{gap:g} beside 1 by element, interpreter: {found}")

    def test_log2_of_the_exponential(self) -> None:
        found = []
        for first in (0, (1 << 26) - (1 << 15), 1 << 31, (1 << 32) - (1 << 16)):
            u, log2 = stage_kernels.stages32(first, 1 << 16, False, "cpu")
            words = first + torch.arange(1 << 16)
            found.append(numerics.errors(u, log2, words, False))
        worst = numerics.largest(found)
        assert worst.of_budget <= 1 and worst.series <= 4, worst

    def test_exp2(self, say: Say) -> None:
        worst = max(numerics.exp2_error(x, run("exp2", x)) for x in exp2_arguments(FEW, NEAR))
        say(f"2^x, interpreter: off by {worst:.2f} units of 2^-23, relative")
        assert worst <= EXP2_UNITS

    def test_log2_of_totals(self, say: Say) -> None:
        worst = max(numerics.log2_error(total, run("log2", total)) for total in log2_arguments(FEW, NEAR))
        say(f"log2 of totals, interpreter: off by {worst:.2f} units of 2^-22, absolute")
        assert worst <= LOG2_UNITS

    def test_softcap(self, say: Say) -> None:
        worst = [numerics.softcap_error(y, run("soft_cap", y), CAP) for y in softcap_arguments(FEW, NEAR)]
        own, of_cap = (max(errors) for errors in zip(*worst, strict=True))
        say(f"soft-cap, interpreter: off by {own:.2f} half ulps, relative; {of_cap:.2f} of the cap")
        assert own <= SOFTCAP_HALF_ULPS and of_cap <= SOFTCAP_HALF_ULPS


def run(name: str, x: Tensor) -> Tensor:
    """exp2, log2 or soft_cap of x [n] fp32, any n."""
    padded = torch.nn.functional.pad(x, (0, -len(x) % stage_kernels.BLOCK), value=1.0)
    return stage_kernels.function(name, padded, False, CAP)[: len(x)]
