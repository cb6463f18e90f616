"""Kernels that start before the one ahead of them has ended read what it writes last, and write where it has
read: on a GPU, behind a kernel that lets them start at once and takes its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fsample_kernels import SampleResult, sample
from tests.kernels.stage_kernels import late_copy

pytestmark = pytest.mark.gpu
V, D = 20_000, 512


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


CALLS: dict[str, dict[str, object]] = {
    "plain": {},
    "mass": {"want_logprob": True, "want_lse": True},
    "samples": {"num_samples": 3},
    "sparse": {"logit_bias": True},  # made from the step's values
}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("B", [5, 130, 300])
@pytest.mark.parametrize("call", CALLS)
def test_what_the_kernel_ahead_writes_last_is_read(call: str, B: int, captured: bool) -> None:
    g = torch.Generator("cuda").manual_seed(B)
    steps = 6
    given = [
        {
            "weight": torch.randn(V, D, device="cuda", generator=g).bfloat16(),
            "hidden": torch.randn(B, D, device="cuda", generator=g).bfloat16() / 8,
            "temperature": torch.rand(B, device="cuda", generator=g) + 0.5,
            "seed": torch.randint(1 << 62, (B,), device="cuda", generator=g),
            "values": torch.randn(3 * B, device="cuda", generator=g) * 9,
        }
        for _ in range(steps)
    ]
    rows = torch.arange(3 * B, device="cuda") % B
    ids = torch.arange(3 * B, device="cuda") * 37 % V

    def draw(at: dict[str, Tensor]) -> SampleResult:
        more = dict(CALLS[call])
        if "logit_bias" in more:
            more["logit_bias"] = (rows, ids, at["values"])
        rest: Any = {"temperature": at["temperature"], "seed": at["seed"], **more}
        result = sample(at["hidden"], at["weight"], **rest)
        assert result.implementation == "hopper"
        return result

    expected = []
    for step in given:
        torch.cuda.synchronize()
        expected.append(draw(step))
        torch.cuda.synchronize()
    place = {name: torch.zeros_like(tensor) for name, tensor in given[0].items()}

    def chain() -> list[SampleResult]:
        results = []
        for number, step in enumerate(given):
            names = list(step)
            for name in names[number % len(names) :] + names[: number % len(names)]:  # each is the last once
                late_copy(place[name], step[name])
            results.append(draw(place))
        return results

    results = chain()
    if captured:
        results = replayed(chain)
    torch.cuda.synchronize()
    for got, wanted in zip(results, expected, strict=True):
        assert torch.equal(got.ids, wanted.ids)
        for name in ("logprob", "lse"):
            one, other = getattr(got, name), getattr(wanted, name)
            assert (one is None and other is None) or torch.equal(one, other)


def replayed(chain: Callable[[], list[SampleResult]]) -> list[SampleResult]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = chain()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return results


def test_ids_wait_for_the_last_reader_of_their_memory() -> None:
    """The allocator hands out memory that a kernel ahead still reads: the order of the stream is enough for
    it."""
    B = 64
    hidden = torch.randn(B, D, device="cuda").bfloat16()
    weight = torch.randn(V, D, device="cuda").bfloat16()
    expected = sample(hidden, weight, seed=1).ids
    for _ in range(20):
        held = [torch.empty(B, 1, dtype=torch.int64, device="cuda") for _ in range(64)]  # no other is free
        given = torch.arange(B, device="cuda").view(B, 1) + len(held)
        wanted, out = given.clone(), torch.zeros_like(given)
        address = given.data_ptr()
        torch.cuda.synchronize()
        late_copy(out, given)
        del given
        ids = sample(hidden, weight, seed=1).ids
        assert ids.data_ptr() == address  # else nothing is tested
        assert torch.equal(out, wanted) and torch.equal(ids, expected)


@pytest.mark.parametrize("B", [1, 64, 256])
def test_calls_in_a_row(B: int) -> None:
    """Each resets the state that the next one uses, and lets it start before."""
    hidden = torch.randn(B, D, device="cuda").bfloat16()
    weight = torch.randn(V, D, device="cuda").bfloat16()
    alone = []
    for seed in range(50):
        torch.cuda.synchronize()
        alone.append(sample(hidden, weight, seed=seed, want_logprob=seed % 3 == 2))
    torch.cuda.synchronize()
    in_a_row = [sample(hidden, weight, seed=seed, want_logprob=seed % 3 == 2) for seed in range(50)]
    for one, other in zip(alone, in_a_row, strict=True):
        assert torch.equal(one.ids, other.ids)
