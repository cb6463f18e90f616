"""Which ids the CPU implementation may draw, and rows that hold a NaN, an infinity or nothing at all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsample_kernels import reference, sample, sample_logits, testing
from fsample_kernels.types import Noise, Problem

MakeProblem = Callable[..., Problem]
algorithms = pytest.mark.parametrize("algorithm", ["grouped", "element", "online"])


def exact_head(logits: Tensor, batch: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """hidden [batch, 16], weight [V, 16] whose product is exactly `logits` [V], which `dtype` must hold."""
    hidden, weight = torch.zeros(batch, 16, dtype=dtype), torch.zeros(logits.shape[0], 16, dtype=dtype)
    hidden[:, 0], weight[:, 0] = 1, logits.to(dtype)
    return hidden, weight


@algorithms
def test_masked_ids_are_never_drawn(algorithm: Noise) -> None:
    mask = torch.arange(3000) % 2 == 0
    ids = sample_logits(torch.zeros(1, 3000), seed=4, num_samples=3000, mask=mask, noise=algorithm).ids
    testing.assert_ids_in_range(ids, 3000)
    assert (ids % 2 == 0).all()


@algorithms
def test_padding_rows_are_never_drawn(algorithm: Noise) -> None:
    """A bound apart from the row count: zero rows lie far above the real logits, and so do untrained ones."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.cat(
        [torch.randn(1500, generator=generator) - 12, torch.zeros(36), torch.randn(100, generator=generator)]
    )
    hidden, weight = exact_head(logits)
    for temperature in (0.0, 1.0):
        ids = sample(
            hidden, weight, temperature=temperature, seed=1, num_samples=500, vocab_size=1500, noise=algorithm
        ).ids
        testing.assert_ids_in_range(ids, 1500)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("V", [1000, 1001])
