"""From a statistic to a `TestResult`: each helper knows the law of one kind of statistic and what it can
see.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from fsample_cli.exactness import laws
from fsample_cli.exactness.goodness_of_fit import Fit
from fsample_cli.exactness.result import Law, Sensitivity, TestResult
from fsample_cli.exactness.subject import Subject


@dataclass(frozen=True)
class Case:
    """Who is tested by what: the fields every result of one set of draws shares."""

    test: str
    subject: Subject
    name: str

    def _result(
        self,
        what: str,
        statistic: float | None,
        dof: int | None,
        p_value: float | None,
        draws: int,
        sensitivity: Sensitivity | None = None,
        broken: bool = False,
        skipped: bool = False,
        note: str = "",
    ) -> TestResult:
        return TestResult(
            test=self.test,
            case=f"{self.name} {what}".strip(),
            sampler=self.subject.name,
            statistic=statistic,
            dof=dof,
            p_value=p_value,
            draws=draws,
            ended=time.perf_counter(),
            sensitivity=sensitivity,
            broken=broken,
            skipped=skipped,
            note=note,
        )

    def fit(self, what: str, fit: Fit, draws: int, note: str = "") -> TestResult:
        """A chi-squared or G statistic; skipped where nothing could be tested. Draws of probability 0 break a
        rule, whatever the statistic says.
        """
        note = "; ".join(part for part in (fit.note, note) if part)
        if fit.dof == 0 and not fit.forbidden:
            return self._result(what, None, None, None, draws, skipped=True, note=note)
        law: Law = "binomial" if fit.dof == 1 else "chi-squared"
        sensitivity = Sensitivity(law, "total variation", draws, fit.dof, fit.mass)
        return self._result(
            what, fit.statistic, fit.dof, fit.p_value, draws, sensitivity, bool(fit.forbidden), note=note
        )

    def mean(
        self, what: str, mean: float, expected: float, deviation: float, draws: int, effect: str
    ) -> TestResult:
        """A mean of many draws, one of which has the known `deviation` > 0: two-sided z test."""
        error = deviation / math.sqrt(draws)
        z = (mean - expected) / error
        p_value = 2 * laws.normal_sf(abs(z))
        return self._result(what, z, None, p_value, draws, Sensitivity("normal", effect, draws, scale=error))

    def largest(self, what: str, z: float, tries: int, draws: int, effect: str, note: str) -> TestResult:
        """The z of largest size of `tries` sums of `draws` terms of variance 1 or more: Bonferroni's p."""
        p_value = min(1.0, tries * 2 * laws.normal_sf(abs(z)))
        sensitivity = Sensitivity("normal", effect, draws, scale=draws**-0.5, tries=tries)
        return self._result(what, z, None, p_value, draws, sensitivity, note=note)

    def events(
        self, what: str, seen: int, draws: int, mass: float, effect: str, note: str = ""
    ) -> TestResult:
        """`seen` events of probability `mass` each: exact two-sided binomial test (twice the smaller
        tail).
        """
        p_value = laws.binomial_two_sided(seen, draws, mass)
        sensitivity = Sensitivity("binomial", effect, draws, scale=mass)
        text = f"{seen} seen, {draws * mass:.4g} expected" + (f"; {note}" if note else "")
        return self._result(what, float(seen), None, p_value, draws, sensitivity, note=text)

    def at_most(
        self, what: str, seen: int, draws: int, bound: float, effect: str, note: str = ""
    ) -> TestResult:
        """`seen` events of which the expected number is `bound`: p = bound / seen, by Markov's inequality.

        Valid however the events depend on each other, which overlapping windows do.
        """
        p_value = min(1.0, bound / seen) if seen else 1.0
        text = f"{seen} seen, {bound:.2g} expected" + (f"; {note}" if note else "")
        sensitivity = Sensitivity("markov", effect, draws, scale=bound)
        return self._result(what, float(seen), None, p_value, draws, sensitivity, note=text)

    def rule(self, what: str, broken: bool, draws: int, note: str = "", effect: str = "") -> TestResult:
        """A rule that a right sampler never breaks; no chance, no p-value.

        `note` is kept when it is broken.
        """
        sensitivity = Sensitivity("zero", effect, draws) if effect else None
        return self._result(what, None, None, None, draws, sensitivity, broken, note=note if broken else "")

    def skip(self, why: str) -> TestResult:
        return self._result("", None, None, None, 0, skipped=True, note=why)
