"""The table of faults in CONTRIBUTING.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_test_that_the_table_of_faults_names_is_there() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    written = set(re.findall(r"def (test_\w+)\(", source))
    table = (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Known faults")[2]
    named = set(re.findall(r"\btest_\w+", table))
    assert len(named) > 40 and named <= written, sorted(named - written)
