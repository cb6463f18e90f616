"""Test `zero-mass`: a token of probability 0 is never drawn, whichever way it was forbidden.

Once is a failure.
"""

from __future__ import annotations

import numpy as np
import torch

from fsample_cli.exactness import forms, targets
from fsample_cli.exactness.draws import count
from fsample_cli.exactness.outcomes import Case
from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.result import TestResult
from fsample_cli.exactness.subject import Library, Subject
from fsample_cli.exactness.targets import Target

TEST = "zero-mass"
EFFECT = "forbidden mass"
CAP = 30.0


def run(subject: Subject, plan: Plan) -> list[TestResult]:
    """-inf through the weight for every sampler; masks, padded heads and the soft-cap for ours."""
    results = [_minus_infinity(subject, plan, target) for target in _holes(plan)]
    if subject.library is not None:
        results += [
            _masked(subject, subject.library, plan, "bool mask"),
            _masked(subject, subject.library, plan, "packed mask"),
            _masked(subject, subject.library, plan, "mask after soft-cap"),
            _padding(subject, subject.library, plan),
            _soft_cap_padding(subject, subject.library, plan),
        ]
    return results


def _holes(plan: Plan) -> list[Target]:
    """Half the tokens at -inf; one live token alone, far below anything that could stand for -inf, also at
    temperature 10; one live token at the end of many.
    """
    alone = np.full(512, -np.inf)
    alone[300] = -1000.0
    last = np.full(plan.vocabs[1], -np.inf)
    last[-1] = 3.0
    return [
        targets.masked(512, plan.seed),
        Target("one live", alone),
        Target("one live T=10", alone, 10.0),
        Target("last live", last),
    ]


def _minus_infinity(subject: Subject, plan: Plan, target: Target) -> TestResult:
    case = Case(TEST, subject, f"{target.name} V={target.vocab}")
    draws = plan.budget(target.vocab)
    drawn = count(subject, target, draws, case.name, plan)
    wrong = int(drawn.counts[0][target.probabilities == 0].sum()) + drawn.out_of_range
    return case.rule("", wrong > 0, drawn.draws, f"{wrong} draws of tokens at -inf", EFFECT)


def _masked(subject: Subject, library: Library, plan: Plan, how: str) -> TestResult:
    """A random half forbidden, all ids at one logit, so a mask that leaks shows in every other draw.

    For the soft-cap all logits are -1000: a token masked before the cap would come back at -cap.
    """
    vocab = 1000  # no multiple of 32 or of a tile
    case = Case(TEST, subject, f"{how} V={vocab}")
    rows = plan.rows(vocab, 1024)
    allowed = torch.from_numpy(np.random.default_rng(plan.seed).random(vocab) < 0.5)
    allowed[0] = True
    capped = how.endswith("soft-cap")
    logits = np.full(vocab, -1000.0 if capped else 0.0)
    hidden, weight = Target(how, logits).tensors(rows, plan.device, plan.dtype)
    mask = allowed.to(plan.device)
    packed = forms.pack(allowed[None]).to(plan.device).expand(rows, -1)
    seed, wrong = plan.case_seed(case.name), 0
    for position in range(plan.samples):
        if capped:
            drawn = forms.with_mass(
                library, hidden, weight, seed=seed, position=position, allowed=packed, softcap=CAP
            )
        elif how == "packed mask":
            drawn = forms.by_row(library, hidden, weight, seed=seed, position=position, allowed=packed)
        else:
            drawn = forms.masked(library, hidden, weight, seed=seed, position=position, mask=mask)
        ids = drawn.ids[:, 0].cpu()
        inside = (ids >= 0) & (ids < vocab)
        wrong += int((~inside).sum() + (~allowed[ids[inside]]).sum())
    return case.rule("", wrong > 0, rows * plan.samples, f"{wrong} draws of masked tokens", EFFECT)


def _padding(subject: Subject, library: Library, plan: Plan) -> TestResult:
    """Rows of zeros behind vocab_size, real logits near -12: without the bound, padding takes nearly every
    draw.
    """
    vocab, columns = 1000, 1024
    case = Case(TEST, subject, f"padded head V={vocab} of {columns}")
    logits = np.zeros(columns)
    logits[:vocab] = targets.to_bf16(np.random.default_rng(plan.seed).normal(-12, 1, vocab))
    return _bounded(case, library, plan, logits, vocab, None)


def _soft_cap_padding(subject: Subject, library: Library, plan: Plan) -> TestResult:
    """All logits at -1000 under a cap: spare lanes of the last tile, if masked before the cap, look like
    tokens.

    Of V = 129 a tile of 128 leaves 127 spare lanes, so the fault would take half the draws.
    """
    vocab = 129
    case = Case(TEST, subject, f"spare lanes after soft-cap V={vocab}")
    return _bounded(case, library, plan, np.full(vocab, -1000.0), vocab, CAP)


def _bounded(
    case: Case, library: Library, plan: Plan, logits: targets.Floats, vocab: int, softcap: float | None
) -> TestResult:
    rows = plan.rows(len(logits), 1024)
    hidden, weight = Target(case.name, logits).tensors(rows, plan.device, plan.dtype)
    wrong = 0
    for position in range(plan.samples):
        seed = plan.case_seed(case.name)
        if softcap is None:
            drawn = forms.plain(library, hidden, weight, seed=seed, position=position, vocab_size=vocab)
        else:
            drawn = forms.with_mass(
                library, hidden, weight, seed=seed, position=position, vocab_size=vocab, softcap=softcap
            )
        wrong += int(((drawn.ids < 0) | (drawn.ids >= vocab)).sum())
    return case.rule("", wrong > 0, rows * plan.samples, f"{wrong} draws outside [0, {vocab})", EFFECT)
