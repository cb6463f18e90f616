"""Logits and temperatures far from 1: the rounding of y / temperature is then larger than any exponent."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from fsample_kernels import SampleResult, sample, sample_logits
from fsample_kernels.types import Implementation, Math, Noise

V, B = 260, 3
TOP = 201
JITTER = 1 + 0.001 * torch.arange(V)  # so that roundings go both ways


@pytest.fixture(
    params=["reference", "triton"]
    + [pytest.param(f"gpu {name}", marks=pytest.mark.gpu) for name in ("triton", "hopper", "unfused")]
)
def where(request: pytest.FixtureRequest) -> tuple[str, Implementation]:
    device, _, name = request.param.rpartition(" ")
    if name == "triton" and not device and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    if name == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    return ("cuda" if device else "cpu"), name


def draw(where: tuple[str, Implementation], logits: Tensor, **arguments: Any) -> SampleResult:
    """B rows of logits [V], which bf16 holds, as products with a unit vector. With results for the mass."""
    device, implementation = where
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter cannot multiply bf16
    weight = torch.zeros(V, 16, dtype=dtype)
    weight[:, 0] = logits
    hidden = torch.zeros(B, 16, dtype=dtype)
    hidden[:, 0] = 1
    tensors: dict[str, Any] = {
        name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()
    }
    result = sample(
        hidden.to(device), weight.to(device), seed=5, implementation=implementation, want_logprob=True,
        want_lse=True, **tensors,
    )  # fmt: skip
    over_logits = sample_logits(
        logits.expand(B, V).to(device), seed=5, **tensors,
        implementation="reference" if implementation == "reference" else "triton",
    )  # fmt: skip
    assert torch.equal(over_logits.ids, result.ids)
    return result


@pytest.mark.parametrize(
    ("noise", "math", "a_row"),
    [
        ("grouped", "fast", False),
        ("grouped", "fast", True),
        ("grouped", "exact", False),
        ("element", "fast", True),
    ],
)
def test_a_low_temperature_draws_the_largest_logit(
    where: tuple[str, Implementation], noise: Noise, math: Math, a_row: bool
) -> None:
    logits = torch.arange(V) % 97 * 0.25
    logits[TOP] = 25.5
    for temperature in (1e-4, 1e-8, 1.3e-9, 1e-10, 1e-15, 1e-19):
        given = torch.full((B,), temperature) if a_row else temperature
        result = draw(where, logits, temperature=given, noise=noise, math=math)
        assert set(result.ids[:, 0].tolist()) == {TOP}, temperature
        assert result.lse is not None and result.logprob is not None
        torch.testing.assert_close(result.lse.cpu(), torch.full((B,), 25.5 / temperature), rtol=1e-5, atol=0)
        assert (result.logprob == 0).all() or float(result.logprob.abs().max()) < 1e-5 * 25.5 / temperature


@pytest.mark.parametrize("size", [1e9, 1e10, 1e30, 1e38])
def test_what_a_bias_makes_unlikely_spoils_no_row(where: tuple[str, Implementation], size: float) -> None:
    """As masks are often given: whole groups of 32 ids have nothing but a huge negative bias."""
    bias = -size * JITTER
    bias[TOP], bias[40] = 0.0, 0.5
    result = draw(where, torch.zeros(V), logit_bias=bias)
    assert set(result.ids[:, 0].tolist()) <= {TOP, 40}
    want = torch.full((B,), float(torch.tensor([0.0, 0.5]).logsumexp(0)))
    assert result.lse is not None
    torch.testing.assert_close(result.lse.cpu(), want)


@pytest.mark.parametrize("size", [1e10, 1e30, 1.6e38])
@pytest.mark.parametrize("sign", [-1, 1])
def test_of_huge_logits_the_largest_is_drawn(
    where: tuple[str, Implementation], size: float, sign: int
) -> None:
    bias = sign * size * (JITTER if sign < 0 else 1 / JITTER)
    bias[TOP] = sign * size * (1 - 0.01 * sign) if sign < 0 else size * 1.01
    result = draw(where, torch.zeros(V), logit_bias=bias)
    assert set(result.ids[:, 0].tolist()) == {int(bias.argmax())}
    assert result.lse is not None
    torch.testing.assert_close(result.lse.cpu(), bias.max().expand(B))
