"""The claim, by enumeration, and the numerics: of the CPU's functions, of the kernels' in the interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from fsample_kernels import block_draw, noise
from tests.kernels import bisection, numerics, stage_kernels

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


def test_log2_of_the_exponential_on_the_cpu() -> None:
    """Both ends, the neighbours of 2**-6, and every 256th of the 2**32 words."""
    near = torch.arange(1 << 16)
    spread = [torch.arange(1 << 22) * 1024 + first for first in (77, 333, 589, 845)]
    found = []
    for words in (near, (1 << 32) - 1 - near, (1 << 26) - (1 << 15) + near, *spread):
        u = noise.uniform32(words)
        found.append(numerics.errors(u, noise.exponential(u).log2(), words, False))
    worst = numerics.largest(found)
    assert worst.of_budget <= 1 and worst.series <= 4 and worst.middle <= 4, worst


def test_the_bound_on_numerics_can_fail() -> None:
    words = torch.arange(1 << 12)
    u = noise.uniform32(words)
    log2 = noise.exponential(u).log2()
    assert numerics.errors(u, log2 * (1 + 2.0**-20), words, False).of_budget > 1
    with pytest.raises(AssertionError):
        numerics.errors(u * (1 + 2.0**-20), log2, words, False)


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

    def test_log2_of_the_exponential(self) -> None:
        found = []
        for first in (0, (1 << 26) - (1 << 15), 1 << 31, (1 << 32) - (1 << 16)):
            u, log2 = stage_kernels.stages32(first, 1 << 16, False, "cpu")
            words = first + torch.arange(1 << 16)
            found.append(numerics.errors(u, log2, words, False))
        worst = numerics.largest(found)
        assert worst.of_budget <= 1 and worst.series <= 4, worst
