"""The kernel over existing logits, in the interpreter, against the reference with the same noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from fsample_kernels import reference
from fsample_kernels.ops import configs, logits_sample
from fsample_kernels.types import Problem, SampleResult

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

MakeProblem = Callable[..., Problem]


@pytest.fixture
def make_logits(make_problem: MakeProblem) -> MakeProblem:
    """make_logits(B, V, **fields): logits with std 2 and every result asked for."""

    def make(B: int, V: int, dtype: torch.dtype = torch.float32, **fields: object) -> Problem:
        problem = make_problem(B, V, 16, want_logprob=True, want_lse=True, **fields)
        assert problem.hidden is not None and problem.weight is not None
        logits = (problem.hidden @ problem.weight.T).to(dtype)
        return dataclasses.replace(problem, hidden=None, weight=None, logits=logits)

    return make


def check(problem: Problem) -> SampleResult:
    got, want = logits_sample.run(problem), reference.run(problem)
    assert got.ids.tolist() == want.ids.tolist()
    for name in ("logprob", "lse"):
        torch.testing.assert_close(
            getattr(got, name), getattr(want, name), rtol=1e-5, atol=2e-5, equal_nan=True
        )
    return got


# V: one id, one past a group's block, more than one of the short tiles with a tail.
@pytest.mark.parametrize("noise", ["grouped", "element"])
@pytest.mark.parametrize("B, V", [(1, 1), (3, 127), (2, 129), (3, 2100)])
def test_small_odd_sizes(make_logits: MakeProblem, noise: str, B: int, V: int) -> None:
    check(make_logits(B, V, noise=noise))


@pytest.mark.parametrize("noise", ["grouped", "element"])
def test_long_tiles_of_many_rows(make_logits: MakeProblem, noise: str) -> None:
    assert configs.pick_streaming(9) != configs.pick_streaming(8)
    check(make_logits(9, 4100, torch.float16, noise=noise))


@pytest.mark.parametrize("noise", ["grouped", "element"])
def test_parameters_and_transforms(make_logits: MakeProblem, noise: str) -> None:
    generator = torch.Generator().manual_seed(21)
    words = torch.randint(-(1 << 31), 1 << 31, (4, 10), generator=generator).to(torch.int32)
    check(make_logits(
        4, 300, noise=noise, num_samples=2, temperature=torch.tensor([0.0, 0.5, 2.0, -1.0]),
        seed=torch.tensor([1, 2, 3, 4]), position=torch.tensor([9, 8, 7, 6]), logit_scale=2.0, softcap=3.0,
        logit_bias=torch.randn(300, generator=generator), mask=torch.rand(4, 300, generator=generator) > 0.3,
        sparse_bias=(torch.tensor([0, 1, 2, 1]), torch.tensor([299, 0, 128, 0]), torch.arange(4.0)),
        bitmask=words, vocab_size=299, first_id=0,
    ))  # fmt: skip


def test_bad_and_forbidden_logits(make_logits: MakeProblem) -> None:
    problem = make_logits(5, 300)
    assert problem.logits is not None
    problem.logits[0, 7] = torch.nan
    problem.logits[1, 299] = torch.inf
    problem.logits[2] = -torch.inf
    problem.logits[3, 1:] = -torch.inf
    assert check(problem).ids[:4, 0].tolist() == [-1, -1, -1, 0]


def test_strided_logits(make_logits: MakeProblem) -> None:
    problem = make_logits(3, 300)
    assert problem.logits is not None
    strided = torch.zeros(301, 6)[1:, ::2].copy_(problem.logits.T).T
    assert check(dataclasses.replace(problem, logits=strided)).ids.tolist() == check(problem).ids.tolist()


def test_a_shard_draws_by_global_id(make_logits: MakeProblem) -> None:
    check(make_logits(3, 300, first_id=200, vocab_size=460))
