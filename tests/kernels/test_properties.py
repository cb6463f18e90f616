"""Any arguments at all: a ValueError that names the argument, or a right result. Never anything else.

FSAMPLE_EXAMPLES=10000 draws that many calls of both functions in place of the default's 200.
"""

from __future__ import annotations

import math
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import event, given
from torch import Tensor

from fsample_kernels import api, sample, sample_logits
from fsample_kernels.oracle import Oracle
from fsample_kernels.testing import assert_ids_in_range, assert_same_ids, assert_same_rows, logit_error
from fsample_kernels.types import Problem, SampleResult
from tests.kernels.any_arguments import (
    HEAD_OPTIONS,
    OPTIONS,
    PROFILE,
    Call,
    calls,
    check_refusal,
    each_alone,
)


@PROFILE
@given(calls(head=True))
def test_sample(call: Call) -> None:
    event(check(sample, call))


@PROFILE
@given(calls(head=False))
def test_sample_logits(call: Call) -> None:
    event(check(sample_logits, call))


def test_each_wrong_value_alone() -> None:
    head = Call({"hidden": torch.randn(2, 8), "weight": torch.randn(9, 8)}, {"seed": 1}, frozenset())
    for call, wrong in each_alone(head, {*head.tensors, *HEAD_OPTIONS}):
        assert check(sample, call) == "refused" or not wrong, call
    logits = Call({"logits": torch.randn(2, 9)}, {"seed": 1}, frozenset())
    for call, wrong in each_alone(logits, {"logits", *OPTIONS}):
        assert check(sample_logits, call) == "refused" or not wrong, call


def check(function: Callable[..., SampleResult], call: Call) -> str:
    """What became of the call, in a word. Raises AssertionError."""
    problems: list[Problem] = []

    def spied(problem: Problem, implementation: str = "auto") -> SampleResult:
        problems.append(problem)
        return run(problem, implementation)

    run = api.run
    with unittest.mock.patch.object(api, "run", spied):
        try:
            result = function(**call.tensors, **call.options)
        except ValueError as error:
            check_refusal(str(error), call)
            return "refused"
    return check_result(problems[0], result, call)


def check_result(problem: Problem, result: SampleResult, call: Call) -> str:
    rows, samples = problem.num_rows, problem.num_samples
    assert result.ids.shape == (rows, samples) and result.ids.dtype == torch.int64
    if rows == 0:
        return "empty"
    exact = Oracle(problem)
    want = exact.result()
    for name in ("want_logprob", "want_lse", "store_logits"):
        field = getattr(result, name.partition("_")[2])
        assert (field is not None) == bool(call.options.get(name, False))
    dead = exact.bad | exact.empty
    overflowing = beyond_fp32(exact)
    assert (result.ids >= -1).all() and (result.ids < problem.vocab_size).all()
    if overflowing.any():
        return "beyond fp32"
    assert_ids_in_range(result.ids, problem.vocab_size, dead)
    assert_same_ids(problem, result.ids, max_share=1.0 if nearly_flat(exact) else 0.05)
    assert_same_rows(problem, result)
    error = logit_error(problem)
    assert want.logits is not None
    for row in (exact.greedy & ~dead).nonzero()[:, 0].tolist():
        for token in result.ids[row].tolist():
            top = float(want.logits[row].amax())
            assert float(want.logits[row, token]) >= top - 2 * float(error[row]) - 2.0**-22 * abs(top)
    return "drawn" if samples else "no samples"


def nearly_flat(exact: Oracle) -> bool:
    """Whether some row may have ties in fp32 that are none in float64, each of which rounding may decide.

    A soft-cap far below the logits makes them, and so does a scale or temperature that takes all of a row's
    logits below the last bit of 1.
    """
    high = exact.x.amax(1)
    low = exact.x.masked_fill(exact.x == -torch.inf, torch.inf).amin(1)
    return exact.problem.softcap is not None or bool(((high > low) & (high - low < 2.0**-16)).any())


def beyond_fp32(exact: Oracle) -> Tensor:
    """Rows where an intermediate step may leave the range of fp32, which the contract leaves open."""
    y, x = exact.y, exact.x
    return (
        (y.isfinite() & (y.abs() > 1e37)).any(1)
        | (x.isfinite() & (x.abs() > 1e37)).any(1)
        | torch.tensor([intermediate(exact.problem) > 1e37]).expand(y.shape[0])
    )


def intermediate(problem: Problem) -> float:
    """A bound on what the product, the scale and the bias reach on the way to y."""
    source = (problem.hidden, problem.weight, problem.logits, problem.head_bias, problem.logit_bias)
    sizes = [
        float(part.double().nan_to_num(0, 0, 0).abs().max())
        for part in source
        if part is not None and part.numel()
    ]
    return math.prod(max(size, 1.0) for size in sizes) * 32 * max(abs(problem.logit_scale), 1.0)


def test_the_checks_can_fail() -> None:
    call = Call({"logits": torch.zeros(2, 9)}, {"seed": 1, "softcap": -1}, frozenset({"softcap"}))
    with pytest.raises(AssertionError):
        check_refusal("position must be in [0, 2**32)", call)

    def crash(**arguments: Any) -> SampleResult:
        raise TypeError("no ValueError")

    with pytest.raises(TypeError, match="no ValueError"):
        check(crash, call)
    fair = Call({"logits": torch.randn(2, 9)}, {"seed": 1, "num_samples": 4}, frozenset())
    for spoil in (lambda ids: ids + 9, lambda ids: ids * 0 - 1, lambda ids: (ids + 1) % 9):

        def wrong(spoil: Callable[[Tensor], Tensor] = spoil, **arguments: Any) -> SampleResult:
            right = sample_logits(**arguments)
            return right._replace(ids=spoil(right.ids))

        with pytest.raises(AssertionError):
            check(wrong, fair)
