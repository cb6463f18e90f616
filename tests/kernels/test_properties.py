"""Any arguments at all: a ValueError that names the argument, or a right result. Never anything else.

FSAMPLE_EXAMPLES=10000 draws that many calls of either function in place of the default's 100.
"""

from __future__ import annotations

import math
import os
import re
import unittest.mock
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsample_kernels import api, sample, sample_logits
from fsample_kernels.oracle import Oracle
from fsample_kernels.testing import assert_ids_in_range, assert_same_ids, assert_same_rows, logit_error
from fsample_kernels.types import Problem, SampleResult

EXAMPLES = int(os.environ.get("FSAMPLE_EXAMPLES", "200")) // 2
PROFILE = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=timedelta(seconds=30),  # a hang shows; a busy machine does not
    suppress_health_check=list(HealthCheck),
)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Of no argument a value, of no type either
RUBBISH = st.sampled_from(
    [None, "", "1", b"1", object(), [], {}, (), [1.0], 1j, math.nan, True, -1, 0.5, print, numpy.zeros(2)]
)


class Call(NamedTuple):
    """Arguments of a call; `broken` are those with a value that may be outside the contract."""

    tensors: dict[str, Any]
    options: dict[str, Any]
    broken: frozenset[str]


def tensor(
    draw: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """Normal values, sometimes with odd ones and odd strides."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    values = (torch.randn(shape, generator=generator) * scale).to(dtype)
    if values.numel() and draw(st.integers(0, 5)) == 0:
        odd = draw(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e30, -1e30, 1e-40, 65504.0]))
        values.view(-1)[draw(st.integers(0, values.numel() - 1))] = odd
    if values.dim() == 2 and draw(st.integers(0, 3)) == 0:
        return values.t().contiguous().t()
    return values


def per_row(
    draw: Callable[..., Any], rows: int, values: list[Any], dtypes: tuple[torch.dtype, ...]
) -> Tensor:
    chosen = draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows))
    made = torch.tensor(chosen, dtype=draw(st.sampled_from(dtypes)))
    return made if draw(st.booleans()) or not rows else made[0]


def temperature(draw: Callable[..., Any], B: int, V: int) -> Any:
    values = [0.0, -0.0, 1e-30, 2.0**-64, 0.5, 1.0, 3.0, 1e30]
    if draw(st.booleans()):
        return draw(st.sampled_from([*values, 1, 0, numpy.float32(0.7)]))
    return per_row(draw, B, [*values, math.nan, math.inf, -1.0], (*FLOATS, torch.float64))


def seed(draw: Callable[..., Any], B: int, V: int) -> Any:
    if draw(st.booleans()):
        return draw(st.integers(-(2**63), 2**64 - 1))
    return per_row(draw, B, [0, 1, -1, 2**63 - 1, -(2**63)], (torch.int64,))


def position(draw: Callable[..., Any], B: int, V: int) -> Any:
    if draw(st.booleans()):
        return draw(st.integers(0, 2**32 - 1))
    if draw(st.booleans()):
        return per_row(draw, B, [0, 1, 2**31 - 1, -1], (torch.int32, torch.int64))
    return per_row(draw, B, [0, 2**32 - 1, 2**32, -(2**63)], (torch.int64,))


def logit_bias(draw: Callable[..., Any], B: int, V: int) -> Any:
    form = draw(st.sampled_from(["row", "all", "mapping", "mappings", "host", "device"]))
    if form in ("row", "all"):
        shape = (V,) if form == "row" else (B, V)
        return tensor(draw, shape, draw(st.sampled_from((*FLOATS, torch.float64))), 2.0)
    mapping = st.dictionaries(st.integers(0, V - 1), st.sampled_from([0.0, -3, 2.5, 1e30, -1e38]), max_size=4)
    if form == "mapping":
        return draw(mapping)
    if form == "mappings":
        return draw(st.lists(mapping, min_size=B, max_size=B))
    count = draw(st.integers(0, 4)) if B else 0
    low, high = (0, -1) if form == "host" else (-1, 0)  # on the device a bad entry spoils its row
    rows = draw(st.lists(st.integers(low, max(B + high, 0)), min_size=count, max_size=count))
    ids = draw(st.lists(st.integers(low, V + high), min_size=count, max_size=count))
    odd = [] if form == "host" else [math.nan, math.inf, -math.inf]
    values = draw(st.lists(st.sampled_from([1.0, -2.0, 30.0, *odd]), min_size=count, max_size=count))
    if form == "host":
        return draw(st.sampled_from([list, tuple]))((rows, ids, values))
    integer = draw(st.sampled_from([torch.int32, torch.int64]))
    floating = draw(st.sampled_from((*FLOATS, torch.float64)))
    return (
        torch.tensor(rows, dtype=integer), torch.tensor(ids, dtype=integer),
        torch.tensor(values, dtype=floating),
    )  # fmt: skip


def mask(draw: Callable[..., Any], B: int, V: int) -> Any:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    share = draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
    form = draw(st.sampled_from(["row", "all", "packed"]))
    if form == "packed":
        words = torch.randint(-(2**31), 2**31, (B, -(-V // 32)), generator=generator).to(torch.int32)
        return words if share else torch.zeros_like(words)
    return torch.rand((V,) if form == "row" else (B, V), generator=generator) < share


def choice(*values: Any) -> Callable[..., Any]:
    return lambda draw, B, V: draw(st.sampled_from(values))


OPTIONS: dict[str, Callable[..., Any]] = {
    "temperature": temperature,
    "seed": seed,
    "position": position,
    "num_samples": choice(0, 1, 2, 5, numpy.int64(2)),
    "logit_scale": choice(1.0, 0.0625, -1, 0.0, 1e30, 1e-30),
    "softcap": choice(None, 30.0, 1, 1e-3, 1e30),
    "logit_bias": logit_bias,
    "mask": mask,
    "vocab_size": lambda draw, B, V: draw(st.integers(1, V)),
    "noise": choice("grouped", "element", "online"),
    "math": choice("fast", "exact"),
    "want_logprob": choice(True, False),
    "want_lse": choice(True, False),
    "implementation": choice("auto", "reference"),
}
HEAD_OPTIONS: dict[str, Callable[..., Any]] = {
    **OPTIONS,
    "head_bias": lambda draw, B, V: tensor(draw, (V,), draw(st.sampled_from((*FLOATS, torch.float64)))),
    "store_logits": choice(True, False),
}
# Outside the contract, or inside it by chance; beside RUBBISH
WRONG: dict[str, list[Any]] = {
    "temperature": [math.inf, -math.inf, -0.5, 1e39, 10**400, torch.ones(1, 1), torch.ones(99),
                    torch.ones((), dtype=torch.int64), torch.ones((), device="meta")],
    "seed": [2**64, -(2**63) - 1, torch.zeros(99, dtype=torch.int64), torch.zeros(()),
             torch.zeros((), dtype=torch.int32), torch.zeros((), dtype=torch.int64, device="meta")],
    "position": [2**32, torch.zeros(99, dtype=torch.int64), torch.zeros(()), torch.tensor(True)],
    "num_samples": [-5, 2**32 + 1, 2.0, torch.tensor(2)],
    "logit_scale": [math.inf, -math.inf, 10**400, torch.ones(())],
    "softcap": [0, -30.0, math.inf, 10**400, torch.ones(())],
    "logit_bias": [{-1: 1.0}, {0: math.nan}, {0: 1e39}, {10**30: 1.0}, {"0": 1.0}, {0: "1"}, {0.0: 1.0},
                   {0: None}, [{}] * 99, ([0], [0], [math.inf]), ([0], [0, 1], [1.0]), ([99], [0], [1.0]),
                   ("a", "b", "c"), ([[0]], [[0]], [[1.0]]), (torch.zeros(1), torch.zeros(1), torch.zeros(1)),
                   (torch.zeros(1, dtype=torch.int64), [0], [1.0]), torch.zeros(99), torch.zeros(()),
                   (torch.zeros(1, 1, dtype=torch.int64),) * 2 + (torch.zeros(1, 1),), torch.zeros(3, 3, 3)],
    "mask": [torch.ones(()), torch.ones(99, dtype=torch.bool), torch.ones(1, 1, 1, dtype=torch.bool),
             torch.ones((), dtype=torch.bool), torch.ones(99, 1, dtype=torch.int32), [True],
             torch.ones(1, dtype=torch.int32), torch.ones(3, device="meta", dtype=torch.bool)],
    "vocab_size": [0, -3, 10**9, 2.0, torch.tensor(3)],
    "noise": ["Grouped", "gumbel"],
    "math": ["sloppy"],
    "want_logprob": [0, 1, torch.tensor(True)],
    "want_lse": ["yes"],
    "implementation": ["triton", "hopper", "cuda", "AUTO"],
    "head_bias": [torch.zeros(99), torch.zeros(()), torch.zeros(1, 1), torch.zeros(3, dtype=torch.int32)],
    "store_logits": [2],
    "hidden": [torch.zeros(3), torch.zeros(2, 99), torch.zeros(2, 0), torch.zeros(2, 3, 4), torch.zeros(()),
               torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.int64),
               torch.zeros(2, 8, device="meta"), torch.zeros(2, 8).to_sparse(), [[1.0]]],
    "weight": [torch.zeros(0, 8), torch.zeros(3), torch.zeros(5, 99), torch.zeros(5, 0),
               torch.zeros(5, 8, dtype=torch.complex64), torch.zeros(5, 8, device="meta"),
               torch.zeros(5, 8).to_sparse(), torch.zeros(5, 8).to(torch.float8_e4m3fn)],
    "logits": [torch.zeros(3), torch.zeros(2, 0), torch.zeros(2, 3, 4),
               torch.zeros(2, 5, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.bool),
               torch.zeros(2, 5, device="meta"), torch.zeros(2, 5).to_sparse()],
}  # fmt: skip
# Words that name an argument in a message, where its own name does not have to be there
ALSO_NAMED = {"hidden": "hidden|weight|batch", "weight": "hidden|weight", "logits": "logits|batch"}


@st.composite
def calls(draw: Callable[..., Any], head: bool) -> Call:
    B, V = (
        draw(st.sampled_from([1, 2, 3, 4, 1, 2, 3, 0])),
        draw(st.sampled_from([1, 2, 31, 33, 100, 128, 129, 300])),
    )
    dtype = draw(st.sampled_from(FLOATS))
    tensors: dict[str, Any]
    if head:
        D = draw(st.sampled_from([1, 8, 17]))
        tensors = {"hidden": tensor(draw, (B, D), dtype, 2.0), "weight": tensor(draw, (V, D), dtype)}
    else:
        tensors = {"logits": tensor(draw, (B, V), dtype, 3.0)}
    known = HEAD_OPTIONS if head else OPTIONS
    # A few of them for most calls, so that not every row is spoiled; a generator needs a seed to be compared
    names = draw(st.sets(st.sampled_from(sorted(known)), max_size=5)) | {"seed"}
    options = {name: known[name](draw, B, V) for name in sorted(names)}
    broken = frozenset(
        draw(st.sets(st.sampled_from(sorted({*known, *tensors})), min_size=1, max_size=2))
        if draw(st.booleans())
        else ()
    )
    for name in sorted(broken):
        place = tensors if name in tensors else options
        place[name] = draw(RUBBISH | st.sampled_from(WRONG[name]))
    return Call(tensors, options, broken)


@PROFILE
@given(calls(head=True))
def test_sample(call: Call) -> None:
    event(check(sample, call))


@PROFILE
@given(calls(head=False))
def test_sample_logits(call: Call) -> None:
    event(check(sample_logits, call))


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


def check_refusal(message: str, call: Call) -> None:
    """One line, that names an argument which was given something outside the contract."""
    blamed = call.broken | (
        {"mask", "vocab_size", "logit_bias"} & set(call.options) if call.broken else set()
    )
    # A broken first argument, or vocab_size, changes the shapes that the others have to fit.
    if call.broken & {"hidden", "weight", "logits"}:
        blamed |= set(call.options) | set(call.tensors)
    elif "vocab_size" in call.options:
        blamed |= {"mask", "logit_bias"} & set(call.options)
    words = "|".join(ALSO_NAMED.get(name, name) for name in sorted(blamed)) or "(?!)"
    assert re.search(rf"\b({words})\b", message), (message, call)
    assert "\n" not in message, message


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
