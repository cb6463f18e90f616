"""Test `rows`: the published check, V = 512 and 10,000 draws a row by default, on the workload's own head
and states.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fsample_cli.exactness.draws import count_rows
from fsample_cli.exactness.goodness_of_fit import chi_squared, softmax64
from fsample_cli.exactness.outcomes import Case
from fsample_cli.exactness.result import TestResult
from fsample_cli.exactness.subject import Subject

TEST = "rows"


def float64_logits(hidden: Tensor, weight: Tensor, rows: int = 16_384) -> Tensor:
    """hidden @ weight.T in float64 [R, V] on the CPU, from the values as stored, a slice of the weight at
    a time.
    """
    left = hidden.double()
    parts = [weight[first : first + rows] for first in range(0, weight.shape[0], rows)]
    return torch.cat([(left @ part.double().T).cpu() for part in parts], dim=1)


def run(
    subject: Subject,
    states: Tensor,
    weight: Tensor,
    logits: Tensor,
    *,
    batch: int,
    draws: int,
    temperature: float,
    seed: int,
    scale: float = 1.0,
    on_call: Callable[[], None] | None = None,
) -> list[TestResult]:
    """One chi-squared test per row of `states` [R, D] against softmax(logits / temperature).

    Calls have `batch` rows, row b repeating states[b mod R]; there are as many calls as `draws` per row need.
    logits [R, V] float64 are the target, all transforms applied, among them `scale`. At temperature 0 every
    draw must be the best id, or one that rounding may put before it.
    """
    distinct = states.shape[0]
    case = Case(TEST, subject, f"B={batch}")
    hidden = states[torch.arange(batch, device=states.device) % distinct]
    calls = calls_needed(batch, distinct, draws)
    drawn = count_rows(subject, hidden, weight, distinct, calls, temperature, seed, 0, on_call)
    if drawn.out_of_range:
        return [case.rule("range", True, drawn.draws, drawn.complaint)]
    results = []
    for row in range(distinct):
        counts, n = drawn.counts[row], int(drawn.counts[row].sum())
        if temperature == 0:
            best = int(logits[row].argmax())
            near = logits[row] >= logits[row, best] - rounding(states[row], weight, logits[row], scale)
            others = n - int(counts[near.numpy()].sum())
            note = f"{others} draws are neither the best id {best} nor within rounding of it"
            results.append(case.rule(f"row {row}", others > 0, n, note, "mass of wrong ids"))
            continue
        fit = chi_squared(counts, softmax64(logits[row].numpy(), temperature))
        results.append(case.fit(f"row {row}", fit, n))
    return results


def rounding(state: Tensor, weight: Tensor, logits: Tensor, scale: float) -> Tensor:
    """How far below the best each logit [V] may be that a right sampler takes for as large, [V] float64.

    It sums D products in fp32 in whatever order, which 8 sqrt(D) 2^-24 sum |h w| bounds amply, for either of
    the two. It may round to the dtype of the head: half a unit of the best for either.
    """
    sizes = float64_logits(state.abs()[None], weight.abs())[0]
    sums = 8 * len(state) ** 0.5 * 2.0**-24 * abs(scale) * (sizes + sizes[logits.argmax()])
    off: Tensor = sums + torch.finfo(weight.dtype).eps * float(logits.max().abs())
    return off


def calls_needed(batch: int, distinct: int, draws: int) -> int:
    """Calls after which the row repeated least often has at least `draws` draws."""
    return -(-draws // (batch // distinct))
