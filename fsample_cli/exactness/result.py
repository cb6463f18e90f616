"""What one test says: a frozen record, complete enough to be judged, printed and stored without the test
at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Verdict = Literal["pass", "fail", "skipped"]
Law = Literal["chi-squared", "normal", "poisson", "zero"]


@dataclass(frozen=True)
class Sensitivity:
    """How the smallest visible effect follows from a level and a power (`power.smallest_effect`).

    `scale` by law. chi-squared: unused. normal: standard error of the quantity named in `effect`. poisson:
    the mass under test, so that `draws * scale` events are expected. zero: unused, nothing is expected.
    """

    law: Law
    effect: str  # what the number is: "total variation", "tail mass", ...
    draws: int
    dof: int = 0
    scale: float = 0.0


@dataclass(frozen=True)
class TestResult:
    """One statistic of one sampler.

    `p_value` None marks a rule without chance (an id out of range, a forbidden token): then `broken` decides.
    All p-values of a run are judged together (`battery.judge`), which fills the fields after `note`.
    """

    __test__: ClassVar[bool] = False  # pytest collects classes called Test*

    test: str
    case: str
    sampler: str
    statistic: float | None
    dof: int | None
    p_value: float | None
    draws: int
    seconds: float
    sensitivity: Sensitivity | None = None
    broken: bool = False
    skipped: bool = False
    note: str = ""
    adjusted_p: float | None = None
    smallest_at_80: float | None = None
    smallest_at_99: float | None = None
    verdict: Verdict = "pass"
