"""Reports: golden text, nothing cut whatever the terminal says, files whole or not at all."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest

from fsample_cli.errors import InputError, OutputClosed
from fsample_cli.records import Record
from fsample_cli.reporters import Target, render, write_report, write_stdout
from fsample_cli.reporters.columns import COLUMNS
from fsample_cli.results import (
    BenchResult,
    CompareResult,
    DoctorResult,
    Environment,
    IoModelResult,
    ReplayResult,
    TraceResult,
    VerifyResult,
)
from fsample_cli.workloads import PRESETS

Shell = Callable[..., Any]

BIG = BenchResult(
    "multinomial-eager", None, "torch", 1024, "wall", 2, (123456.25, 234567.5), 179011.875, 123456.25,
    234567.5, 10**12, 10**15, 98765.4, 12.345, 101.25, 0.123,
)  # fmt: skip
FUSED = BenchResult(
    "fused", "grouped", "triton", 1, "wall", 2, (0.5, 1.5), 1.0, 0.6, 1.4, 8, 16, 0.25, 1.01, 4.0, 2.5
)
ABSENT = BenchResult(
    "fi2", None, "", 1, "wall", 0, (), None, None, None, None, None, None, None, None, None,
    note="FlashInfer is not installed: pip install flashinfer-python",
)  # fmt: skip
WORKLOAD = replace(PRESETS["cpu-small"].workload("fp32"), distribution="hidden N(0, 1)")
ENVIRONMENT = Environment(
    cpu="A CPU", torch="2.13.0", triton="3.6.0", commit="0123456789abcdef", date="2026-01-02"
)
RECORD = Record("bench", "fsample bench", ENVIRONMENT, WORKLOAD, (FUSED, BIG, ABSENT), {"timer": "wall"})

HEADING = [
    "cpu-small: V=32,000 D=512 fp32; hidden N(0, 1)",
    "A CPU, torch 2.13.0, triton 3.6.0, commit 0123456789ab, 2026-01-02",
    "timer=wall",
]


def test_table_golden() -> None:
    lines = render(RECORD, "table").splitlines()
    assert lines[:3] == HEADING
    assert lines[3].split() == "B sampler median us p10..p90 / GEMM / roof speed-up".split()
    assert lines[5].split() == ["1", "fused:grouped", "1.00", "0.600..1.40", "1.010", "4.000", "2.500"]
    assert lines[6].split() == [
        "1024",
        "multinomial-eager",
        "179,012",
        "123,456..234,568",
        "12.3",
        "101.2",
        "0.123",
    ]
    assert lines[7].split() == ["1", "fi2", "-", "-", "-", "-", "-"]
    assert lines[8] == "fi2: FlashInfer is not installed: pip install flashinfer-python"
    assert len(lines) == 9 and not any(line.endswith(" ") for line in lines)


def test_markdown_golden() -> None:
    row = replace(FUSED, sampler="a|b", algorithm=None)
    text = render(replace(RECORD, results=(row,)), "markdown")
    assert text.splitlines()[0] == "`fsample bench`"
    assert text.splitlines()[-3:] == [
        "| B | sampler | median us | p10..p90 | / GEMM | / roof | speed-up |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
        "| 1 | a\\|b | 1.00 | 0.600..1.40 | 1.010 | 4.000 | 2.500 |",
    ]


def test_csv_reads_back() -> None:
    frame = pandas.read_csv(io.StringIO(render(RECORD, "csv")))
    assert frame["median_us"].tolist()[:2] == [1.0, 179011.875] and frame["median_us"].isna()[2]
    assert frame["note"][2] == ABSENT.note
    assert set(frame["commit"]) == {"0123456789abcdef"} and "samples_us" not in frame.columns


ROWS: dict[str, Any] = {
    "bench": FUSED,
    "io-model": IoModelResult(**vars(BIG), predicted_speedup=1.05, predicted_speedup_simple=1.0625),
    "verify": VerifyResult("goodness of fit", "flat V=512 chi-squared", "fused", "element", "reference", 256,
                           255, 10**9, 12345.6, 500, 1e-12, 1.0, "pass"),
    "trace": TraceResult("fused kernel", "fused", "grouped", 256, "lm_head_sample", 25, 152345.0, 6093.8,
                         0.975),
    "compare": CompareResult("multinomial-eager", None, 1024, 1234567.0, 1.0, 1.05, 1.01, 1.07, "regression"),
    "replay": ReplayResult("fused", "grouped", 255, 0, 7, 151935, 149999, 0.0488, 3.99e-05, "member", 151934,
                           1.5, 3.99e-05, "group", "explained"),
    "doctor": DoctorResult("package", "flashinfer-python", "missing", "not installed", "pip install x"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in COLUMNS if kind in ROWS])
def test_every_kind_renders_in_every_format_and_typical_rows_fit_80_columns(kind: str) -> None:
    record = Record(kind, "fsample", ENVIRONMENT, WORKLOAD, (ROWS[kind],))
    for format in ("table", "json", "csv", "markdown"):
        assert render(record, format).endswith("\n")
    assert max(map(len, render(record, "table").splitlines())) <= 84


def test_a_long_text_wraps_inside_its_column_and_numbers_stay_whole() -> None:
    row = replace(ROWS["doctor"], detail="many words " * 30)
    lines = render(Record("doctor", "", None, None, (row,)), "table").splitlines()
    assert max(map(len, lines)) <= 80 and "\n".join(lines).count("many") == 30
    row = replace(ROWS["doctor"], detail="x" * 100)  # a path, a call: folded, not cut
    text = render(Record("doctor", "", None, None, (row,)), "table")
    assert max(map(len, text.splitlines())) <= 80 and text.count("x") == 101  # one in the remedy


def test_printed_presets_fit_80_columns(shell: Shell) -> None:
    for arguments in (("presets",), ("presets", "--hardware")):
        assert max(map(len, shell(*arguments).out.splitlines())) <= 80


TERMINALS = [
    {},
    {"COLUMNS": "20"},
    {"COLUMNS": "1"},
    {"COLUMNS": "x"},
    {"TERM": "dumb"},
    {"NO_COLOR": "1"},
    {"TERM": "xterm", "NO_COLOR": "1", "FORCE_COLOR": "1"},
]


@pytest.mark.parametrize("terminal", TERMINALS)
def test_nothing_is_cut_and_nothing_coloured_off_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: dict[str, str]
) -> None:
    for name in ("COLUMNS", "TERM", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in terminal.items():
        monkeypatch.setenv(name, value)
    write_report(RECORD, Target("table"))
    text = capsys.readouterr().out
    assert text == render(RECORD, "table")
    assert "179,012" in text and "\x1b" not in text and "\u2026" not in text


def test_a_whole_run_is_the_same_in_20_columns(shell: Shell) -> None:
    assert shell("presets", "--hardware", COLUMNS="20", TERM="dumb") == shell("presets", "--hardware")


def test_forced_colour_changes_colour_only(shell: Shell) -> None:
    plain = shell("presets", "--hardware")
    forced = shell("presets", "--hardware", FORCE_COLOR="1", COLUMNS="20", TERM="xterm")
    assert "\x1b[" in forced.out
    assert re.sub(r"\x1b\[[0-9;]*m", "", forced.out).split() == plain.out.split()


def test_an_ascii_stdout_still_gets_the_table(shell: Shell) -> None:
    done = shell("presets", PYTHONIOENCODING="ascii")
    assert done.code == 0 and done.out.isascii() and "151,936" in done.out and "?" not in done.out


def test_files_are_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    write_report(RECORD, Target("json", path))
    assert path.read_text(encoding="utf-8") == render(RECORD, "json")
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match="No space left on device"):
        write_report(replace(RECORD, results=()), Target("json", path))
    assert path.read_text(encoding="utf-8") == render(RECORD, "json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.json"]


def test_a_link_is_followed_and_a_device_written(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    write_report(RECORD, Target("json", link))
    assert link.is_symlink() and real.read_text(encoding="utf-8") == render(RECORD, "json")
    write_report(RECORD, Target("json", Path("/dev/null")))
    assert Path("/dev/null").is_char_device()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_closed_pipe_is_told_apart(child_env: dict[str, str]) -> None:
    assert issubclass(OutputClosed, Exception) and callable(write_stdout)
    source = "from fsample_cli.reporters import write_stdout\nfor _ in range(9999): write_stdout('x' * 999)"
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        env=child_env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert "OutputClosed" in error and "BrokenPipeError" not in error.replace("OutputClosed", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_behind_stdout_is_one_line(child_env: dict[str, str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fsample_cli", "presets"],
            env=child_env, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "fsample: stdout cannot be written: No space left on device; free it, run again\n"


def test_closed_streams_are_no_bug_and_keep_apart(child_env: dict[str, str]) -> None:
    """`>&-` loses the result and nothing else; `2>&-` puts no error line on stdout."""
    fsample = f"{sys.executable} -m fsample_cli"
    command = f"{fsample} presets >&- && {fsample} presets --preset nope 2>&-"
    done = subprocess.run(["bash", "-c", command], env=child_env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
