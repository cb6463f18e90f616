"""Test `pathwise`: with the same noise the token is the float64 oracle's, or fp32's rounding explains the
other one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsample_cli.exactness import forms, oracle, targets
from fsample_cli.exactness.fit_rows import float64_logits
from fsample_cli.exactness.outcomes import Case
from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.result import TestResult
from fsample_cli.exactness.subject import Library, Subject
from fsample_kernels import noise

TEST = "pathwise"
CHECKED, SAMPLES = 33, 2  # rows that the oracle, which is slow, looks at
VOCABS = {"element": (129, 1000, 4097), "grouped": (129, 1000, 4097), "online": (4095, 4097, 9000)}
TEMPERATURES = torch.tensor([0.5, 1.0, 2.0])  # of rows
STATED_RATE = 1e-3  # share of draws that may be near-ties; measured: below 1e-4


def run(subject: Subject, plan: Plan) -> list[TestResult]:
    """Random heads and states; seeds and the last positions there are from the host for all rows, and one of
    each per row, with its own temperature.
    """
    assert subject.library is not None and subject.noise is not None
    return [_one(subject, subject.library, subject.noise, vocab, plan) for vocab in VOCABS[subject.noise]]


def _one(subject: Subject, library: Library, algorithm: str, vocab: int, plan: Plan) -> TestResult:
    case = Case(TEST, subject, f"V={vocab}")
    generator = torch.Generator().manual_seed(plan.case_seed(case.name) % 2**31)
    rows = forms.BATCHES[-1]
    weight = (torch.randn(vocab, targets.HIDDEN, generator=generator) * 0.8).to(plan.device, plan.dtype)
    hidden = torch.randn(rows, targets.HIDDEN, generator=generator).to(plan.device, plan.dtype)
    logits = float64_logits(hidden[:CHECKED], weight)
    seeds = torch.randint(2**62, (rows,), generator=generator)
    positions = torch.randint(2**32, (rows,), generator=generator)
    degrees = TEMPERATURES[torch.arange(rows) % len(TEMPERATURES)]
    wrong, near, draws, example = 0, 0, 0, ""
    for call in range(plan.samples):
        seed: int | Tensor
        position: int | Tensor
        temperature: float | Tensor
        if call % 2:
            seed, position = plan.case_seed(f"{case.name} {call}"), noise.MAX_POSITION - call
            temperature = 0.5
            result = forms.plain(
                library, hidden, weight, temperature=temperature, seed=seed, position=position
            )
        else:
            seed, position, temperature = seeds[:CHECKED] + call, positions[:CHECKED], degrees[:CHECKED]
            result = forms.by_row(
                library, hidden, weight, temperature=degrees.to(plan.device),
                seed=(seeds + call).to(plan.device), position=positions.to(plan.device), num_samples=SAMPLES,
            )  # fmt: skip
        drawn = result.ids[:CHECKED].cpu()
        for sample in range(drawn.shape[1]):
            right = oracle.expected(logits, temperature, seed, position, sample, algorithm)
            other = drawn[:, sample] != right.ids
            unexplained = other & ~right.close
            near += int((other & right.close).sum())
            wrong += int(unexplained.sum())
            draws += CHECKED
            if bool(unexplained.any()) and not example:
                row = int(unexplained.nonzero()[0, 0])
                example = (
                    f", first in row {row}: {int(drawn[row, sample])}, expected {int(right.ids[row])} "
                    f"by a margin of {float(right.margin[row]):.3g}"
                )
    broken = wrong > 0 or near > max(2, STATED_RATE * draws)
    note = f"{wrong} tokens differ from the oracle's{example}; {near} more at near-ties"
    return case.rule("", broken, draws, note, "share of wrong tokens")
