"""The CPU implementation's distribution: chi-squared where draws can tell, enumeration where they cannot."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from fsample_kernels import noise, sample_logits
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
def test_sampled_rows_beside_greedy_ones(algorithm: Noise) -> None:
    """Temperatures 0, 1, 0, 0.7 over 32,000 ids, with logits of exactly 0 and of -inf."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(4, 32_000, generator=generator) - 3
    logits[:, ::7], logits[:, 5::11] = 0.0, -torch.inf
    logits[:, 17_000:17_012] = torch.linspace(9, 4, 12)
    temperature = torch.tensor([0.0, 1.0, 0.0, 0.7])
    ids = sample_logits(
        logits,
        temperature=temperature,
        seed=12,
        num_samples=300 if algorithm == "element" else 1_500,
        noise=algorithm,
    ).ids
    assert (ids[[0, 2]] == 17_000).all()
    for row, own, other in ((1, 1.0, 0.7), (3, 0.7, 1.0)):
        assert goodness_of_fit(ids[row], torch.softmax(logits[row].double() / own, 0)) > 1e-4
        assert goodness_of_fit(ids[row], torch.softmax(logits[row].double() / other, 0)) < 1e-8


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
    # a word an id: many draws of a small vocabulary, whose halves are the runs of 128 that are compared
    vocab, draws = (256, 300_000) if algorithm == "element" else (8192, 60_000)
    ids = sample_logits(torch.zeros(1, vocab), seed=2, num_samples=draws, noise=algorithm).ids
    assert abs((ids < vocab // 2).double().mean().item() - 0.5) < 4 * 0.5 / draws**0.5
    assert abs((ids % 2 == 0).double().mean().item() - 0.5) < 4 * 0.5 / draws**0.5


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
