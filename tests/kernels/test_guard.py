"""Checked mode: what is right passes and stays as it is; each planted fault is caught and named."""

from __future__ import annotations

import dataclasses
import doctest
import os
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsample_kernels import (
    CheckError,
    SampleResult,
    api,
    buffers,
    checked,
    guard,
    reference,
    sample,
    sample_logits,
)
from fsample_kernels.types import Problem
from tests.kernels import rank_jobs
from tests.kernels.ranks import run_ranks

MakeProblem = Callable[..., Problem]
EVERYTHING: dict[str, Any] = {"want_logprob": True, "want_lse": True, "store_logits": True}


@pytest.fixture(autouse=True)
def _off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off but for `checked`, whatever the environment of these tests says."""
    monkeypatch.setattr(guard, "_environment", lambda: False)


def head(B: int = 4, V: int = 300, D: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(B + V)
    return torch.randn(B, D, generator=generator), torch.randn(V, D, generator=generator)


def test_examples_in_the_docstrings_run() -> None:
    result = doctest.testmod(guard)
    assert result.attempted > 1 and result.failed == 0


@pytest.mark.parametrize("noise", ["grouped", "element", "online"])
def test_right_calls_pass_and_draw_the_same(noise: Any) -> None:
    hidden, weight = head(6)
    mask = torch.ones(6, 300, dtype=torch.bool)
    mask[1] = False  # nothing to draw
    mask[2, 7:] = False
    bits = torch.full((6, 10), -(1 << 31), dtype=torch.int32)  # id 31 of each word; bit 31 is the sign
    hidden[3, 0] = torch.nan
    heat = torch.tensor([0.0, 1.0, 0.7, 1.0, 0.0, 3.0])
    calls: list[dict[str, Any]] = [
        {}, {"num_samples": 5, **EVERYTHING}, {"num_samples": 0, **EVERYTHING}, {"temperature": heat},
        {"mask": mask, "temperature": heat, **EVERYTHING}, {"mask": mask[2], **EVERYTHING},
        {"mask": bits, "num_samples": 3}, {"logit_bias": {5: 9.0}, "vocab_size": 200, "softcap": 2.0},
    ]  # fmt: skip
    for call in calls:
        want = sample(hidden, weight, seed=3, noise=noise, **call)
        with checked():
            got = sample(hidden, weight, seed=3, noise=noise, **call)
        for a, b in zip(want[:4], got[:4], strict=True):
            assert (a is None) == (b is None)
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    with checked():
        assert sample(hidden[:0], weight).ids.shape == (0, 1)
        assert sample_logits(weight[:3], seed=1, noise=noise).ids.shape == (3, 1)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": (
        {"temperature": torch.tensor([1.0, torch.nan, -1.0, torch.inf])},
        r"temperature must be finite and 0 or above, got \[nan, -1.0, inf\] in rows \[1, 2, 3\]",
    ),
    "0-d temperature": (
        {"temperature": torch.tensor(-2.0)},
        r"temperature .* got \[-2.0, -2.0, -2.0, -2.0\] in rows \[0, 1, 2, 3\]",
    ),
    "position": (
        {"position": torch.tensor([0, 1, 1 << 32, -1])},
        r"position must be in \[0, 2\*\*32\), got \[4294967296, -1\] in rows \[2, 3\]",
    ),
    "0-d position": ({"position": torch.tensor(-5)}, r"position must be .* got \[-5\] in rows \[0\]"),
    "ids": (
        {"logit_bias": (torch.tensor([0, 1]), torch.tensor([5, -1]), torch.ones(2))},
        r"logit_bias ids must be in \[0, 300\), got \[-1\] in entries \[1\]",
    ),
    "rows": (
        {"logit_bias": (torch.tensor([4, 1]), torch.tensor([5, 1]), torch.ones(2))},
        r"logit_bias rows must be in \[0, 4\), got \[4\] in entries \[0\]",
    ),
    "values": (
        {"logit_bias": (torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([torch.nan, 1e40]))},
        r"logit_bias values must be finite in fp32, got \[nan, inf\] in entries \[0, 1\]",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_values_on_the_device_are_named(what: str) -> None:
    """Unchecked they give id -1. Many bad rows are not all listed."""
    hidden, weight = head()
    call, pattern = BAD[what]
    assert (sample(hidden, weight, seed=1, **call).ids == -1).any()
    with checked(), pytest.raises(ValueError, match=pattern):
        sample(hidden, weight, seed=1, **call)
    with checked(), pytest.raises(ValueError, match=r"rows \[0, 1, 2, 3, 4, \.\.\.\]; correct the tensor"):
        sample(*head(50), temperature=torch.full((50,), -1.0))


def change(field: str, at: tuple[int, ...], value: float) -> Callable[[SampleResult], SampleResult]:
    def planted(result: SampleResult) -> SampleResult:
        values = getattr(result, field).clone()
        values[at] = value
        return result._replace(**{field: values})

    return planted


FAULTS = {
    "id V": (change("ids", (2, 1), 300), "id 300 in row 2, sample 1, out of range"),
    "id -2": (change("ids", (3, 0), -2), "id -2 in row 3, sample 0, out of range"),
    "masked id": (change("ids", (1, 0), 13), "id 13 in row 1, sample 0, which the mask forbids"),
    "no id": (change("ids", (1, 0), -1), "logprob .* in row 1, sample 0, beside id -1"),
    "logprob above 0": (change("logprob", (2, 0), 1e-6), "logprob .* in row 2, sample 0, beside id"),
    "logprob NaN": (change("logprob", (2, 1), torch.nan), "logprob nan in row 2, sample 1, beside id"),
    "logprob -inf": (change("logprob", (2, 1), -torch.inf), "logprob -inf in row 2, sample 1"),
    "lse NaN": (change("lse", (1,), torch.nan), "lse nan in row 1, sample 0, beside id"),
    "lse inf": (change("lse", (1,), torch.inf), "lse inf in row 1, sample 0, beside id"),
}


def plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[SampleResult], SampleResult]) -> None:
    def run(problem: Problem) -> SampleResult:
        return fault(reference.run(problem))._replace(implementation="planted")

    monkeypatch.setattr(api, "choose", lambda *_: SimpleNamespace(run=run))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_implementation_is_caught(monkeypatch: pytest.MonkeyPatch, fault: str, packed: bool) -> None:
    planted, pattern = FAULTS[fault]
    hidden, weight = head()
    mask = torch.ones(4, 300, dtype=torch.bool)
    mask[:, 13] = False
    words = torch.full((4, 10), -1, dtype=torch.int32)
    words[:, 0] = ~(1 << 13)
    call: dict[str, Any] = {"seed": 1, "num_samples": 2, "mask": words if packed else mask, **EVERYTHING}
    plant(monkeypatch, planted)
    sample(hidden, weight, **call)
    with checked(), pytest.raises(CheckError, match=pattern) as caught:
        sample(hidden, weight, **call)
    for part in ("implementation 'planted'", "B = 4, V = 300", "doctor --json"):
        assert part in str(caught.value)


def test_a_row_given_up_without_a_reason_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = head()
    plant(monkeypatch, change("ids", (2, 0), -1))
    with checked(), pytest.raises(CheckError, match="id -1 in row 2, sample 0, in a row where the reference"):
        sample(hidden, weight, seed=1)
    hidden[2, 3] = torch.nan
    with checked():
        assert sample(hidden, weight, seed=1).ids[2] == -1


def test_what_is_not_written_is_found() -> None:
    """In each dtype; and a NaN, a -1 and a False that a kernel wrote are none of it."""
    dtypes = (torch.float32, torch.int32, torch.int64, torch.bool)
    found: list[Tensor] = []
    with buffers.watched(found):
        made = [buffers.empty((2, 3), dtype, torch.device("cpu")) for dtype in dtypes]
        scratch = torch.zeros(4)
        buffers.spoil(scratch)
    assert scratch.isnan().all() and all(a is b for a, b in zip(made, found, strict=True))
    for buffer in made:
        assert buffers.unwritten(buffer) == [0, 0]
        buffer[:] = {torch.float32: torch.nan, torch.bool: False}.get(buffer.dtype, -1)
        assert buffers.unwritten(buffer) is None
    with buffers.watched([]):
        assert buffers.unwritten(buffers.empty((0, 3), torch.float32, torch.device("cpu"))) is None
    zeros = torch.zeros(4)
    buffers.spoil(zeros)  # nobody watches
    assert not zeros.any()


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("over", ["head", "logits"])
def test_kernels_that_leave_slots_unwritten_are_caught(
    make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch, over: str
) -> None:
    """Each of the two launches with a program less than it takes."""
    from fsample_kernels.ops import lm_head_sample, logits_sample, reduce_candidates

    problem = make_problem(2, 600, 16, num_samples=2, **EVERYTHING)
    module: Any = lm_head_sample
    if over == "logits":
        assert problem.hidden is not None and problem.weight is not None
        logits = problem.hidden @ problem.weight.T
        problem = dataclasses.replace(problem, hidden=None, weight=None, logits=logits, store_logits=False)
        module = logits_sample
    want = api.run(problem, "triton")
    with checked():
        got = api.run(problem, "triton")
    assert torch.equal(got.ids, want.ids)

    class Fewer:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int]) -> Any:
            return self.kernel[(grid[0] - 1,)]

    for patched, dtype in ((module, "float32"), (reduce_candidates, "int64")):
        with monkeypatch.context() as patch:
            patch.setattr(patched, "ready", Fewer)
            with (
                checked(),
                pytest.raises(CheckError, match=rf"'triton' left entry \[.*\] of a buffer, {dtype}"),
            ):
                api.run(problem, "triton")


def test_several_ranks_check_what_they_have() -> None:
    """A fault on one rank is raised there; a bad tensor on both, after the exchange: the group goes on."""
    quiet, caught = run_ranks(2, rank_jobs.checked_calls)
    assert quiet[0] == "drew"
    assert re.match("implementation 'reference.candidates' gave id 301 in row 0", caught[0])
    for rank in (quiet, caught):
        assert rank[1].startswith("temperature must be finite")
        assert rank[2:] == ["drew", "drew"]


@pytest.mark.parametrize(
    ("value", "says"),
    [(None, "off"), ("", "off"), ("0", "off"), ("1", "on"), ("yes", "FSAMPLE_CHECK must be 1")],
)
def test_the_environment_switches_it_on(value: str | None, says: str) -> None:
    """In every thread, but for `checked(False)`, which like `checked()` counts on its own thread."""
    code = """
