"""A run's results for people: each row of the workload, then one line a test, the worst case speaking for
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsample_cli.results import VerifyResult

SHOWN_WHOLE = "rows"


def condense(results: Sequence[VerifyResult]) -> list[VerifyResult]:
    """The row tests as they are, and per (test, sampler) the result closest to failing, with how many
    there were.
    """
    groups: dict[tuple[str, str, str | None], list[VerifyResult]] = {}
    lines: list[VerifyResult] = []
    for result in results:
        if result.test == SHOWN_WHOLE:
            lines.append(result)
        else:
            groups.setdefault((result.test, result.sampler, result.algorithm), []).append(result)
    return lines + [_worst(group) for group in groups.values()]


def failures(results: Sequence[VerifyResult]) -> list[VerifyResult]:
    return [result for result in results if result.verdict == "fail"]


def _worst(group: Sequence[VerifyResult]) -> VerifyResult:
    worst = min(group, key=_closeness)
    failed = len(failures(group))
    if len(group) == 1:
        return worst
    seconds = round(sum(result.seconds or 0.0 for result in group), 4)
    draws = sum({result.case.rpartition(" ")[0]: result.draws for result in group}.values())
    if failed:
        note = f"{worst.case}: {worst.note}" if worst.note else ""
        return replace(
            worst, case=f"{failed}/{len(group)} fail: {worst.case}", note=note, draws=draws, seconds=seconds
        )
    case = f"all {len(group)}" if worst.p_value is None else f"worst of {len(group)}: {worst.case}"
    return replace(worst, case=case, note="", draws=draws, seconds=seconds)


def _closeness(result: VerifyResult) -> tuple[bool, bool, float]:
    """Smallest for the result that most deserves to be seen: failed rules, then failed and small p-values."""
    broken = result.verdict == "fail" and result.p_value is None
    p = result.p_adjusted if result.p_adjusted is not None else 2.0
    raw = result.p_value if result.p_value is not None else 1.0
    return (result.verdict != "fail", not broken, p + 1e-3 * raw)
