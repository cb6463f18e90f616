"""The audit at a glance: samplers down, tests across, from the results of a verify record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsample_cli.reporters.columns import sampler
from fsample_cli.results import VerifyResult

WORDS = {"pass": "pass", "fail": "**fail**", "skipped": "–"}
ORDER = ("skipped", "pass", "fail")


def verify_matrix(results: Sequence[VerifyResult]) -> list[list[str]]:
    """Rows of cells, the heading first: one row per sampler, a cell the worst verdict of a test."""
    tests = list(dict.fromkeys(result.test for result in results))
    names = list(dict.fromkeys(sampler(result) for result in results))
    rows = [["sampler", *tests]]
    for name in names:
        mine = [result for result in results if sampler(result) == name]
        rows.append([name, *(_cell(result for result in mine if result.test == test) for test in tests)])
    return rows


def _cell(results: Iterable[VerifyResult]) -> str:
    verdicts = [result.verdict for result in results]
    return WORDS[max(verdicts, key=ORDER.index)] if verdicts else ""
