"""The public functions: the contract, checked once, then the choice of an implementation."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from . import reference, validation
from .types import Implementation, Math, Noise, Problem, SampleResult
from .validation import LogitBias


def sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    seed: int | Tensor | None = None,
    position: int | Tensor = 0,
    num_samples: int = 1,
    head_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logit_bias: LogitBias | None = None,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
    noise: Noise = "grouped",
    math: Math = "fast",
    want_logprob: bool = False,
    want_lse: bool = False,
    store_logits: bool = False,
    implementation: Implementation = "auto",
) -> SampleResult:
    """Draw token ids from softmax(y / temperature)."""
    problem = validation.head_problem(
        hidden, weight, temperature=temperature, seed=seed, position=position, num_samples=num_samples,
        head_bias=head_bias, logit_scale=logit_scale, softcap=softcap, logit_bias=logit_bias, mask=mask,
        vocab_size=vocab_size, noise=noise, math=math, want_logprob=want_logprob, want_lse=want_lse,
        store_logits=store_logits,
    )  # fmt: skip
    return run(problem, implementation)


def sample_logits(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    seed: int | Tensor | None = None,
    position: int | Tensor = 0,
    num_samples: int = 1,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logit_bias: LogitBias | None = None,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
    noise: Noise = "grouped",
    math: Math = "fast",
    want_logprob: bool = False,
    want_lse: bool = False,
    implementation: Implementation = "auto",
) -> SampleResult:
    """Draw as `sample` does, over logits [B, V] that already exist."""
    problem = validation.logits_problem(
        logits, temperature=temperature, seed=seed, position=position, num_samples=num_samples,
        logit_scale=logit_scale, softcap=softcap, logit_bias=logit_bias, mask=mask, vocab_size=vocab_size,
        noise=noise, math=math, want_logprob=want_logprob, want_lse=want_lse,
    )  # fmt: skip
    return run(problem, implementation)


def run(problem: Problem, implementation: str = "auto") -> SampleResult:
    """Run a checked problem with the implementation asked for, or the best one for its device."""
    name = validation.implementation_name(implementation)
    source = problem.hidden if problem.hidden is not None else problem.logits
    assert source is not None
    if problem.num_rows == 0:
        return _empty(problem, source.device)
    if problem.num_samples == 0:  # K = 0 still has a row result; no kernel knows that case
        one = run(dataclasses.replace(problem, num_samples=1), name)
        return one._replace(ids=one.ids[:, :0], logprob=None if one.logprob is None else one.logprob[:, :0])
    if name == "auto" and (source.device.type != "cuda" or problem.noise == "online"):
        name = "reference"
    if name == "reference":
        return reference.run(problem)
    if problem.noise == "online":
        raise ValueError(
            f"noise='online' is made by the reference implementation only, got implementation={name!r}; "
            "leave implementation at 'auto'"
        )
    if problem.hidden is None:
        if name == "hopper":
            raise ValueError("implementation='hopper' fuses the head; for existing logits use 'auto' or 'triton'")
        from .ops import logits_sample

        return logits_sample.run(problem)
    if name != "triton":
        from .ops import hopper_sample

        reason = hopper_sample.why_not(problem)
        if reason is None:
            return hopper_sample.run(problem)
        if name == "hopper":
            raise ValueError(f"implementation='hopper' cannot run this call: {reason}; use 'auto' or 'triton'")
    from .ops import lm_head_sample

    return lm_head_sample.run(problem)


def _empty(problem: Problem, device: torch.device) -> SampleResult:
    ids = torch.empty(0, problem.num_samples, dtype=torch.int64, device=device)
    return SampleResult(
        ids,
        torch.empty(0, problem.num_samples, device=device) if problem.want_logprob else None,
        torch.empty(0, device=device) if problem.want_lse else None,
        torch.empty(0, problem.num_columns, device=device) if problem.store_logits else None,
        "reference",
    )
