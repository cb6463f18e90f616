"""The claim, by enumeration, of the choices between groups, between blocks of `online` and between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsample_kernels import noise, sample_logits
from fsample_kernels.block_draw import merge_masses
from fsample_kernels.distributed.merge import merge_log_mass
from fsample_kernels.noise import ONLINE_BLOCK
from tests.kernels import bisection, races

Say = Callable[[str], None]
INF = math.inf
# log2 masses of the blocks of a vocabulary, in their order
BLOCKS = [
    [0.0, 0.0], [0.0, -39.99], [-39.99, 0.0], [0.0, -44.0], [-44.0, 0.0], [0.0, -INF], [-INF, 0.0],
    [3.0, 1.3, 2.1], [0.0, -39.0, -40.0], [-40.0, 0.0, -38.5], [-40.0, -39.0, 0.0], [-44.0, -2.0, -39.9],
    [0.0, -INF, -40.0], [-INF, -40.0, 0.0], [-INF, -INF, 7.0], [1000.0, 960.0, 961.5],
]  # fmt: skip
# A score is rounded to 2^-24 of its size, some 2^5; a share then to 2^-18
TOLERANCE = 2.0**-18


def takes_over(old: Tensor, new: Tensor) -> float:
    """The probability that a new block takes over, from all 2**64 words of its uniform."""

    def member(words: list[int]) -> list[int]:
        u = noise.uniform64(*bisection.split(words), torch.float64)
        return merge_masses(old, new, u)[1].int().tolist()

    return bisection.measures(member).get(1, 0) / bisection.WORDS


@pytest.mark.parametrize("masses", BLOCKS, ids=str)
def test_every_block_of_online_has_its_probability(masses: list[float]) -> None:
    """Blocks take over from those before them with words of their own: probabilities multiply."""
    x = torch.tensor(masses, dtype=torch.float64)
    total = torch.full((), -INF, dtype=torch.float64)
    found: list[float] = []
    for new in x:
        share = takes_over(total, new)
        found = [*(before * (1 - share) for before in found), share]
        total, _ = merge_masses(total, new, torch.full((), 0.5, dtype=torch.float64))
    bisection.assert_probabilities(x, found)


@pytest.mark.parametrize("masses", [[0.0, -39.99], [-39.99, 0.0], [1.0, -INF, -38.0]], ids=str)
def test_online_takes_over_with_all_words_of_its_own(
    masses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the logits to the ids of `sample_logits`; one id a block has mass."""
    last = len(masses) - 1
    logits = torch.full((len(masses), ONLINE_BLOCK), -INF)
    logits[:, 77] = torch.tensor(masses) * math.log(2)

    def member(words: list[int]) -> list[int]:
        races.serve(monkeypatch, noise.ONLINE, {last: bisection.split(words)})
        rows = logits.flatten().expand(len(words), -1)
        ids = sample_logits(rows, seed=torch.arange(len(words)), noise="online").ids[:, 0]
        assert (ids % ONLINE_BLOCK == 77).all()
        return (ids // ONLINE_BLOCK == last).int().tolist()

    measure = bisection.measures(member)
    bisection.assert_claim(torch.tensor([torch.tensor(masses[:-1]).exp2().sum().log2(), masses[-1]]), measure)


# GroupDraws compares groups of two blocks, draw_in_block those of one.
@pytest.mark.parametrize("other", [4, 1], ids=["of two blocks", "of one block"])
@pytest.mark.parametrize("gap, first", [(0.0, True), (-40.0, False), (-44.0, True)])
def test_a_group_wins_at_its_rate(
    gap: float, first: bool, other: int, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    """From the logits to the ids of `sample_logits`; two groups have mass, each at its members 0 and 1."""
    light, heavy = (0, other) if first else (other, 0)
    logits = torch.full((256,), -INF)
    for group, y in ((light, gap * math.log(2)), (heavy, 0.0)):
        logits[noise.id_of(torch.tensor(group), torch.arange(2))] = y
    ratio = math.exp(torch.tensor(gap * math.log(2)).float().item())

    def wins(heavier: races.Halves, lighter: races.Halves) -> Tensor:
        races.serve(monkeypatch, noise.GROUP, {heavy: heavier, light: lighter})
        rows = len(heavier[0])
        ids = sample_logits(logits.expand(rows, -1), seed=torch.arange(rows)).ids[:, 0]
        return noise.group_of(ids) == light

    say(f"a group of 2^{gap:g} beside 1, CPU: {races.assert_race(wins, ratio, TOLERANCE)}")


# ids of the lighter and of the heavier: of one call of Philox, of one run of 128, of two chunks
@pytest.mark.parametrize("light, heavy", [(9, 10), (77, 5), (5, 1024 + 2)])
@pytest.mark.parametrize("gap", [0.0, -20.0, -29.99, -34.0, -40.0])
def test_an_id_wins_at_its_rate_by_element(
    gap: float, light: int, heavy: int, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    """From the logits to the ids of `sample_logits`: 1 % down to 2**-30, 2**-32 absolute below."""
    logits = torch.full((heavy // 128 * 128 + 128,), -INF)
    logits[light], logits[heavy] = gap * math.log(2), 0.0
    ratio = math.exp(float(logits[light]))

    def wins(heavier: races.Halves, lighter: races.Halves) -> Tensor:
        table = {light // 4: lighter, heavy // 4: heavier}
        if light // 4 == heavy // 4:
            by_lane = (heavier[0], lighter[0]) if light % 2 else (lighter[0], heavier[0])
            table = {light // 4: by_lane}
        races.serve(monkeypatch, noise.ELEMENT, table)
        rows = len(heavier[0])
        ids = sample_logits(logits.expand(rows, -1), seed=torch.arange(rows), noise="element").ids[:, 0]
        assert ((ids == light) | (ids == heavy)).all()
        return ids == light

    found = races.assert_race(wins, ratio, TOLERANCE, bits=32)
    say(f"an id of 2^{gap:g} beside 1, {light} and {heavy}, CPU: {found}")


@pytest.mark.parametrize("first", [True, False], ids=["the lighter first", "the heavier first"])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("gap", [0.0, -20.0, -40.0, -44.0])
def test_a_rank_wins_at_its_rate(
    gap: float, offset: float, first: bool, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    """`merge_log_mass`, of log-masses around `offset`: what fp32 keeps of them is what is drawn by."""
    light, heavy = (0, 1) if first else (1, 0)
    lse = torch.full((2,), offset)
    lse[light] += gap * math.log(2)
    ratio = math.exp(float(lse[light].double() - lse[heavy].double()))

    def wins(heavier: races.Halves, lighter: races.Halves) -> Tensor:
        races.serve(monkeypatch, noise.RANK, {heavy: heavier, light: lighter})
        rows = len(heavier[0])
        ids = torch.arange(2)[:, None, None].expand(2, rows, 1)
        merged = merge_log_mass(ids, lse[:, None].expand(2, rows), seed=torch.arange(rows))
        return merged.ids[:, 0] == light

    tolerance = TOLERANCE + offset * 2.0**-22
    say(f"a rank of 2^{gap:g} beside 1, lse {offset:g}, CPU: {races.assert_race(wins, ratio, tolerance)}")


def test_a_faulty_merge_and_a_faulty_race_break_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 bits of the 64: a mass of 2**-39 is drawn never, or twice as often as it should."""
    x = torch.tensor([0.0, -39.0], dtype=torch.float64)
    wins, ratio = cpu_race(-39.0)
    races.assert_race(wins, ratio, TOLERANCE)

    def upper(high: Tensor, low: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return noise.uniform32(high, dtype)

    monkeypatch.setattr(noise, "uniform64", upper)
    share = takes_over(x[0], x[1])
    with pytest.raises(AssertionError):
        bisection.assert_probabilities(x, [1 - share, share])
    with pytest.raises(AssertionError):
        races.assert_race(wins, ratio, 1.0)


def cpu_race(gap: float) -> tuple[races.Wins, float]:
    """The race of two log2 masses by the CPU's functions."""

    def score(mass: float, words: races.Halves) -> Tensor:
        return noise.log_mass_score(torch.tensor(mass), noise.exponential(noise.uniform64(*words)))

    return lambda heavier, lighter: score(gap, lighter) > score(0.0, heavier), 2.0**gap
