"""Test `logprob`: the returned log-probability and log-sum-exp against float64, and their mean against the
entropy.
"""

from __future__ import annotations

import numpy as np
import torch

from fsample_cli.exactness import forms, targets
from fsample_cli.exactness.fit_rows import float64_logits
from fsample_cli.exactness.fit_targets import normal_enough
from fsample_cli.exactness.outcomes import Case
from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.result import TestResult
from fsample_cli.exactness.subject import Library, Subject

TEST = "logprob"
# fp32 results of fp32 logits of size 10 to 100: a few ulp of 128
TOLERANCE = 5e-5
WRONG = "share of wrong values"


def run(subject: Subject, plan: Plan) -> list[TestResult]:
    """Mean log-probability of draws against -entropy; every value against float64 under all transforms."""
    assert subject.library is not None
    return [*entropy(subject, subject.library, plan), *_values(subject, subject.library, plan)]


def entropy(subject: Subject, library: Library, plan: Plan) -> list[TestResult]:
    target = targets.skewed(512, plan.seed)
    case = Case(TEST, subject, f"{target.name} V={target.vocab}")
    rows = plan.rows(target.vocab, plan.pair_draws)
    hidden, weight = target.tensors(rows, plan.device, plan.dtype)
    calls = -(-plan.pair_draws // rows)
    sums = torch.zeros((), dtype=torch.float64, device=plan.device)
    for position in range(calls):
        drawn = forms.with_mass(
            library, hidden, weight, seed=plan.case_seed(case.name), position=position
        ).logprob
        assert drawn is not None
        sums += drawn.double().sum()
    total, draws = float(sums), calls * rows
    p = target.probabilities
    centred = np.log(p) + target.entropy
    deviation = float(np.sqrt(p @ centred**2))
    skew, kurtosis = float(p @ centred**3) / deviation**3, float(p @ centred**4) / deviation**4 - 3
    if not normal_enough(skew, kurtosis, draws):
        return []
    return [case.mean("mean", total / draws, -target.entropy, deviation, draws, "nats")]


def _values(subject: Subject, library: Library, plan: Plan) -> list[TestResult]:
    """Temperature 0.5, scale, soft-cap, bias and mask together: the value belongs to the distribution
    drawn from.
    """
    vocab, rows, temperature = 1000, forms.BATCHES[-1], 0.5
    case = Case(TEST, subject, f"all transforms V={vocab}")
    generator = torch.Generator().manual_seed(plan.seed % 2**31)
    weight = (2 * torch.randn(vocab, targets.HIDDEN, generator=generator)).to(plan.dtype)
    hidden = torch.randn(rows, targets.HIDDEN, generator=generator).to(plan.dtype)
    bias = torch.randn(vocab, generator=generator)
    allowed = torch.rand(rows, vocab, generator=generator) < 0.7
    y = 30.0 * torch.tanh(0.5 * float64_logits(hidden, weight) / 30.0) + bias.double()
    y = y.masked_fill(~allowed, -torch.inf) / temperature
    result = forms.with_mass(
        library,
        hidden.to(plan.device),
        weight.to(plan.device),
        seed=plan.case_seed(case.name),
        position=0,
        temperature=temperature,
        allowed=forms.pack(allowed).to(plan.device),
        logit_scale=0.5,
        softcap=30.0,
        logit_bias=bias.to(plan.device),
    )
    assert result.logprob is not None and result.lse is not None
    ids = result.ids.cpu()
    if bool(((ids < 0) | (ids >= vocab)).any()):
        return [case.rule("ids", True, ids.numel(), f"ids outside [0, {vocab})")]
    right = torch.log_softmax(y, dim=1).gather(1, ids)
    off = float((result.logprob.cpu().double() - right).abs().max())
    lse_off = float((result.lse.cpu().double() - torch.logsumexp(y, dim=1)).abs().max())
    above = float(result.logprob.max())
    return [
        case.rule("logprob", not off <= TOLERANCE, ids.numel(), f"off by {off:.3g} nats", WRONG),
        case.rule("lse", not lse_off <= TOLERANCE, rows, f"off by {lse_off:.3g} nats", WRONG),
        case.rule("sign", not above <= 0, ids.numel(), f"log-probability {above:.3g} is above 0", WRONG),
    ]
