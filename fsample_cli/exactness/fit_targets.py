"""Test `goodness`: counts against distributions known to the last bit, from V = 512 to whole vocabularies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fsample_cli.exactness import targets
from fsample_cli.exactness.draws import Drawn, count
from fsample_cli.exactness.goodness_of_fit import chi_squared, g_test
from fsample_cli.exactness.outcomes import Case
from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.result import TestResult
from fsample_cli.exactness.subject import Subject
from fsample_cli.exactness.targets import Target

TEST = "goodness"
TEMPERATURES = (0.3, 0.7, 1.3, 2.0, 10.0)
SMALLEST_VOCAB = 512  # below it ids have no halves worth a test of their own


def run(subject: Subject, plan: Plan) -> list[TestResult]:
    """Chi-squared and G on every target, and one-number tests that see a slant long before chi-squared
    does.
    """
    results: list[TestResult] = []
    for target in all_targets(plan):
        draws = plan.budget(target.vocab)
        if target.vocab == 512 and target.name in plan.focus:
            draws = plan.focus_draws
        case = Case(TEST, subject, f"{target.name} V={target.vocab}")
        results += judge_counts(case, target, count(subject, target, draws, case.name, plan))
    return results


def all_targets(plan: Plan) -> list[Target]:
    """The known distributions of a plan, each vocabulary with what its size can show."""
    found = [targets.three_tokens(temperature) for temperature in TEMPERATURES]
    for vocab in plan.vocabs:
        found += [targets.flat(vocab), targets.skewed(vocab, plan.seed), targets.two_scale(vocab)]
        if vocab == plan.vocabs[0]:
            found += [targets.peaked(vocab), targets.masked(vocab, plan.seed)]
    found += [targets.real(logits, number) for number, logits in enumerate(plan.real_logits)]
    return [target for target in found if not plan.only or target.name in plan.only]


def judge_counts(case: Case, target: Target, drawn: Drawn) -> list[TestResult]:
    """Everything one set of counts says about one target."""
    if drawn.out_of_range:
        return [case.rule("range", True, drawn.draws, drawn.complaint)]
    counts, p, n = drawn.counts[0], target.probabilities, drawn.draws
    results = [
        case.fit("chi-squared", chi_squared(counts, p), n),
        case.fit("G", g_test(counts, p), n),
    ]
    if target.vocab >= SMALLEST_VOCAB:
        ids = np.arange(target.vocab)
        half = (ids < target.vocab // 2).astype(float)
        results += _mean(case, "first half", half, counts, p, "mass of one half")
        results += _mean(case, "even ids", (ids % 2 == 0).astype(float), counts, p, "mass of even ids")
        results += _mean(case, "mean id", ids / (target.vocab - 1), counts, p, "mean id / (V - 1)")
    return results + _temperature(case, target, counts)


def _temperature(case: Case, target: Target, counts: NDArray[np.int64]) -> list[TestResult]:
    """z test of the mean logit, stated as a relative error of the temperature.

    It is the score of the family p^(1 + b), so the most powerful test for it: an error b of 1 / temperature
    moves the mean of logit / temperature by b times its variance.
    """
    p = target.probabilities
    logits = np.where(np.isfinite(target.logits), target.logits, 0.0) / target.temperature
    variance = float(p @ (logits - p @ logits) ** 2)
    if variance == 0:
        return []
    return _mean(case, "mean logit", logits / variance, counts, p, "relative error of temperature")


def _mean(
    case: Case,
    what: str,
    values: NDArray[np.float64],
    counts: NDArray[np.int64],
    p: NDArray[np.float64],
    effect: str,
) -> list[TestResult]:
    """z test of the mean of `values` [V] over the draws; none where that is not `normal_enough`."""
    n = int(counts.sum())
    centred = values - float(p @ values)
    square = centred * centred  # numpy's powers above 2 go through pow(), which took most of this test
    variance = float(p @ square)
    if variance == 0:
        return []
    skew = float(p @ (square * centred)) / variance**1.5
    kurtosis = float(p @ (square * square)) / variance**2 - 3
    if not normal_enough(skew, kurtosis, n):
        return []
    return [case.mean(what, float(counts @ centred) / n, 0.0, variance**0.5, n, effect)]


def normal_enough(skew: float, kurtosis: float, n: int) -> bool:
    """Whether the mean of n draws is so normal that the first terms of Edgeworth's series change a two-sided
    p-value near 1e-5 by less than a tenth. kurtosis: 0 for a normal draw.
    """
    return skew**2 <= 1e-3 * n and abs(kurtosis) <= 5e-3 * n
