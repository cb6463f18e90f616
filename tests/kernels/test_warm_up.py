"""After `warm_up` no call compiles: the variants of B = 1..256 counted without a GPU, and on one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from fsample_kernels import api, compile_only, sample, sample_logits, tables, warm_up, warm_up_logits
from fsample_kernels.ops import (
    arguments,
    compiling,
    exchange,
    hopper_configs,
    hopper_kernel,
    hopper_sample,
    lm_head_sample,
    logits_sample,
    reduce_candidates,
    sort_sparse,
)

V, D = 1000, 96
KERNELS = (
    hopper_kernel.hopper_kernel, lm_head_sample.lm_head_sample_kernel, logits_sample.logits_sample_kernel,
    reduce_candidates.reduce_candidates_kernel, exchange.exchange_kernel, sort_sparse.sort_sparse_kernel,
)  # fmt: skip


class FakeDriver:
    """Enough of a driver to type a launch for an H200; nothing is loaded or started."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls on CPU tensors choose and type kernels as on an H200; each compilation adds its kernel's name."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter compiles nothing")
    names: list[str] = []

    def compile_nothing(source: Any, **options: object) -> SimpleNamespace:
        names.append(source.fn.__name__)
        return SimpleNamespace(metadata=SimpleNamespace(name=source.fn.__name__))

    for kernel in KERNELS:
        kernel.device_caches.clear()
    monkeypatch.setattr(triton.runtime.driver, "_active", FakeDriver())
    for kernel in KERNELS:
        assert kernel.device_caches[0] is not None  # making it sets what compiles
        monkeypatch.setattr(kernel, "compile", compile_nothing)
    monkeypatch.setattr(arguments, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(arguments, "on_device", contextlib.nullcontext)
    monkeypatch.setattr(hopper_sample, "sm_count", lambda device: 132)
    monkeypatch.setattr(hopper_sample, "why_not", hopper_why_not)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(api, "device_of", lambda problem: torch.device("cuda"))
    # warm_up ends with real calls; here they only compile, which would show a variant that was left out
    inner = api.run

    def run(problem: Any, implementation: str = "auto") -> Any:
        with compiling.compile_only(1):
            return inner(problem, implementation)

    monkeypatch.setattr(api, "run", run)
    yield names
    for kernel in KERNELS:
        kernel.device_caches.clear()


def hopper_why_not(problem: Any) -> str | None:
    return None if problem.hidden.dtype == torch.bfloat16 and problem.noise != "online" else "not here"


TRIPLE = (torch.int64, torch.int64, torch.float32)


def call_arguments(features: str, rows: int) -> dict[str, Any]:
    """Arguments of a call as a server makes them, one of them a slice at an odd address."""
    per_row: dict[str, Any] = {
        "temperature": torch.ones(rows + 1)[1:],
        "seed": torch.zeros(rows, dtype=torch.int64),
        "position": torch.zeros(rows, dtype=torch.int64),
    }
    return {
        "plain": {"seed": rows * 16 + 1, "position": rows},
        "unseeded": {},
        "rows": per_row,
        "greedy": {"temperature": 0.0, "seed": 1},
        "mask": per_row | {"mask": torch.ones(rows, V, dtype=torch.bool)},
        "bits": per_row | {"mask": torch.zeros(rows, -(-V // 32), dtype=torch.int32)},
        "bias": per_row
        | {"logit_bias": torch.zeros(rows, V, dtype=torch.float16), "head_bias": torch.zeros(V)},
        "sparse": {"seed": 1, "logit_bias": [{3: 1.0}] * rows, "softcap": 30.0},
        "triple": {"seed": 1, "logit_bias": tuple(torch.zeros(rows + 1, dtype=kind)[1:] for kind in TRIPLE)},
        "logprob": per_row | {"want_logprob": True, "logit_scale": 0.5},
        "lse": {"seed": 1, "want_lse": True},
        "samples": {"seed": 1, "num_samples": 4},
        "element": per_row | {"noise": "element", "math": "exact"},
        "stored": {"seed": 1, "store_logits": True},
    }[features]


FEATURES = (
    "plain", "unseeded", "rows", "greedy", "mask", "bits", "bias", "sparse", "triple", "logprob", "lse",
    "samples", "element", "stored",
)  # fmt: skip
SIZES = (*range(1, 35), 63, 64, 65, 66, 127, 128, 129, 192, 255, 256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("features", FEATURES)
def test_no_call_compiles_after_it(compiled: list[str], features: str, dtype: torch.dtype) -> None:
    weight = torch.zeros(V, D, dtype=dtype)
    found = warm_up(weight, max_batch=256, **call_arguments(features, 1))
    assert sorted(kernel.kernel for kernel in found) == sorted(compiled)
    assert ("hopper_kernel" if dtype == torch.bfloat16 else "lm_head_sample_kernel") in compiled
    before = list(compiled)
    for rows in range(1, 257) if features in ("plain", "rows") else SIZES:
        sample(torch.zeros(rows, D, dtype=dtype), weight, **call_arguments(features, rows))
    assert compiled == before


def test_no_call_compiles_after_it_under_a_table(compiled: list[str]) -> None:
    """Its classes end elsewhere than the built-in ones, and one of them takes another kernel."""
    shape = dataclasses.asdict(dataclasses.replace(hopper_configs.UP_TO_64_NARROW, stages=8))
    chosen: list[tuple[int, Any, Any]] = [(7, "hopper", shape), (40, "triton", None), (99, "hopper", None)]
    weight = torch.zeros(V, D, dtype=torch.bfloat16)
    tables.use(tables.Entry("sm_90", V, D, "bfloat16", *entry) for entry in chosen)
    try:
        warm_up(weight, max_batch=256, seed=1)
        before = list(compiled)
        for rows in range(1, 257):
            sample(torch.zeros(rows, D, dtype=torch.bfloat16), weight, seed=rows)
    finally:
        tables.use(())
    assert compiled == before
    # the table's shape, and for up to 64, 128, 192 and 256 rows; for up to 16, 32 and 64 rows
    assert before.count("hopper_kernel") == 5 and before.count("lm_head_sample_kernel") == 3


@pytest.mark.parametrize("features", ["plain", "bits", "logprob", "element"])
def test_no_call_over_logits_compiles_after_it(compiled: list[str], features: str) -> None:
    found = warm_up_logits(torch.zeros(1, V), max_batch=256, **call_arguments(features, 1))
    before = list(compiled)
    assert {"logits_sample_kernel", "reduce_candidates_kernel"} == {kernel.kernel for kernel in found}
    for rows in SIZES:
        sample_logits(torch.zeros(rows, V), **call_arguments(features, rows))
    assert compiled == before


def test_at_most_one_kernel_a_batch_class_and_none_beyond_the_largest_batch(compiled: list[str]) -> None:
    weight = torch.zeros(V, D, dtype=torch.float32)
    few = warm_up(weight, max_batch=8, seed=1)
    assert [kernel.kernel for kernel in few].count("lm_head_sample_kernel") == 1
    sample(torch.zeros(8, D), weight, seed=1)
    assert len(compiled) == len(few)
    sample(
        torch.zeros(65, D), weight, seed=1
    )  # a larger batch is another class: the count would have seen it
    assert len(compiled) == len(few) + 1
    assert warm_up(weight, max_batch=8, seed=2) == ()  # nothing is left to do


def test_kernels_are_compiled_at_the_same_time(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = lm_head_sample.lm_head_sample_kernel
    inner = kernel.compile
    meeting = threading.Barrier(2, timeout=20)  # one thread alone would wait for ever

    def compile_together(source: Any, **options: object) -> Any:
        meeting.wait()
        return inner(source, **options)

    monkeypatch.setattr(kernel, "compile", compile_together)
    found = warm_up(torch.zeros(V, D), max_batch=32, seed=1, workers=2)
    assert [each.kernel for each in found].count("lm_head_sample_kernel") == 2


def test_the_exchange_is_compiled_without_a_launch(compiled: list[str]) -> None:
    words = torch.zeros(4, dtype=torch.int64)
    with compile_only(2) as found:
        for best in (False, True):
            exchange.exchange(words, words, words, 2, best)
    assert compiled == ["exchange_kernel"] * 2 == [kernel.kernel for kernel in found]


def test_a_kernel_that_does_not_compile_leaves_the_others(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Any, **options: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(lm_head_sample.lm_head_sample_kernel, "compile", refuse)
    with compile_only(2) as found:
        sample(torch.zeros(1, D), torch.zeros(V, D), seed=1)
    assert [kernel.kernel for kernel in found] == ["reduce_candidates_kernel"]
    assert not lm_head_sample.lm_head_sample_kernel.device_caches[0][0]  # its launch will compile, and raise


def test_on_a_cpu_there_is_nothing_to_compile() -> None:
    assert warm_up(torch.zeros(V, D)) == ()
    assert warm_up_logits(torch.zeros(1, V)) == ()
    with compile_only() as found:
        ids = sample(torch.eye(1, D), torch.eye(1, D).expand(1, D) * 50, seed=1).ids
    assert list(found) == [] and ids.tolist() == [[0]]


@pytest.mark.parametrize(
    "wrong", [{"max_batch": 0}, {"max_batch": 1 << 20}, {"workers": 0}, {"softcap": -1.0}, {"weight": None}]
)
def test_errors_name_the_argument(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        warm_up(**{"weight": torch.zeros(V, D)} | wrong)


def test_an_example_without_a_row_or_of_a_dtype_that_torch_cannot_fill() -> None:
    with pytest.raises(ValueError, match="logits must have a row, got B = 0"):
        warm_up_logits(torch.zeros(0, V))
    with pytest.raises(ValueError, match="seed must have a row, got B = 0"):
        warm_up(torch.zeros(V, D), seed=torch.zeros(0, dtype=torch.int64))
    quantised = torch._empty_affine_quantized([V, D], scale=1.0, zero_point=0, dtype=torch.qint8)
    with pytest.raises(ValueError, match="weight must be bfloat16, float16 or float32, got qint8"):
        warm_up(quantised)


@pytest.mark.gpu
@pytest.mark.parametrize("features", ["plain", "rows", "bits", "logprob", "element"])
def test_no_call_of_any_batch_compiles_on_a_gpu(features: str) -> None:
    weight = torch.randn(V, 128, device="cuda", dtype=torch.bfloat16)

    def on_gpu(value: object) -> object:
        return value.cuda() if isinstance(value, torch.Tensor) else value

    def wanted(rows: int) -> dict[str, Any]:
        return {name: on_gpu(value) for name, value in call_arguments(features, rows).items()}

    start = time.perf_counter()
    found = warm_up(weight, max_batch=256, **wanted(1))
    print(f"{features}: {len(found)} kernels, {sum(k.seconds for k in found):.1f} s of compilation", end=" ")
    print(f"in {time.perf_counter() - start:.1f} s")
    events: list[str] = []
    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda **event: events.append(str(event["metadata"]["name"]))
    try:
        for rows in range(1, 257):
            hidden = torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16)
            sample(hidden, weight, **wanted(rows))
    finally:
        triton.knobs.compilation.listener = before
    assert events == []


def test_examples_of_two_batches_are_refused_by_name() -> None:
    seed = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="temperature, seed must have one number of rows, got 3, 1"):
        warm_up(torch.zeros(9, 8), temperature=torch.ones(3), seed=seed)
    with pytest.raises(ValueError, match="temperature, logit_bias must have one number of rows, got 3, 2"):
        warm_up(torch.zeros(9, 8), temperature=torch.ones(3), logit_bias=[{1: 2.0}, {}])
