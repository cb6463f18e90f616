"""The audit that `make tables` writes into a page, from records as `verify` stores them."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from fsample_cli.records import Record
from tests.cli.conftest import Fsample

ARGUMENTS = ("verify", "--test", "rows,tails,range,noise", "--draws", 2000, "--device", "cpu", "-q")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "profiles")
    return importlib.import_module("tables")


def test_an_audit_of_two_runs_is_one_table(fsample: Fsample, tables: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "h200"
    folder.mkdir()
    runs = {"ours": ("fused:grouped,fused:element:exact", 0),
            "others": ("multinomial-eager,fi2,tests.cli.perfect:past_the_end", 1)}  # fmt: skip
    records: dict[Path, Record] = {}
    for name, (samplers, code) in runs.items():
        file = folder / f"2026-01-31-abc1234-verify-all-{name}.json"
        done = fsample(*ARGUMENTS, "--sampler", samplers, "-o", file)
        assert done.code == code, done.err
        records[file] = Record.from_dict(json.loads(file.read_text()))
    text = tables.audit(records, "h200", "verify-all", page=tmp_path / "README.md")
    lines = text.splitlines()
    assert lines[0] == "| sampler | rows | tails | range | noise |"
    assert lines[2:8] == [
        "| fused:grouped | pass | pass | pass | – |",
        "| fused:element:exact | pass | pass | pass | – |",
        "| multinomial-eager | pass | pass | pass | – |",
        "| fi2 | – | – | – | – |",
        "| tests.cli.perfect:past_the_end | **fail** | **fail** | **fail** | – |",
        "| definition | – | – | – | pass |",
    ]
    failures = [line for line in lines if line.startswith("- ")]
    assert len(failures) == 3 and "tests.cli.perfect:past_the_end, range" in failures[-1]
    assert "ids outside" in failures[-1]
    for name in runs:  # each run says how much it drew, what that shows, and how long it took
        said = (
            lines[-1].split(f"[{name}](h200/2026-01-31-abc1234-verify-all-{name}.json): ")[1].split("; ")[0]
        )
        assert said.startswith("commit ") and ", level quick, alpha 0.01, at most " in said
        assert "a tail that is missing shows up to gap 13, " in said and said.rstrip(".").endswith(" s")
    file, record = next(iter(records.items()))
    stopped = replace(
        record, settings={**record.settings, "unfinished": "stopped by SIGTERM during x: tails"}
    )
    assert "unfinished: stopped by SIGTERM" in tables.audit(
        {file: stopped}, "h200", "verify-all", page=folder
    )
    place = tables.PLACE.search("<!-- audit h200 verify-all -->\nold\n<!-- end -->")
    filled = tables.fill(place, records, tmp_path / "README.md")
    assert filled == f"<!-- audit h200 verify-all -->\n\n{text}\n<!-- end -->"
    assert tables.fill(place, {}, tmp_path / "README.md") == "<!-- audit h200 verify-all -->\n<!-- end -->"
    ours, others = records
    environment = records[ours].environment
    assert environment is not None
    later = replace(
        records[ours], environment=replace(environment, commit="f" * 40), results=records[ours].results[:1]
    )
    both = {folder / "2026-02-01-fffffff-verify-all-again.json": later, **records}
    combined = tables.audit(both, "h200", "verify-all", page=folder)
    assert "| fused:grouped | pass | pass | pass | – |" in combined  # rows of the newer run, the others older
    assert "[again](" in combined
    assert "| fused:element:exact | pass | pass | pass | – |" in combined and "past_the_end" in combined
    deep = replace(records[others], settings={**records[others].settings, "level": "deep"})
    right = replace(deep, results=tuple(replace(r, verdict="pass") for r in deep.results))
    environment = replace(environment, commit="f" * 40)
    newer = {
        folder / "2026-02-01-fffffff-verify-all-passes.json": replace(
            right, settings=records[others].settings, environment=environment
        )
    }
    assert "**fail**" not in tables.audit({**newer, **records}, "h200", "verify-all", page=folder)
    older = folder / "2026-01-31-abc1234-verify-all-deep.json"
    levels = tables.audit({**newer, older: deep}, "h200", "verify-all", page=folder)
    assert "past_the_end | **fail** |" in levels  # deep, of an older commit, saw it
    shallow = [r for r in records[ours].results if not (r.algorithm == "grouped" and "gap 13" in r.case)]
    few = replace(records[ours], results=tuple(shallow))
    said = tables.audit({ours: few}, "h200", "verify-all", page=folder)
    assert re.search(r"shows up to gap 13, of fused:grouped up to \d+ \([\d,]+ draws\), ", said)
    assert tables.audit(records, "cpu", "verify-all", page=folder) == ""
