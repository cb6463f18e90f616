"""What one test says: a frozen record, complete enough to be judged, printed and stored without the test
at hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

Verdict = Literal["pass", "fail", "skipped"]
Law = Literal["chi-squared", "normal", "binomial", "markov", "zero"]


@dataclass(frozen=True)
class Sensitivity:
    """How the smallest visible effect follows from a level and a power (`power.smallest_effect`).

    `scale` by law. chi-squared: unused. normal: standard error of the quantity named in `effect`. binomial:
    the mass under test, so that `draws * scale` events are expected. markov: the events expected at most.
    zero: unused, nothing is expected. A p-value that is the smallest of many, times their number, has that
    number as `tries`.
    """

    law: Law
    effect: str  # what the number is: "total variation", "tail mass", ...
    draws: int
    dof: int = 0
    scale: float = 0.0
    tries: int = 1


@dataclass(frozen=True)
class TestResult:
    """One statistic of one sampler.

    `p_value` None marks a rule without chance (an id out of range, a forbidden token): then `broken` decides.
    All p-values of a run are judged together (`battery.judge`), which fills the fields after `seconds`.
    """

    __test__: ClassVar[bool] = False  # pytest collects classes called Test*

    test: str
    case: str
    sampler: str
    statistic: float | None
    dof: int | None
    p_value: float | None
    draws: int
    ended: float  # by time.perf_counter, for `timed`
    sensitivity: Sensitivity | None = None
    broken: bool = False
    skipped: bool = False
    note: str = ""
    seconds: float = 0.0
    adjusted_p: float | None = None
    smallest_at_80: float | None = None
    smallest_at_99: float | None = None
    deficit_at_80: float | None = None
    verdict: Verdict = "pass"


def timed(results: Iterable[TestResult], started: float, ended: float) -> list[TestResult]:
    """The results of one test with their seconds, which sum to `ended` - `started`.

    A result's are those since the one before it was known: draws that several share count once, in the first
    of them. What came after the last is the last one's.
    """
    found = list(results)
    order = sorted(range(len(found)), key=lambda i: found[i].ended)
    seconds = {}
    for place, i in enumerate(order):
        until = ended if place == len(order) - 1 else found[i].ended
        seconds[i], started = until - started, until
    return [replace(result, seconds=seconds[i]) for i, result in enumerate(found)]
