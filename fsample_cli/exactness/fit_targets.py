"""Test `goodness`: counts against distributions known to the last bit, from V = 512 to whole vocabularies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fsample_cli.exactness import targets
from fsample_cli.exactness.draws import Drawn, count, count_rows
from fsample_cli.exactness.goodness_of_fit import chi_squared, g_test
from fsample_cli.exactness.outcomes import Case
from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.result import TestResult
from fsample_cli.exactness.subject import Subject
from fsample_cli.exactness.targets import Target

TEST = "goodness"
TEMPERATURES = (0.3, 0.7, 1.3, 2.0, 10.0)
WIDE_TEMPERATURES = (0.7, 2.0)  # on whole vocabularies
# Not 0, at which some samplers divide: the best id leads by 1, so others have e^-64 of its mass.
COLD = 1 / 64
# Parts no tile of rows: one drawn for another 16, 64, 96 or 192 on has the wrong distribution.
KINDS = 7
SMALLEST_VOCAB = 512  # below it ids have no halves worth a test of their own
RAGGED_VOCABS = (129, 1000)  # their last tile of 128 has 1 id, and 104
# Beyond 88, the exponent's range of fp32, where the largest logit is not taken off first.
FAR = (-120.0, 120.0)
SMALL_BATCHES = (1, 3)
SMALL_CALLS = 60  # times `plan.samples`
TILE = 128  # ids: every kernel's tiles, groups and lanes repeat at it or at a part or multiple of it


def run(subject: Subject, plan: Plan) -> list[TestResult]:
    """Chi-squared and G on every target, and one-number tests that see a slant long before chi-squared
    does.
    """
    results: list[TestResult] = []
    for target in all_targets(plan):
        case = Case(TEST, subject, f"{target.name} V={target.vocab}")
        drawn = count(subject, target, _draws(target, plan), case.name, plan)
        results += judge_counts(case, target, drawn)
    if not plan.only:
        results += [
            *_kinds(subject, plan),
            *_peaks(subject, plan),
            *_small_batches(subject, plan),
            *_cold(subject, plan),
        ]
    return results


def _draws(target: Target, plan: Plan) -> int:
    """How often a target is drawn from: a quarter where only what is gross is looked for."""
    vocab, budget = target.vocab, plan.budget(target.vocab)
    if vocab == 512 and target.name in plan.focus:
        return plan.focus_draws
    if target.name.startswith(targets.REAL):
        return max(budget, plan.real_draws)
    gross = (
        vocab == max(RAGGED_VOCABS)
        or (vocab > SMALLEST_VOCAB and target.name == "peaked")  # two-scale has its shape
        or target.name in ("masked", *(f"skewed{by:+g}" for by in FAR))
        or target.temperature != 1
    )
    return plan.few(vocab) if gross and vocab >= SMALLEST_VOCAB else budget


def all_targets(plan: Plan) -> list[Target]:
    """The known distributions of a plan, each vocabulary with what its size can show."""
    found = [targets.three_tokens(temperature) for temperature in TEMPERATURES]
    found += [targets.flat(vocab) for vocab in RAGGED_VOCABS]
    found += [targets.shifted(plan.vocabs[0], plan.seed, by) for by in FAR]
    for vocab in plan.vocabs:
        skewed = targets.skewed(vocab, plan.seed)
        found += [targets.flat(vocab), skewed, targets.two_scale(vocab), targets.masked(vocab, plan.seed)]
        found.append(targets.peaked(vocab))
        if vocab in plan.vocabs[:2]:
            found += [
                replace(skewed, name=f"skewed T={temperature:g}", temperature=temperature)
                for temperature in WIDE_TEMPERATURES
            ]
    found += [targets.real(logits, number) for number, logits in enumerate(plan.real_logits)]
    return [target for target in found if not plan.only or target.name in plan.only]


def _kinds(subject: Subject, plan: Plan) -> list[TestResult]:
    """Rows of several distributions in one call, as large as those of the other targets: row b has the
    distribution b mod KINDS.
    """
    vocab = plan.vocabs[0]
    kinds = [targets.skewed(vocab, plan.seed + kind) for kind in range(KINDS)]
    case = Case(TEST, subject, f"rows of {KINDS} kinds V={vocab}")
    drawn = _together(case, kinds, plan)
    if drawn.out_of_range:
        return [case.rule("range", True, drawn.draws, drawn.complaint)]
    return [
        case.fit(f"kind {kind}", chi_squared(counts, target.probabilities), int(counts.sum()))
        for kind, (counts, target) in enumerate(zip(drawn.counts, kinds, strict=True))
    ]


def _peaks(subject: Subject, plan: Plan) -> list[TestResult]:
    """The same with many ids: rows that have a likely id each, which a dozen draws a kind tell apart."""
    vocab = plan.vocabs[1]
    likely = [(kind + 1) * vocab // (KINDS + 1) for kind in range(KINDS)]
    kinds = [targets.peaked(vocab, at) for at in likely]
    case = Case(TEST, subject, f"rows of {KINDS} peaks V={vocab}")
    drawn = _together(case, kinds, plan)
    if drawn.out_of_range:
        return [case.rule("range", True, drawn.draws, drawn.complaint)]
    others = 1 - float(kinds[0].probabilities[likely[0]])
    return [
        case.events(
            f"peak {kind}", int(counts.sum() - counts[at]), int(counts.sum()), others, "mass of the other ids"
        )
        for kind, (counts, at) in enumerate(zip(drawn.counts, likely, strict=True))
    ]


def _together(case: Case, kinds: list[Target], plan: Plan) -> Drawn:
    vocab = kinds[0].vocab
    rows = plan.rows(vocab, plan.budget(vocab))
    hidden, weight = targets.together(kinds, rows, plan.device, plan.dtype)
    calls = -(-plan.few(vocab) // rows)
    return count_rows(case.subject, hidden, weight, len(kinds), calls, 1.0, plan.case_seed(case.name))


def _small_batches(subject: Subject, plan: Plan) -> list[TestResult]:
    """Calls of one row and of three."""
    target = targets.skewed(plan.vocabs[0], plan.seed)
    results = []
    for rows in SMALL_BATCHES[:1] if subject.compiles_shapes else SMALL_BATCHES:
        case = Case(TEST, subject, f"{target.name} V={target.vocab} B={rows}")
        hidden, weight = target.tensors(rows, plan.device, plan.dtype)
        calls = SMALL_CALLS * plan.samples
        drawn = count_rows(subject, hidden, weight, 1, calls, 1.0, plan.case_seed(case.name))
        if drawn.out_of_range:
            results.append(case.rule("range", True, drawn.draws, drawn.complaint))
        else:
            results.append(
                case.fit("chi-squared", chi_squared(drawn.counts[0], target.probabilities), drawn.draws)
            )
    return results


def _cold(subject: Subject, plan: Plan) -> list[TestResult]:
    """Near temperature 0 every draw is the best id."""
    vocab = plan.vocabs[1]
    best = vocab * 3 // 4
    logits = np.zeros(vocab)
    logits[best] = 1.0
    target = Target(f"cold T=1/{1 / COLD:g}", logits, COLD)
    case = Case(TEST, subject, f"{target.name} V={vocab}")
    drawn = count(subject, target, plan.rows(vocab, plan.budget(vocab)), case.name, plan)
    wrong = drawn.draws - int(drawn.counts[0, best])
    note = f"{wrong} draws are not the best id {best}"
    return [case.rule("", wrong > 0, drawn.draws, note, "mass of wrong ids")]


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
        results += _share(case, "first half", ids < target.vocab // 2, counts, p, "mass of one half")
        results += _share(case, "even ids", ids % 2 == 0, counts, p, "mass of even ids")
        results += _mean(case, "mean id", ids / (target.vocab - 1), counts, p, "mean id / (V - 1)")
        results += _places(case, ids, counts, p) if target.vocab > SMALLEST_VOCAB else []
    return results + _temperature(case, target, counts)


def _places(
    case: Case, ids: NDArray[np.int64], counts: NDArray[np.int64], p: NDArray[np.float64]
) -> list[TestResult]:
    """What cells of neighbouring ids do not see, since it moves inside one: from place to place in a tile,
    and from one tile to the next.
    """
    place = ids % TILE
    seen = np.bincount(place, weights=counts).astype(np.int64)
    return [
        case.fit("id mod 128", chi_squared(seen, np.bincount(place, weights=p)), int(counts.sum())),
        *_share(case, "even tiles", ids // TILE % 2 == 0, counts, p, "mass of even tiles"),
    ]


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


def _share(
    case: Case,
    what: str,
    inside: NDArray[np.bool_],
    counts: NDArray[np.int64],
    p: NDArray[np.float64],
    effect: str,
) -> list[TestResult]:
    """Draws of the ids where `inside` [V] holds: exact binomial."""
    mass = float(p[inside].sum() / p.sum())
    if not 0 < mass < 1:
        return []
    return [case.events(what, int(counts[inside].sum()), int(counts.sum()), mass, effect)]


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
