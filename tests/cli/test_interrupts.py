"""`verify` and `bench` stopped by a signal: what had ended is written, and marked."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsample_cli import interrupts
from fsample_cli.exactness import session
from fsample_cli.measure import sweep
from fsample_cli.records import Record
from tests.cli.conftest import Fsample

SIGNALS = [(signal.SIGINT, "SIGINT", 130), (signal.SIGTERM, "SIGTERM", 143)]
VERIFY = (
    "verify",
    "--device",
    "cpu",
    "--sampler",
    "fused:grouped,fused:element",
    "--test",
    "range,zero-mass",
)
BENCH = (
    "bench", "--device", "cpu", "--vocab", 512, "--hidden", 64, "--batch", "1,2,3", "--sampler",
    "fused:grouped", "--warmup", 1, "--iterations", 2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """A shell starts what it puts into the background deaf to Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, int, int], None]:
    """stop_at(module, function, call, signal): this process gets the signal when that call begins."""

    def arrange(module: Any, name: str, call: int, number: int) -> None:
        whole, calls = getattr(module, name), iter(range(100))

        def stopped(*values: Any, **named: Any) -> Any:
            if next(calls) == call:
                os.kill(os.getpid(), number)
            return whole(*values, **named)

        monkeypatch.setattr(module, name, stopped)

    return arrange


@pytest.mark.parametrize(("number", "name", "code"), SIGNALS)
def test_verify_keeps_the_tests_that_had_ended(
    fsample: Fsample, stop_at: Any, tmp_path: Path, number: int, name: str, code: int
) -> None:
    stop_at(session, "_one_test", 3, number)  # the second test of the second sampler
    path = tmp_path / "verify.json"
    done = fsample(*VERIFY, "--output", path)
    assert done.code == code, done.err
    record = Record.from_dict(json.loads(path.read_text()))
    tested = {(row.algorithm, row.test) for row in record.results}
    assert tested == {("grouped", "zero-mass"), ("grouped", "range"), ("element", "zero-mass")}
    assert all(row.verdict == "pass" and row.draws > 0 for row in record.results)
    unfinished = f"stopped by {name} during fused:element: range"
    assert record.settings["unfinished"] == unfinished
    assert f"fsample: verify: unfinished: {unfinished}" in done.err
    assert "fsample: fused:grouped: zero-mass took " in done.err


@pytest.mark.parametrize(("number", "name", "code"), SIGNALS)
def test_verify_stopped_before_a_test_has_ended_writes_nothing(
    fsample: Fsample, stop_at: Any, tmp_path: Path, number: int, name: str, code: int
) -> None:
    stop_at(session, "_one_test", 0, number)
    done = fsample(*VERIFY, "--output", tmp_path / "verify.json")
    assert done.code == code and list(tmp_path.iterdir()) == [], name


@pytest.mark.parametrize(("number", "name", "code"), SIGNALS)
def test_bench_keeps_the_batches_that_had_ended(
    fsample: Fsample, stop_at: Any, tmp_path: Path, number: int, name: str, code: int
) -> None:
    stop_at(sweep, "_one_batch", 2, number)
    path = tmp_path / "bench.json"
    done = fsample(*BENCH, "--output", path)
    assert done.code == code, done.err
    record = Record.from_dict(json.loads(path.read_text()))
    assert [row.batch for row in record.results] == [1, 2]
    assert f"stopped by {name}" in str(record.settings["unfinished"])
    assert f"fsample: bench: unfinished: stopped by {name}" in done.err


def test_a_finished_run_is_not_marked_and_leaves_the_handler_as_it_was(
    fsample: Fsample, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    path = tmp_path / "verify.json"
    assert fsample(*VERIFY, "--output", path).code == 0
    assert "unfinished" not in json.loads(path.read_text())["settings"]
    assert signal.getsignal(signal.SIGTERM) == before
    with interrupts.terminable(), pytest.raises(interrupts.Terminated):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("number", "name", "code"), SIGNALS)
def test_a_signal_inside_a_class_body_of_an_import_is_no_traceback(
    fsample: Fsample, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, name: str, code: int
) -> None:
    """Until Python 3.12 `__set_name__` turns it into the cause of a RuntimeError."""
    (tmp_path / "stopped.py").write_text(
        "import os\n"
        "class Field:\n"
        "    def __set_name__(self, owner, name):\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "class Owner:\n"
        "    field = Field()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "stopped", raising=False)
    monkeypatch.setattr(session, "_one_test", lambda *_: importlib.import_module("stopped"))
    assert fsample(*VERIFY).code == code, name
    done = fsample("verify", "--sampler", f"{tmp_path / 'stopped.py'}:draw", "--device", "cpu")
    assert done.code == code and done.out == "", name  # importing a user's file has an error of its own
