"""The `torch.library` operator `fsample::sample`: what torch.compile sees of a call, one opaque node.

Eager calls do not pass through it. The operator takes a call apart into what an operator schema can carry
(`schema.py`) and checks it when it runs, so a compiled call raises what an eager one does for values that
break a rule. For arguments of another type or number of dimensions torch.compile has errors of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import schema, validation
from .bias_forms import LogitBias
from .types import Implementation, Math, Noise, Problem, SampleResult

_OPERATOR = torch.library.Library("fsample", "DEF")  # type: ignore[no-untyped-call]
# The tag keeps two calls with the same arguments two calls: an unseeded one draws afresh each time.
_OPERATOR.define(  # type: ignore[no-untyped-call]
    "sample(Tensor? hidden, Tensor? weight, Tensor? logits, float temperature, Tensor? temperatures, "
    "SymInt? seed, Tensor? seeds, SymInt position, Tensor? positions, SymInt num_samples, Tensor? head_bias, "
    "float logit_scale, float? softcap, Tensor? logit_bias, Tensor? bias_rows, Tensor? bias_ids, "
    "Tensor? bias_values, Tensor? mask, SymInt? vocab_size, str noise, str math, bool want_logprob, "
    "bool want_lse, bool store_logits, str implementation, str refusal) "
    "-> (Tensor ids, Tensor logprob, Tensor lse, Tensor logits)",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
)


def traced(
    hidden: Tensor | None,
    weight: Tensor | None,
    logits: Tensor | None,
    temperature: float | Tensor,
    seed: int | Tensor | None,
    position: int | Tensor,
    num_samples: int,
    head_bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    logit_bias: LogitBias | None,
    mask: Tensor | None,
    vocab_size: int | None,
    noise: Noise,
    math: Math,
    want_logprob: bool,
    want_lse: bool,
    store_logits: bool,
    implementation: Implementation,
) -> SampleResult:
    """`sample` (hidden and weight given) or `sample_logits` (logits given) while torch.compile traces it."""
    dense, (rows, tokens, values) = schema.split_bias(logit_bias)
    refusal = schema.refusal(
        (("temperature", temperature), ("logit_scale", logit_scale), ("softcap", softcap)),
        seed, position, num_samples, vocab_size, schema.columns_of(weight, logits),
        (("want_logprob", want_logprob), ("want_lse", want_lse), ("store_logits", store_logits)),
    )  # fmt: skip
    if refusal:
        temperature, seed, position, num_samples, logit_scale, softcap, vocab_size = (
            1.0,
            0,
            0,
            1,
            1.0,
            None,
            None,
        )
        want_logprob = want_lse = store_logits = False
    ids, logprob, lse, stored = torch.ops.fsample.sample(
        schema.detached(hidden),
        schema.detached(weight),
        schema.detached(logits),
        1.0 if isinstance(temperature, Tensor) else float(temperature),
        schema.detached(temperature if isinstance(temperature, Tensor) else None),
        None if seed is None or isinstance(seed, Tensor) else schema.signed(seed),
        seed if isinstance(seed, Tensor) else None,
        0 if isinstance(position, Tensor) else position,
        position if isinstance(position, Tensor) else None,
        num_samples,
        schema.detached(head_bias),
        float(logit_scale),
        None if softcap is None else float(softcap),
        schema.detached(dense),
        rows,
        tokens,
        schema.detached(values),
        mask,
        vocab_size,
        noise,
        math,
        want_logprob,
        want_lse,
        store_logits,
        implementation,
        refusal,
    )
    return SampleResult(
        ids,
        logprob if want_logprob else None,
        lse if want_lse else None,
        stored if store_logits else None,
    )


def _problem(
    hidden: Tensor | None,
    weight: Tensor | None,
    logits: Tensor | None,
    temperature: float | Tensor,
    seed: int | Tensor | None,
    position: int | Tensor,
    num_samples: int,
    head_bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    logit_bias: LogitBias | None,
    mask: Tensor | None,
    vocab_size: int | None,
    noise: Noise,
    math: Math,
    want_logprob: bool,
    want_lse: bool,
    store_logits: bool,
) -> Problem:
    if logits is not None:
        return validation.logits_problem(
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
    assert hidden is not None and weight is not None
    return validation.head_problem(
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


def _run(
    hidden: Tensor | None,
    weight: Tensor | None,
    logits: Tensor | None,
    temperature: float,
    temperatures: Tensor | None,
    seed: int | None,
    seeds: Tensor | None,
    position: int,
    positions: Tensor | None,
    num_samples: int,
    head_bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    logit_bias: Tensor | None,
    bias_rows: Tensor | None,
    bias_ids: Tensor | None,
    bias_values: Tensor | None,
    mask: Tensor | None,
    vocab_size: int | None,
    noise: Noise,
    math: Math,
    want_logprob: bool,
    want_lse: bool,
    store_logits: bool,
    implementation: Implementation,
    refusal: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .api import run  # api imports this module

    if refusal:
        raise ValueError(refusal)
    bias: LogitBias | None = logit_bias
    if bias_rows is not None and bias_ids is not None and bias_values is not None:
        bias = (bias_rows, bias_ids, bias_values)
    problem = _problem(
        hidden, weight, logits, temperature if temperatures is None else temperatures,
        seed if seeds is None else seeds, position if positions is None else positions, num_samples,
        head_bias, logit_scale, softcap, bias, mask, vocab_size, noise, math, want_logprob, want_lse,
        store_logits,
    )  # fmt: skip
    result = run(problem, implementation)
    absent = torch.empty(0, dtype=torch.float32, device=result.ids.device)
    return (
        result.ids,
        absent if result.logprob is None else result.logprob,
        absent.clone() if result.lse is None else result.lse,
        absent.clone() if result.logits is None else result.logits,
    )


def _shapes(
    hidden: Tensor | None,
    weight: Tensor | None,
    logits: Tensor | None,
    temperature: float,
    temperatures: Tensor | None,
    seed: int | None,
    seeds: Tensor | None,
    position: int,
    positions: Tensor | None,
    num_samples: int,
    head_bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    logit_bias: Tensor | None,
    bias_rows: Tensor | None,
    bias_ids: Tensor | None,
    bias_values: Tensor | None,
    mask: Tensor | None,
    vocab_size: int | None,
    noise: Noise,
    math: Math,
    want_logprob: bool,
    want_lse: bool,
    store_logits: bool,
    implementation: Implementation,
    refusal: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source = hidden if hidden is not None else logits
    assert source is not None
    rows, device = source.shape[0], source.device
    columns = weight.shape[0] if weight is not None else source.shape[1]
    return (
        torch.empty(rows, num_samples, dtype=torch.int64, device=device),
        torch.empty((rows, num_samples) if want_logprob else (0,), dtype=torch.float32, device=device),
        torch.empty((rows,) if want_lse else (0,), dtype=torch.float32, device=device),
        torch.empty((rows, columns) if store_logits else (0,), dtype=torch.float32, device=device),
    )


_OPERATOR.impl("sample", _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("fsample::sample", _shapes, lib=_OPERATOR)