import concurrent.futures, torch, fsample_kernels
def call():
    try:
        fsample_kernels.sample(torch.zeros(1, 16), torch.zeros(9, 16), temperature=torch.tensor(-1.0))
    except ValueError as error:
        return "on" if str(error).startswith("temperature") else str(error)
    return "off"
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    print(call(), pool.submit(call).result(), sep="\\n")
    with fsample_kernels.checked(False):
        print(call())
    with fsample_kernels.checked():
        print(call(), pool.submit(call).result(), sep="\\n")
"""
    environment = {name: text for name, text in os.environ.items() if name != guard.VARIABLE}
    if value is not None:
        environment[guard.VARIABLE] = value
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[: len(says)] for line in (lines[0], lines[1], lines[4])] == [says] * 3
    assert lines[2:4] == ["off", "on"]


def test_a_compiled_call_is_checked() -> None:
    hidden, weight = head()
    compiled = torch.compile(
        lambda heat: sample(hidden, weight, seed=1, temperature=heat).ids, backend="eager", fullgraph=True
    )
    assert compiled(torch.tensor(-1.0)).eq(-1).all()
    with checked(), pytest.raises(ValueError, match="temperature must be finite"):
        compiled(torch.tensor(-1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["hopper", "triton", "unfused", "reference"])
@pytest.mark.parametrize("rows", [1, 40, 200])
def test_right_calls_pass_on_a_gpu(implementation: Any, rows: int) -> None:
    if implementation == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    hidden, weight = (x.bfloat16().cuda() for x in head(rows, 17_000, 256))
    hidden[0, 0] = torch.nan
    sparse = (torch.zeros(3, dtype=torch.int64), torch.arange(3), torch.ones(3))
    calls: list[dict[str, Any]] = [
        {}, {"num_samples": 3}, {"want_logprob": True, "want_lse": True},
        {"store_logits": True, "vocab_size": 16_900},
        {"logit_bias": tuple(part.cuda() for part in sparse), "noise": "element"},
        {"mask": torch.rand(rows, 17_000, device="cuda") < 0.5, "vocab_size": 16_000},
        {"mask": torch.randint(-(2**31), 2**31 - 1, (rows, 532), dtype=torch.int32, device="cuda")},
    ]  # fmt: skip
    for call in calls:
        want = sample(hidden, weight, seed=3, implementation=implementation, **call)
        with checked():
            got = sample(hidden, weight, seed=3, implementation=implementation, **call)
        assert torch.equal(got.ids, want.ids) and (got.ids[0] == -1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["hopper", "triton"])
def test_planted_faults_are_caught(monkeypatch: pytest.MonkeyPatch, implementation: Any) -> None:
    """A kernel that is not launched, and one that counts ids from too high; a bad tensor; a capture."""
    if implementation == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    from fsample_kernels.ops import hopper_sample, lm_head_sample

    module = hopper_sample if implementation == "hopper" else lm_head_sample
    ready = module.ready
    hidden, weight = (x.bfloat16().cuda() for x in head(4, 5000, 64))

    def call(**options: Any) -> SampleResult:
        return sample(hidden, weight, seed=1, implementation=implementation, **options)

    class Shifted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(**values: Any) -> None:
                ready(self.kernel)[grid](**values | {"first_id": values["first_id"] + 8192})

            return launch

    class Nothing(Shifted):
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda **values: None

    call(num_samples=2)
    for planted, pattern in ((Nothing, "left entry"), (Shifted, "out of range")):
        with monkeypatch.context() as patch:
            patch.setattr(module, "ready", planted)
            for options in ({}, {"num_samples": 2}):
                with checked(), pytest.raises(CheckError, match=f"'{implementation}' .*{pattern}"):
                    call(**options)
    with checked(), pytest.raises(ValueError, match="temperature must be finite"):
        call(temperature=torch.tensor(-1.0, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with checked(), torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="cannot be captured in a CUDA graph"):
            call()
        with checked(False):
            ids = call().ids
    graph.replay()
    assert torch.equal(ids, call().ids)
