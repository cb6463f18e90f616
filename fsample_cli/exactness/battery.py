"""The tests by name, and the one judgement over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fsample_cli.errors import UsageError
from fsample_cli.exactness import (
    fit_rows,
    fit_targets,
    id_range,
    independence,
    invariance,
    log_probability,
    noise_words,
    pathwise,
    ranks,
    tails,
    zero_mass,
)
from fsample_cli.exactness.holm import holm
from fsample_cli.exactness.outcomes import Case
from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.power import smallest_deficit, smallest_effect
from fsample_cli.exactness.result import Sensitivity, TestResult, Verdict
from fsample_cli.exactness.subject import BadIds, Subject
from fsample_cli.samplers.protocol import SamplerRaised


@dataclass(frozen=True)
class Check:
    """A named test. `ours_only`: it needs options that only our library has."""

    name: str
    run: Callable[[Subject, Plan], list[TestResult]]
    about: str
    ours_only: bool = False


TESTS: tuple[Check, ...] = (
    Check(fit_targets.TEST, fit_targets.run, "counts against known distributions, V = 512 to 262,144"),
    Check(tails.TEST, tails.run, "tokens 10 to 40 below the top keep their mass"),
    Check(zero_mass.TEST, zero_mass.run, "a forbidden token is never drawn"),
    Check(id_range.TEST, id_range.run, "ids lie in [0, V) at sizes beside tiles and words"),
    Check(independence.TEST, independence.run, "rows, steps, seeds and samples share nothing"),
    Check(ranks.TEST, ranks.run, "shards merged by log-mass are the whole distribution", ours_only=True),
    Check(pathwise.TEST, pathwise.run, "same noise, same token as in float64", ours_only=True),
    Check(
        log_probability.TEST, log_probability.run, "log-probability and lse against float64", ours_only=True
    ),
    Check(invariance.TEST, invariance.run, "nothing around a row changes its tokens", ours_only=True),
    Check(noise_words.TEST, noise_words.run, "no random word of the definition serves twice", ours_only=True),
)
NAMES = tuple(check.name for check in TESTS)


ALL_TESTS = (fit_rows.TEST, *NAMES)


def choose(wanted: Sequence[str] | None) -> tuple[str, ...]:
    """The tests to run, in the order of the list. Raises UsageError for a name that is none."""
    names = [part.strip() for value in wanted or () for part in value.split(",")]
    for name in names:
        if name not in ALL_TESTS:
            raise UsageError(f"--test must be one of {', '.join(ALL_TESTS)}, got {name!r}", "default: all")
    return tuple(name for name in ALL_TESTS if not names or name in names)


def run_check(check: Check, subject: Subject, plan: Plan) -> list[TestResult]:
    """The results of one test; a sampler that returns no ids at all, or raises, fails it instead of
    ending the run.
    """
    case = Case(check.name, subject, "")
    if check.ours_only and subject.library is None:
        return [case.skip("needs options of fsample_kernels.sample, which this sampler does not take")]
    try:
        return check.run(subject, plan)
    except BadIds as error:
        return [case.rule("ids", True, 0, str(error))]
    except SamplerRaised as error:
        return [case.rule("call", True, 0, error.message)]


# The far tail of Pearson's statistic and of G is heavier than the chi-squared law that gives their p-values.
# Over the cells that `goodness_of_fit.near_the_law` admits, right samplers are beyond it up to 3.9 times as
# often at p = 5e-8, 3.3 times at 1e-7, 2.2 times at 1e-6. Holm takes these p-values for that much larger.
# This bounds the false alarms of 5,000 p-values at `holm.SMALLEST_ALPHA`; it is not shown further out.
CHI_SQUARED_TAIL = 4.0


def judge(results: Iterable[TestResult], alpha: float) -> list[TestResult]:
    """Verdicts for a whole run.

    The chance that a right sampler gets any "fail" is at most alpha: Holm over all p-values, those of
    chi-squared statistics times CHI_SQUARED_TAIL, and rules without chance that a right sampler never breaks.
    Smallest effects are given for a single test at Bonferroni's level alpha / m.
    """
    found = list(results)
    chancy = [i for i, result in enumerate(found) if result.p_value is not None and not result.broken]
    adjusted = dict(zip(chancy, holm([weighed_p(found[i]) for i in chancy]), strict=True))
    level = alpha / max(len(chancy), 1)
    return [_judged(result, adjusted.get(i), alpha, level) for i, result in enumerate(found)]


def passed(results: Sequence[TestResult]) -> bool:
    return all(result.verdict != "fail" for result in results)


def weighed_p(result: TestResult) -> float:
    """The p-value as Holm takes it."""
    assert result.p_value is not None
    return min(1.0, _tail(result) * result.p_value)


def _tail(result: TestResult) -> float:
    seen = result.sensitivity
    return CHI_SQUARED_TAIL if seen is not None and seen.law == "chi-squared" else 1.0


def _judged(result: TestResult, adjusted: float | None, alpha: float, level: float) -> TestResult:
    if result.skipped:
        return replace(result, verdict="skipped")
    failed = result.broken or (adjusted is not None and adjusted <= alpha)
    verdict: Verdict = "fail" if failed else "pass"
    seen, level = result.sensitivity, level / _tail(result)
    return replace(
        result,
        adjusted_p=adjusted,
        smallest_at_80=None if seen is None else smallest_effect(seen, level, 0.8),
        smallest_at_99=None if seen is None else smallest_effect(seen, level, 0.99),
        deficit_at_80=_deficit(seen, level),
        verdict=verdict,
    )


def _deficit(seen: Sensitivity | None, level: float) -> float | None:
    if seen is None or seen.law != "binomial" or seen.draws < 1:
        return None
    return smallest_deficit(seen.draws, seen.scale, level, 0.8)
