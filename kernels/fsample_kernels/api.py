"""The public functions: the contract, checked once, then the choice of an implementation."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

from . import guard, library, reference, tables, validation
from .bias_forms import LogitBias
from .chunks import device_of
from .types import Implementation, Math, Noise, Problem, SampleResult


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
    """Draw token ids from softmax(y / temperature), without ever storing the logits y.

        y[b, i] = (hidden[b] . weight[i] + head_bias[i]) * logit_scale          fp32 accumulation
        y       = softcap * tanh(y / softcap)                                   if softcap is given
        y       = y + logit_bias[b, i]
        y       = -inf where the mask forbids (b, i), and for i >= vocab_size
        p[b]    = softmax(y[b] / temperature[b])

    The draw is exact given the fp32 logits: every probability is right to 1 % relative down to 2**-40 of the
    row's total, and to 2**-44 absolute below that (`noise="element"`: 2**-30 and 2**-32, its Gumbel noise is
    cut at 33 ln 2 = 22.87). That is while |y / temperature| <= 2**14: beyond, fp32 has too few digits.

    Args:
        hidden: [B, D] bfloat16, float16 or float32, any strides. B <= 2**24.
        weight: [V, D], hidden's dtype and device, any strides; row i is token i. V <= 2**31 - 4096.
        temperature: number, or a floating tensor, 0-d or [B]; finite and >= 0, used as fp32: an entry of a
            float64 tensor that is below fp32, as -1e-50, is 0. 0, and anything below 2**-64, is greedy: the
            largest y, the lowest id on a tie.
        seed: 64-bit int, or int64 tensor, 0-d or [B] (its bits are the seed). One seed for the batch: row b
            draws from stream (seed, b). A seed a row, [B]: a row's tokens depend on its seed, position and
            logits alone, not on B, its place, tiles or device. None: a fresh seed from torch's generator of
            the device.
        position: int in [0, 2**32), or int32/int64 tensor, 0-d or [B]: the decoding step. The caller must
            change it from step to step; in a captured CUDA graph keep it, and the seed, in device tensors:
            a Python number is frozen by the capture. The same (seed, position) gives the same tokens.
        num_samples: K >= 0 independent draws a row. Sample k does not depend on K.
        head_bias: [V] floating.
        logit_scale: factor, finite in fp32 (a model that divides by 16 has 0.0625).
        softcap: above 0, in [2**-126, 2**126], or None.
        logit_bias: floating tensor [V] or [B, V] (-inf forbids an id); or sparse, ids in [0, vocab_size)
            and finite values, repeats add: a triple (rows, ids, values) of tensors or of sequences, a
            mapping {id: value} for every row, or a sequence of B such mappings.
        mask: bool [V] or [B, V], True allows, V or vocab_size columns; or packed int32 [B, ceil(V / 32)]
            (or of vocab_size), where bit i of word w allows id 32 w + i.
        vocab_size: ids at or above it are never drawn (a padded head); 1..V, V when None.
        noise: "grouped" (one Gumbel a group of 32 ids), "element" (one a token), "online" (blocks streamed
            with O(1) state; reference implementation only).
        math: "fast" or "exact" log and exp on a GPU.
        want_logprob, want_lse, store_logits: fill the result's fields of that name.
        implementation: "auto", or "reference", "triton", "hopper", "unfused" (fp32 logits in memory, then a
            pass over them) to insist. A measured table may rule what "auto" takes, see `load_table`.

    Returns:
        SampleResult: ids [B, K] int64; logprob [B, K] fp32, natural log under p, never above 0, and 0 in
        greedy rows; lse [B] fp32, log-sum-exp of y / temperature, in greedy rows max y; logits [B, V] fp32,
        y before temperature; implementation, the name of what ran ("" inside torch.compile).

        A row with no allowed id has id -1, logprob NaN, lse -inf. A row with a NaN or +inf among its allowed
        logits, or with a bad value on the device (temperature NaN, infinite or negative; position outside
        [0, 2**32); a sparse bias outside its range) has id -1, logprob and lse NaN. A sparse row number
        outside [0, B) spoils every row. |y| log2(e) / temperature beyond fp32 counts as infinite. No row
        disturbs another.

    Raises:
        ValueError: naming argument, rule and value, before any launch. The host reads no tensor on a GPU,
            but in checked mode (`checked`), where a bad value on the device is a ValueError as well.

    Example:
        >>> import torch
        >>> from fsample_kernels import sample
        >>> hidden, weight = torch.eye(2, 16), torch.zeros(1000, 16)
        >>> weight[7, 0] = weight[42, 1] = 30.0
        >>> sample(hidden, weight, temperature=0.8, seed=1).ids.tolist()
        [[7], [42]]

    Source: Algorithms 1, I.2 and I.3 of FlashSampling (Gumbel-max, by token, by group, streamed).
    """
    if torch.compiler.is_compiling():
        return library.traced(
            hidden, weight, None, temperature, seed, position, num_samples, head_bias, logit_scale, softcap,
            logit_bias, mask, vocab_size, noise, math, want_logprob, want_lse, store_logits, implementation,
        )  # fmt: skip
    problem = validation.head_problem(
        hidden,
        weight,
        temperature=temperature,
        seed=seed,
        position=position,
        num_samples=num_samples,
        head_bias=head_bias,
        logit_scale=logit_scale,
        softcap=softcap,
        logit_bias=logit_bias,
        mask=mask,
        vocab_size=vocab_size,
        noise=noise,
        math=math,
        want_logprob=want_logprob,
        want_lse=want_lse,
        store_logits=store_logits,
    )
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
    """Draw as `sample` does, with the same noise and so the same tokens, over logits that already exist.

        y = transforms(logits), p[b] = softmax(y[b] / temperature[b]), transforms as in `sample`

    Args:
        logits: [B, V] bfloat16, float16 or float32, any strides. Raw logits, not probabilities: a softmax
            output would be drawn from far too flatly, and nothing here can tell.
        temperature, seed, position, num_samples, logit_scale, softcap, logit_bias, mask, vocab_size, noise:
            as in `sample`, and so are math, want_logprob, want_lse and implementation.

    Returns:
        SampleResult, as `sample`; its `logits` is None.

    Raises:
        ValueError: naming argument, rule and value, before any launch.

    Example:
        >>> import torch
        >>> from fsample_kernels import sample_logits
        >>> logits = torch.tensor([[0.0, 40.0, 0.0], [40.0, 0.0, 0.0]])
        >>> sample_logits(logits, seed=1, num_samples=2).ids.tolist()
        [[1, 1], [0, 0]]

    Source: Algorithm I.1 of FlashSampling (`streaming`): one pass over the logits.
    """
    if torch.compiler.is_compiling():
        return library.traced(
            None, None, logits, temperature, seed, position, num_samples, None, logit_scale, softcap,
            logit_bias, mask, vocab_size, noise, math, want_logprob, want_lse, False, implementation,
        )  # fmt: skip
    problem = validation.logits_problem(
        logits,
        temperature=temperature,
        seed=seed,
        position=position,
        num_samples=num_samples,
        logit_scale=logit_scale,
        softcap=softcap,
        logit_bias=logit_bias,
        mask=mask,
        vocab_size=vocab_size,
        noise=noise,
        math=math,
        want_logprob=want_logprob,
        want_lse=want_lse,
    )
    return run(problem, implementation)


def run(problem: Problem, implementation: str = "auto") -> SampleResult:
    """Run a checked problem with the implementation asked for, or with the best one for its device.

    Raises ValueError when the one asked for cannot run it, with the reason.
    """
    name = validation.implementation_name(implementation)
    if problem.num_rows == 0:
        return _empty(problem)
    if problem.num_samples == 0:  # the row results are still defined; no kernel needs to know this case
        one = run(dataclasses.replace(problem, num_samples=1), name)
        return one._replace(ids=one.ids[:, :0], logprob=None if one.logprob is None else one.logprob[:, :0])
    draw = choose(problem, name).run
    result: SampleResult = guard.run(problem, lambda: draw(problem)) if guard.active() else draw(problem)
    return result


def choose(problem: Problem, name: Implementation) -> ModuleType:
    """The module whose `run` and `candidates` serve the problem (over logits: `run` alone).

    Raises ValueError when the implementation asked for cannot, with the reason.
    """
    reason = _why_not_kernels(problem)
    if name == "reference" or (name == "auto" and (reason or device_of(problem).type == "cpu")):
        return reference
    if reason is not None:
        raise ValueError(f"implementation={name!r} cannot run this: {reason}; use 'auto' or 'reference'")
    if problem.hidden is None:
        if name in ("hopper", "unfused"):
            raise ValueError(f"implementation={name!r} needs a head; over logits use 'auto' or 'triton'")
        from .ops import logits_sample

        return logits_sample
    from .ops import arguments, unfused_sample

    if name == "auto" and tables.in_use():
        entry = tables.find(problem, arguments.architecture(device_of(problem)))
        if entry is not None and (entry.choice != "unfused" or unfused_sample.why_not(problem) is None):
            name = entry.choice if entry.choice != "hopper" else "auto"
    if name == "unfused":
        reason = unfused_sample.why_not(problem)
        if reason is not None:
            raise ValueError(f"implementation='unfused' cannot run this: {reason}; use 'auto' or 'triton'")
        return unfused_sample
    if name != "triton":
        from .ops import hopper_sample

        reason = hopper_sample.why_not(problem)
        if reason is None:
            return hopper_sample
        if name == "hopper":
            raise ValueError(f"implementation='hopper' cannot run this: {reason}; use 'auto' or 'triton'")
    from .ops import lm_head_sample

    return lm_head_sample


def _why_not_kernels(problem: Problem) -> str | None:
    """The reason why no GPU kernel can run the problem; None when one can."""
    if problem.noise == "online":
        return "noise='online' is made by the reference only"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device_of(problem).type != "cuda":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return f"the tensors are on {device_of(problem)}, not on a CUDA device"
        if problem.hidden is not None and problem.hidden.dtype == torch.bfloat16:
            return "Triton's interpreter multiplies the bits of bf16 as if they were integers"
    return None


def _empty(problem: Problem) -> SampleResult:
    device, num_samples = device_of(problem), problem.num_samples
    return SampleResult(
        torch.empty(0, num_samples, dtype=torch.int64, device=device),
        torch.empty(0, num_samples, dtype=torch.float32, device=device) if problem.want_logprob else None,
        torch.empty(0, dtype=torch.float32, device=device) if problem.want_lse else None,
        torch.empty(0, problem.num_columns, dtype=torch.float32, device=device)
        if problem.store_logits
        else None,
        "reference",
    )
