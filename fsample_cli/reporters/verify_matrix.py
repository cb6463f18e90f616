"""The audit at a glance: samplers down, tests across, from the results of a verify record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsample_cli.reporters.columns import sampler
from fsample_cli.results import VerifyResult

DEFINITION = "definition"  # `exactness.noise_words`, which reporters do not import

WORDS = {"pass": "pass", "fail": "**fail**", "skipped": "–"}
ORDER = ("skipped", "pass", "fail")


def verify_matrix(results: Sequence[VerifyResult]) -> list[list[str]]:
    """Rows of cells, the heading first: one row per sampler, a cell the worst verdict of a test.

    What is tested of the definition that samplers share has a row of its own, the last.
    """
    tests = list(dict.fromkeys(result.test for result in results))
    names = sorted(dict.fromkeys(sampler(result) for result in results), key=lambda name: name == DEFINITION)
    rows = [["sampler", *tests]]
    shared = {result.test for result in results if result.sampler == DEFINITION}
    for name in names:
        cells = []
        for test in tests:
            mine = _cell(result for result in results if sampler(result) == name and result.test == test)
            other = (name == DEFINITION) != (test in shared)
            cells.append(mine or (WORDS["skipped"] if other else ""))
        rows.append([name, *cells])
    return rows


def _cell(results: Iterable[VerifyResult]) -> str:
    verdicts = [result.verdict for result in results]
    return WORDS[max(verdicts, key=ORDER.index)] if verdicts else ""
