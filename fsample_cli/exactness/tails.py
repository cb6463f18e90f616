"""Test `tails`: tokens far below the top keep the mass they are owed, down to exp(-40)."""

from __future__ import annotations

import math

from fsample_cli.exactness import targets
from fsample_cli.exactness.draws import count
from fsample_cli.exactness.outcomes import Case
from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.power import smallest_deficit
from fsample_cli.exactness.result import TestResult
from fsample_cli.exactness.subject import Subject

TEST = "tails"
# What ended the growth of the draws, and what they can show; the last words of a result's note.
REACHED = "expectation reached"
MISSING_SHOWS = "budget ended: a missing tail shows"
EXCESS_SHOWS = "budget ended: only an excess shows"


def run(subject: Subject, plan: Plan) -> list[TestResult]:
    """One token at 0, all others at -gap: draws outside the top token against their exact expectation in
    float64; and, given how many there are, which of the others they are.
    """
    return [result for gap in plan.gaps for result in one_gap(subject, plan, gap)]


def one_gap(subject: Subject, plan: Plan, gap: float) -> list[TestResult]:
    """One gap.

    Draws grow until the tail expects `plan.tail_expected` events or `plan.tail_logits` are spent. Of a tail
    that expects enough to be missed, the ids are judged as well.
    """
    target = targets.one_against_many(plan.tail_vocab, gap)
    mass = float(target.probabilities[:-1].sum())
    draws, limit = planned_draws(plan, mass)
    case = Case(TEST, subject, target.name)
    drawn = count(subject, target, draws, case.name, plan)
    if drawn.out_of_range:
        return [case.rule("range", True, drawn.draws, drawn.complaint)]
    rare = drawn.counts[0, :-1]
    seen, ids = int(rare.sum()), len(rare)
    results = [case.events("", seen, drawn.draws, mass, "tail mass", limit)]
    if limit != EXCESS_SHOWS:
        for what, part in (("first half", rare[: ids // 2]), ("even ids", rare[::2])):
            share = len(part) / ids
            results.append(
                case.events(f"{what} of the tail", int(part.sum()), seen, share, "share of the tail")
            )
    return results


def planned_draws(plan: Plan, mass: float) -> tuple[int, str]:
    """Draws for a tail of this mass, and what ended their growth.

    Where even the whole budget could not show that the tail is missing, a twentieth of it looks for an
    excess.
    """
    enough = math.ceil(plan.tail_expected / mass)
    affordable = max(plan.tail_logits // plan.tail_vocab, 20)
    if enough <= affordable:
        return enough, REACHED
    if smallest_deficit(affordable, mass, plan.alpha / plan.p_values, 0.8) is not None:
        return affordable, MISSING_SHOWS
    return affordable // 20, EXCESS_SHOWS
