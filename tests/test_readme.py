"""The pages keep what they promise: their Python runs, their links lead somewhere, their records are read."""

from __future__ import annotations

import importlib
import json
import re
from functools import partial
from pathlib import Path

import pytest

from fsample_cli.records import Record

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "profiles/README.md", "kernels/README.md")
RECORDS = sorted((ROOT / "profiles").glob("*/*.json"))
with_records = pytest.mark.skipif(not RECORDS, reason="a source distribution carries no records")


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        # the code generator has tests of its own; here it is the graph that must be whole
        exec(block.replace("fullgraph=True", 'fullgraph=True, backend="eager"'), names)
    assert len(json.loads(capsys.readouterr().out)) == 4


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_of_the_repository(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link and "<" not in link]
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert not missing


def test_the_map_of_the_library_lists_every_file() -> None:
    text = (ROOT / "kernels/README.md").read_text(encoding="utf-8")
    files = (ROOT / "kernels/fsample_kernels").glob("**/*.py")
    names = [str(file.relative_to(ROOT / "kernels")) for file in files if file.name != "__init__.py"]
    assert [name for name in sorted(names) if f"]({name})" not in text] == []


@with_records
def test_tables_and_outputs_are_what_make_tables_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "profiles")
    monkeypatch.chdir(ROOT)
    tables = importlib.import_module("tables")
    records = tables.load()
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.PLACE.sub(partial(tables.fill, records=records, page=page), text) == text, page


@with_records
def test_records_are_small_readable_and_of_a_named_commit() -> None:
    for file in RECORDS:
        assert file.stat().st_size < 3_000_000, file
        record = Record.from_dict(json.loads(file.read_text(encoding="utf-8")), file.name)
        assert record.environment is not None and record.environment.commit, file
        assert "+changes" not in record.environment.commit, file
