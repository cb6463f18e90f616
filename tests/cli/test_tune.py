"""`fsample tune` without a GPU: what it refuses, and the table of a run that a fake timer measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsample_cli.measure import tuning
from fsample_cli.measure.timing import Call, WallStopwatch
from fsample_cli.records import Record
from fsample_cli.reporters import render
from fsample_cli.workloads import Workload
from fsample_kernels import tables
from tests.cli.conftest import Fsample

FAST = {"bv": 128, "rows0": 64, "rows1": 0, "bd": 64, "box": 16, "stages": 8, "in_flight": 1}


def test_without_a_gpu_it_says_so_and_writes_nothing(fsample: Fsample, tmp_path: Path) -> None:
    done = fsample("tune", "--emit-table", tmp_path / "t.json")
    assert done.code == 2 and "--from" in done.error and "GPU" in done.error
    assert not (tmp_path / "t.json").exists()


def test_the_record_and_the_table_are_two_files(fsample: Fsample, tmp_path: Path) -> None:
    done = fsample("tune", "--emit-table", tmp_path / "t.json", "--output", tmp_path / "t.json")
    assert done.code == 2 and "--output and --emit-table must be different files" in done.error


class FakeStopwatch(WallStopwatch):
    """Every call really happens; its time is what the table of times says of the candidate called."""

    def __init__(self, times: list[float]) -> None:
        super().__init__()
        self.times = times

    def time(self, call: Call, iteration: int) -> None:
        call(iteration)
        self._samples.append(self.times[(len(self._samples) + iteration - 1) % len(self.times)])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Record:
    """A run over two batch sizes on the CPU: every candidate is the library's own call, gated as such."""
    known: dict[str, Any] = {"built-in": (None, None), "a": (None, None), "b": (None, None)}
    by_batch = iter([[100.0, 99.5, 120.0], [100.0, 120.0, 90.0]])
    monkeypatch.setattr(tuning, "choices", lambda architecture: known)
    monkeypatch.setattr(tuning, "make_stopwatch", lambda timer: FakeStopwatch(next(by_batch)))
    record = tuning.measure(
        Workload("custom", 300, 16, "fp32"), (4, 8), timer="auto", warmup=1, iterations=4, cold=False, seed=0,
        command="fsample tune", stage=lambda text: None, tick=lambda: None, where="cpu",
    )  # fmt: skip
    assert record.settings["problems"] == []
    named = {"built-in": (None, None), "a": ("unfused", None), "b": ("hopper", FAST)}
    settings = dict(record.settings) | {
        "architecture": "sm_90", "candidates": {k: {"choice": c, "config": d} for k, (c, d) in named.items()}
    }  # fmt: skip
    rows = tuple(replace(row, implementation="hopper") for row in record.results)  # as on a GPU
    return Record("bench", record.command, record.environment, record.workload, rows, settings)


def test_the_fastest_is_written_unless_the_built_in_one_is_as_fast(
    measured: Record, fsample: Fsample, tmp_path: Path
) -> None:
    medians = {(row.batch, row.sampler): row.median_us for row in measured.results}
    assert medians[4, "a"] == 99.5 and medians[8, "b"] == 90.0 and medians[8, "built-in"] == 100.0
    saved, table = tmp_path / "run.json", tmp_path / "table.json"
    saved.write_text(render(measured, "json"), encoding="utf-8")
    done = fsample("tune", "--from", saved, "--emit-table", table)
    assert done.code == 0 and "2 entries" in done.err, done.err
    first, second = tables.read(table)
    assert first == tables.Entry(
        "sm_90", 300, 16, "float32", 4, "hopper", None
    )  # half a percent is no reason
    assert second == tables.Entry("sm_90", 300, 16, "float32", 8, "hopper", FAST)
    written = json.loads(table.read_text())
    assert written["entries"][1]["built_in_us"] == 100.0 and written["measured"]["commit"]
    assert fsample("tune", "--from", saved, "--emit-table", table).code == 2  # it is there already
    for option, value in (("--output", tmp_path / "out.json"), ("--preset", "gpt2"), ("--format", "json")):
        done = fsample("tune", "--from", saved, "--emit-table", tmp_path / "new.json", option, value)
        assert done.code == 2 and f"--from and {option} exclude each other" in done.error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "table.json"]
    assert fsample("tune", "--from", saved, "--emit-table", table, "--force", "-q").code == 0


def test_a_record_of_another_command_makes_no_table(
    measured: Record, fsample: Fsample, tmp_path: Path
) -> None:
    saved = tmp_path / "run.json"
    settings = {k: v for k, v in measured.settings.items() if k != "candidates"}
    other = Record("bench", "fsample bench", None, measured.workload, measured.results, settings)
    saved.write_text(render(other, "json"), encoding="utf-8")
    done = fsample("tune", "--from", saved, "--emit-table", tmp_path / "t.json")
    assert done.code == 2 and "one of `fsample tune`" in done.error
    assert fsample("tune", "--from", tmp_path / "none.json", "--emit-table", tmp_path / "t.json").code == 2


def test_a_tampered_record_makes_no_table_and_a_failed_write_leaves_the_old_one(
    measured: Record, fsample: Fsample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, table = tmp_path / "run.json", tmp_path / "t.json"
    settings = dict(measured.settings) | {
        "candidates": {"built-in": {"choice": None, "config": None}, "b": []}
    }
    saved.write_text(render(replace(measured, settings=settings), "json"), encoding="utf-8")
    done = fsample("tune", "--from", saved, "--emit-table", table)
    assert done.code == 2 and "a choice and a config of 'b', got []" in done.error and not table.exists()
    whole = render(measured, "json")
    for text, words in (
        ("[" * 100_000, "is not JSON"),
        (whole.replace('"median_us": 90.0', '"median_us": -90.0'), "median_us must be above 0, got -90.0"),
    ):
        saved.write_text(text, encoding="utf-8")
        done = fsample("tune", "--from", saved, "--emit-table", table)
        assert done.code == 2 and words in done.error and not table.exists()
    saved.write_text(whole, encoding="utf-8")
    table.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    done = fsample("tune", "--from", saved, "--emit-table", table, "--force")
    assert done.code == 2 and f"--emit-table {table} cannot be written: No space" in done.error
    assert table.read_text() == "old"
