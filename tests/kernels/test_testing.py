"""The numerical assertions: they explain what rounding can do, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from fsample_kernels import noise, reference, testing
from fsample_kernels.oracle import Oracle
from fsample_kernels.types import Noise, Problem

MakeProblem = Callable[..., Problem]
algorithms = pytest.mark.parametrize("algorithm", ["grouped", "element", "online"])


def given(problem: Problem, scale: float) -> Problem:
    """The problem's logits, changed by up to `scale`, as a problem of its own."""
    logits = Oracle(problem).y
    change = (
        torch.rand(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.5
    ) * 2
    return dataclasses.replace(problem, hidden=None, weight=None, logits=(logits + change * scale).float())


@algorithms
def test_rounding_is_explained_and_more_is_not(
    make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch, algorithm: Noise
) -> None:
    """Logits off by less than the budget change a few ids, each explained; off by much more, not each."""
    problem = make_problem(4, 4500, 64, noise=algorithm, num_samples=300)
    monkeypatch.setattr(testing, "logit_error", lambda _: torch.full((4,), 0.05, dtype=torch.float64))
    close = testing.compare_ids(problem, reference.run(given(problem, 0.045)).ids)
    assert len(close.mismatches) > 3 and not close.unexplained, str(close)
    far = testing.compare_ids(problem, reference.run(given(problem, 1.0)).ids)
    assert len(far.unexplained) > 20, str(far)


def test_the_budget_is_the_size_of_rounding(make_problem: MakeProblem) -> None:
    """Above the error of an fp32 product, and not a hundred times above it."""
    problem = make_problem(5, 3000, 1024)
    assert problem.hidden is not None and problem.weight is not None
    error = (problem.hidden @ problem.weight.t() - Oracle(problem).y).abs().amax(1)
    budget = testing.logit_error(problem)
    assert (error < budget).all() and (budget < 100 * error).all()


@algorithms
def test_wrong_noise_and_wrong_ids_fail(make_problem: MakeProblem, algorithm: Noise) -> None:
    problem = make_problem(3, 700, 32, noise=algorithm, num_samples=30)
    ids = reference.run(problem).ids
    testing.assert_same_ids(problem, ids)
    other = reference.run(dataclasses.replace(problem, position=8)).ids
    with pytest.raises(AssertionError, match="of 90 ids differ.*beyond rounding"):
        testing.assert_same_ids(problem, other)
    off = ids.clone()
    off[1, 7] = (off[1, 7] + 1) % 700
    with pytest.raises(AssertionError, match="row 1 sample 7: got"):
        testing.assert_same_ids(problem, off)
    for outside in (-1, 700, 10**9):
        off[1, 7] = outside
        with pytest.raises(AssertionError, match="1 beyond rounding"):
            testing.assert_same_ids(problem, off)


def test_ties_of_flat_logits_do_not_hide_wrong_noise(make_problem: MakeProblem) -> None:
    """Explained differences are counted too: more than max_share of them fail."""
    problem = dataclasses.replace(make_problem(1, 64, 16, noise="grouped", num_samples=200), logit_scale=0.0)
    ids = reference.run(problem).ids
    testing.assert_same_ids(problem, ids)
    with pytest.raises(AssertionError):
        testing.assert_same_ids(problem, reference.run(dataclasses.replace(problem, seed=6)).ids)


@algorithms
def test_row_results_off_by_little_fail(make_problem: MakeProblem, algorithm: Noise) -> None:
    problem = make_problem(
        3, 700, 32, noise=algorithm, num_samples=5, want_lse=True, want_logprob=True, store_logits=True
    )
    result = reference.run(problem)
    testing.assert_same_rows(problem, result)
    assert result.lse is not None and result.logprob is not None and result.logits is not None
    for field in ("lse", "logprob", "logits"):
        changed = getattr(result, field) - 1e-3
        with pytest.raises(AssertionError, match=field):
            testing.assert_same_rows(problem, result._replace(**{field: changed}))
    with pytest.raises(AssertionError, match="logits"):
        logits = result.logits.clone()
        logits[2, 600] = torch.nan
        testing.assert_same_rows(problem, result._replace(logits=logits))


def test_the_oracle_is_a_plain_gumbel_max(make_problem: MakeProblem) -> None:
    """Element noise, written out: argmax of y / T + Gumbel, that of id i from word i % 4 of unit i // 4."""
    problem = make_problem(2, 300, 8, noise="element", num_samples=3, temperature=0.7)
    assert problem.hidden is not None and problem.weight is not None
    y = problem.hidden.double() @ problem.weight.double().t()
    streams = noise.row_streams(problem.seed, 7, 2, torch.device("cpu"))
    for sample in range(3):
        words = torch.stack(streams.lanes().words(torch.arange(75), sample, noise.ELEMENT), 2).flatten(1)
        gumbel = -torch.log(-torch.log1p(-((words.double() + 0.5) / 2**32)))
        assert torch.equal((y / 0.7 + gumbel).argmax(1), Oracle(problem).draw(sample))