@algorithms
def test_a_nan_row_is_minus_one_and_disturbs_no_other(algorithm: Noise, V: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(V, 32, generator=generator).bfloat16()
    hidden = torch.randn(6, 32, generator=generator).bfloat16()
    clean = sample(
        hidden, weight, seed=9, temperature=temperature, num_samples=5, noise=algorithm, want_lse=True
    )
    hidden[2, 0], hidden[4, 3] = torch.nan, torch.inf
    result = sample(
        hidden,
        weight,
        seed=9,
        temperature=temperature,
        num_samples=5,
        noise=algorithm,
        want_lse=True,
        want_logprob=True,
    )
    bad = torch.tensor([False, False, True, False, True, False])
    testing.assert_ids_in_range(result.ids, V, bad)
    assert torch.equal(result.ids[~bad], clean.ids[~bad])
    assert result.lse is not None and clean.lse is not None and result.logprob is not None
    assert torch.equal(result.lse[~bad], clean.lse[~bad])
    assert result.lse[bad].isnan().all() and result.logprob[bad].isnan().all()


@algorithms
def test_non_finite_logits(algorithm: Noise) -> None:
    """A NaN under the mask is just forbidden; +inf spoils its row; nothing allowed is -1 with lse -inf."""
    logits = torch.zeros(5, 300)
    logits[0, 7], logits[1, 8], logits[2], logits[3, :299] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits[4, 6] = torch.nan
    mask = torch.ones(300, dtype=torch.bool)
    mask[7] = False
    result = sample_logits(
        logits, seed=1, mask=mask, noise=algorithm, num_samples=20, want_lse=True, want_logprob=True
    )
    testing.assert_ids_in_range(result.ids, 300, torch.tensor([False, True, True, False, True]))
    assert (result.ids[0] != 7).all() and (result.ids[3] == 299).all()
    assert result.lse is not None and result.logprob is not None
    assert result.lse.tolist()[2:4] == [-math.inf, 0.0]
    assert result.lse.isnan().tolist() == [False, True, False, False, True]
    assert result.logprob[3].tolist() == [0.0] * 20
    assert result.logprob.isnan().any(1).tolist() == [False, True, True, False, True]


@algorithms
def test_groups_without_mass_beside_very_low_logits(algorithm: Noise) -> None:
    mask = torch.arange(5000) >= 4096
    for value in (-60.0, -120.0, -3e4):  # 2**-x leaves fp32 from the second on
        for given, allowed in ((None, 5000), (mask, 904)):
            result = sample_logits(
                torch.full((1, 5000), value), seed=0, mask=given, noise=algorithm, num_samples=3,
                want_lse=True, want_logprob=True,
            )  # fmt: skip
            assert result.lse is not None and result.logprob is not None
            assert result.lse.item() == pytest.approx(value + math.log(allowed), rel=1e-6)
            assert result.logprob[0].tolist() == pytest.approx([-math.log(allowed)] * 3, rel=1e-5)
            assert (result.ids >= 5000 - allowed).all()


def test_huge_logits_and_tiny_temperatures() -> None:
    logits = torch.tensor([[1e38, 9e37, -1e38], [1.0, 0.0, -3e38], [-1e30, -2e30, -3e38]])
    for temperature in (1.0, 1e-30, 1e-42, 1e-300):
        if temperature == 1e-30:
            continue  # 1e38 / 1e-30 counts as infinite, see below
        assert sample_logits(logits, seed=1, temperature=temperature).ids.tolist() == [[0], [0], [0]]
    assert sample_logits(logits, seed=1, temperature=2.0**-60).ids.tolist() == [[-1], [0], [-1]]


def test_packed_masks_are_read_by_global_id(make_problem: MakeProblem) -> None:
    generator = torch.Generator().manual_seed(6)
    V = 1669
    allowed = torch.rand(3, V, generator=generator) < 0.3
    padded = torch.cat([allowed, torch.zeros(3, -V % 32, dtype=torch.bool)], 1).view(3, -1, 32)
    words = (padded.long() << torch.arange(32)).sum(2)
    packed = torch.where(words >= 2**31, words - 2**32, words).int()
    strided = torch.full((3, packed.shape[1] + 5), -1, dtype=torch.int32)
    strided[:, : packed.shape[1]] = packed
    problem = make_problem(3, V, 16, num_samples=50)
    want = reference.run(dataclasses.replace(problem, mask=allowed)).ids
    assert torch.equal(reference.run(dataclasses.replace(problem, bitmask=packed)).ids, want)
    view = strided[:, : packed.shape[1]]
    assert torch.equal(reference.run(dataclasses.replace(problem, bitmask=view)).ids, want)
    short = dataclasses.replace(problem, bitmask=packed[:, :10].contiguous(), vocab_size=320)
    testing.assert_same_ids(short, reference.run(short).ids)
    one = reference.run(dataclasses.replace(problem, mask=allowed[1].expand(3, -1))).ids
    same = dataclasses.replace(problem, bitmask=packed[1:2].expand(3, -1))  # one row in memory for all
    assert torch.equal(reference.run(same).ids, one)
    # blocks of 4096 ids: whole chunks lie past the mask
    ended = make_problem(3, 9000, 16, noise="online", bitmask=packed[:, :10], vocab_size=320)
    testing.assert_same_ids(ended, reference.run(ended).ids)


def test_bad_sparse_bias_on_the_device_spoils_its_row_only() -> None:
    logits = torch.zeros(5, 100)
    rows, ids = torch.tensor([0, 1, 2, 3, 3]), torch.tensor([100, -1, 0, 1, 50])
    values = torch.tensor([5.0, 5.0, torch.nan, torch.inf, 60.0])
    result = sample_logits(logits, seed=1, logit_bias=(rows, ids, values), num_samples=4)
    testing.assert_ids_in_range(result.ids, 100, torch.tensor([True, True, True, True, False]))
    assert torch.equal(result.ids[4], sample_logits(logits, seed=1, num_samples=4).ids[4])
    outside = (torch.tensor([5]), torch.tensor([1]), torch.tensor([1.0]))
    assert (sample_logits(logits, seed=1, logit_bias=outside).ids == -1).all()
    head = torch.eye(5), torch.zeros(100, 5)
    stored = sample(*head, seed=1, logit_bias=(rows, ids, values), store_logits=True)
    assert stored.logits is not None and stored.logits[2, 0].isnan() and stored.logits[3, 1] == torch.inf
    inside = (torch.tensor([3, 3]), torch.tensor([50, 50]), torch.tensor([20.0, 20.0]))
    assert sample_logits(logits, seed=1, logit_bias=inside).ids[3].tolist() == [50]  # repeats add


def test_temperature_tensors_outside_their_range_spoil_their_rows() -> None:
    temperature = torch.tensor([math.nan, math.inf, -1.0, -0.0, 1e-30, 1.0])
    result = sample_logits(
        torch.eye(6, 50), temperature=temperature, seed=1, want_logprob=True, want_lse=True
    )
    testing.assert_ids_in_range(result.ids, 50, torch.tensor([True, True, True, False, False, False]))
    assert result.ids[3:5, 0].tolist() == [3, 4]
    position = torch.tensor([0, -1, 2**32, 2**32 - 1, 1, 2])
    ids = sample_logits(torch.eye(6, 50), seed=1, position=position).ids
    testing.assert_ids_in_range(ids, 50, torch.tensor([False, True, True, False, False, False]))


@algorithms
@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_softcap_does_not_unmask(algorithm: Noise, cap: float) -> None:
    """Spare lanes and masked ids stay at -inf: all real logits sit at -cap, where a capped -inf would be."""
    hidden, weight = exact_head(torch.full((1000,), -1000.0))
    mask = torch.arange(1000) % 3 != 0
    ids = sample(
        hidden, weight, softcap=cap, mask=mask, seed=1, num_samples=5000, vocab_size=990, noise=algorithm
    ).ids
    testing.assert_ids_in_range(ids, 990)
    assert (ids % 3 != 0).all()
