"""The CPU implementation's distribution: chi-squared where draws can tell, enumeration where they cannot."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from fsample_kernels import noise, reference, sample_logits
from fsample_kernels.types import Noise

ALGORITHMS: tuple[Noise, ...] = ("grouped", "element", "online")
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)


def goodness_of_fit(ids: Tensor, p: Tensor) -> float:
    """p-value of a chi-squared test of ids [N] against p [V], small expectations pooled."""
    count = torch.bincount(ids, minlength=p.shape[0]).double()
    expected = p.double() / p.double().sum() * ids.numel()
    big = expected >= 5
    observed, wanted = count[big], expected[big]
    if not big.all():
        observed = torch.cat([observed, count[~big].sum()[None]])
        wanted = torch.cat([wanted, expected[~big].sum()[None]])
    statistic = float(((observed - wanted).square() / wanted).sum())
    return float(stats.chi2.sf(statistic, wanted.numel() - 1))


@algorithms
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.3, 2.0, 10.0])
def test_distribution(algorithm: Noise, temperature: float) -> None:
    """A skewed target, so that a wrong sign, temperature applied twice or noise divided by it cannot pass."""
    logits = torch.full((4224,), -30.0)
    logits[:200] = torch.linspace(3, -6, 200)
    logits[4100:4103] = torch.tensor([0.6, 0.3, 0.1]).log() + 3
    ids = sample_logits(
        logits[None], temperature=temperature, seed=11, num_samples=20_000, noise=algorithm
    ).ids
    assert goodness_of_fit(ids[0], torch.softmax(logits.double() / temperature, 0)) > 1e-4


@algorithms
def test_noise_has_the_right_sign(algorithm: Noise) -> None:
    logits = torch.full((128,), -30.0)
    logits[:3] = torch.tensor([0.7, 0.2, 0.1]).log()
    ids = sample_logits(logits[None], seed=1, num_samples=100_000, noise=algorithm).ids
    share = torch.bincount(ids[0], minlength=128) / 100_000
    assert (share[:3] - torch.tensor([0.7, 0.2, 0.1])).abs().max() < 0.006


@algorithms
def test_flat_logits_favour_no_half(algorithm: Noise) -> None:
    """Scores kept in 16 bits would tie, and ties go to low ids: 0.508 instead of 0.500 (sd 0.002)."""
    draws = 4_000 if algorithm == "element" else 60_000
    ids = sample_logits(torch.zeros(1, 8192), seed=2, num_samples=draws, noise=algorithm).ids
    assert abs((ids < 4096).double().mean().item() - 0.5) < 4 * 0.5 / draws**0.5
    assert abs((ids % 2 == 0).double().mean().item() - 0.5) < 4 * 0.5 / draws**0.5


def tail_groups() -> dict[str, Tensor]:
    """log2 masses of 32 members: the groups that defeat a draw of fewer bits (kernel-notes 7.7)."""
    spread = torch.linspace(-18, -58, 24)
    return {
        "one heavy, the rest 2**-45": torch.tensor([0.0] + [-45.0] * 31),
        "two heavy, the rest 2**-40": torch.cat(
            [torch.tensor([0.0, math.log2(0.31)]), torch.full((30,), -40.0)]
        ),
        "eight heavy, a spread tail": torch.cat([torch.linspace(0, -3, 8), spread])[torch.randperm(32)],
        "flat": torch.zeros(32),
        "half of it forbidden": torch.cat([torch.full((16,), -torch.inf), torch.linspace(0, -40, 16)]),
    }


@pytest.mark.parametrize("name", list(tail_groups()))
def test_every_member_of_a_group_has_its_probability(name: str) -> None:
    """By bisection over all 2**64 words: 1 % relative down to 2**-40, 2**-44 absolute below, TV < 2**-20."""
    torch.manual_seed(0)
    x = tail_groups()[name]
    e = torch.exp2(x)
    levels = [e[None]]
    for half in (16, 8, 4, 2, 1):
        levels.append(levels[-1][:, :half] + levels[-1][:, half:])
    total = levels.pop()[:, 0]

    def member(words: list[int]) -> list[int]:
        r0, r1 = torch.tensor([w >> 32 for w in words]), torch.tensor([w & 0xFFFFFFFF for w in words])
        hi, lo = noise.split_uniform(r0, r1, total.expand(len(words)))
        return reference.descend([level.expand(len(words), -1) for level in levels], hi, lo).tolist()

    # Members in the order in which t meets them; the boundary after each is found by bisection.
    order, start = [], 0
    measure: dict[int, int] = {}
    while start < 1 << 64:
        current = member([start])[0]
        assert current not in measure, "t met a member twice"
        order.append(current)
        low, high = start, 1 << 64  # member(low) is current; find the first word that is not
        while high - low > 1:
            points = [low + (high - low) * i // 64 for i in range(1, 64)]
            found = member(points)
            inside = [p for p, m in zip(points, found, strict=True) if m == current]
            outside = [p for p, m in zip(points, found, strict=True) if m != current]
            if high - low <= 64:
                points = list(range(low + 1, high))
                found = member(points) if points else []
                outside = [p for p, m in zip(points, found, strict=True) if m != current]
                high = min(outside, default=high)
                low = high - 1
                break
            low, high = max([low, *inside]), min([*outside, high])
        measure[current] = high - start
        start = high
    true = torch.softmax(x.double() * math.log(2), 0)
    got = torch.tensor([measure.get(j, 0) / 2**64 for j in range(32)], dtype=torch.float64)
    assert (got[x == -torch.inf] == 0).all()
    wrong = (got - true).abs()
    budget = torch.where(true >= 2.0**-40, 0.01 * true, torch.full_like(true, 2.0**-44))
    assert (wrong <= budget).all(), list(zip(true.tolist(), got.tolist(), strict=True))
    assert wrong.sum() / 2 < 2.0**-20


@pytest.mark.parametrize("word", [0x00000000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
@algorithms
def test_extreme_words(monkeypatch: pytest.MonkeyPatch, algorithm: Noise, word: int) -> None:
    """One allowed id is drawn whatever the words; an id at logit -80 is not, even with the best word."""

    def constant(self: noise.RowStreams, unit: Tensor, sample: Tensor, domain: int) -> tuple[Tensor, ...]:
        shape = (unit + sample + torch.zeros(1)).shape
        return tuple(torch.full(shape, word) for _ in range(4))

    monkeypatch.setattr(noise.RowStreams, "words", constant)
    mask = torch.zeros(5000, dtype=torch.bool)
    mask[4321] = True
    assert sample_logits(torch.zeros(1, 5000), seed=1, mask=mask, noise=algorithm).ids.tolist() == [[4321]]

    def favour_one(self: noise.RowStreams, unit: Tensor, sample: Tensor, domain: int) -> tuple[Tensor, ...]:
        shape = (unit + sample + torch.zeros(1)).shape
        favoured = (unit == (4000 // 4 if domain == noise.ELEMENT else 4 * 31)).expand(shape)
        return tuple(torch.where(favoured, word, 2**31) for _ in range(4))

    monkeypatch.setattr(noise.RowStreams, "words", favour_one)
    logits = torch.zeros(1, 5000)
    logits[0, 3968:4096] = -80.0  # whole groups, id 4000 among them
    assert not 3968 <= int(sample_logits(logits, seed=1, noise=algorithm).ids) < 4096


def test_logit_scale_changes_draws() -> None:
    logits = torch.linspace(-40, 40, 300)
    ids = sample_logits(logits[None], logit_scale=0.0625, seed=3, num_samples=20_000).ids
    assert goodness_of_fit(ids[0], torch.softmax(logits * 0.0625, 0)) > 1e-4
