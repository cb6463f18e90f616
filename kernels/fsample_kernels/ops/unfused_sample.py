"""The safety net: fp32 logits by the library's matmul, in memory, then the one-pass sampler."""

import dataclasses

import torch
from torch import Tensor

from fsample_kernels.ops import logits_sample
from fsample_kernels.types import Problem, SampleResult


def why_not(problem: Problem) -> str | None:
    """The reason why this cannot run the problem, or None."""
    hidden = problem.hidden
    assert hidden is not None
    if hidden.device.type != "cuda" or hidden.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16 on a CUDA device, not {hidden.dtype} on {hidden.device}"
    if not hasattr(torch.ops.aten.mm, "dtype"):
        return "its fp32 logits from 16-bit inputs need torch 2.8 or newer"
    return None


def variant(problem: Problem) -> tuple[int, int]:
    """The compiled shape of the call: that of the pass over the logits."""
    return logits_sample.variant(problem)


def run(problem: Problem) -> SampleResult:
    """Draw ids [B, K] as the fused kernels do. Allocates the logits, 4 B V bytes."""
    return logits_sample.run(over_logits(problem))._replace(implementation="unfused")


def candidates(problem: Problem) -> tuple[SampleResult, Tensor]:
    """The result and the keys of its ids, [B, K] int64; see `words.pack_key`."""
    result, keys = logits_sample.candidates(over_logits(problem))
    return result._replace(implementation="unfused"), keys


def over_logits(problem: Problem) -> Problem:
    """The same problem with its logits made: fp32 out of the accumulators, never rounded to 16 bits."""
    assert problem.hidden is not None and problem.weight is not None
    return dataclasses.replace(
        problem, hidden=None, weight=None, logits=product(problem.hidden, problem.weight)
    )


def product(hidden: Tensor, weight: Tensor) -> Tensor:
    """[B, D], [V, D] -> [B, V] fp32."""
    return torch.mm(hidden, weight.T, out_dtype=torch.float32)
