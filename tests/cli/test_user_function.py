"""A user's own sampler that fails: at import before anything runs, in a call without the others' results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsample_cli import samplers
from fsample_cli.errors import UsageError
from tests.cli.conftest import Fsample

MINE = """
import torch
CALLS = 0
def right(hidden, weight, temperature, seed):
    p = torch.softmax(hidden.double() @ weight.double().T / temperature, 1)
    u = torch.rand(len(p), 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.searchsorted(p.cumsum(1), u).clamp(max=p.shape[1] - 1)[:, 0]
def by_row(hidden, weight, temperature, seed):
    # row r has the noise of seed + r: that of row r + 1 one seed before
    p = torch.softmax(hidden[:1].double() @ weight.double().T / temperature, 1)[0].cumsum(0)
    counters = (seed + torch.arange(len(hidden))) * 0x5851F42D4C957F2D
    for shift in (29, 32, 30):
        counters = (counters ^ (counters >> shift & 0xFFFFFFFF)) * 0x2545F4914F6CDD1D
    return torch.searchsorted(p, (counters >> 11 & (1 << 52) - 1) / 2.0**52).clamp(max=len(p) - 1)
def odd(hidden, weight, temperature, seed):
    # seeds 2 n and 2 n + 1 are one
    return right(hidden, weight, temperature, seed | 1)
def at_once(hidden, weight, temperature, seed):
    raise ValueError("boom\\nand more")
def large_batches(hidden, weight, temperature, seed):
    if len(hidden) == 8:
        raise KeyError("eight")
    return right(hidden, weight, temperature, seed)
def no_tensor(hidden, weight, temperature, seed):
    return right(hidden, weight, temperature, seed).tolist()
def unseeded(hidden, weight, temperature, seed):
    return torch.multinomial(torch.softmax(hidden.double() @ weight.double().T / temperature, 1), 1)
def later(hidden, weight, temperature, seed):
    global CALLS
    CALLS += len(hidden) == 5
    if CALLS > 36:  # at B = 5 one call to prepare, 32 of the gate, one to warm up; in the timed section
        raise ValueError("boom")
    return right(hidden, weight, temperature, seed)
class Stop:
    def __set_name__(self, owner, name):  # as inside an import: until Python 3.12 it leaves as a RuntimeError
        raise KeyboardInterrupt
def stopped(hidden, weight, temperature, seed):
    if len(hidden) == 8:
        type("Module", (), {"field": Stop()})
    return right(hidden, weight, temperature, seed)
"""
LINE = MINE.splitlines().index('    raise ValueError("boom\\nand more")') + 1
BENCH = ("bench", "--device", "cpu", "--vocab", 600, "--hidden", 16, "--iterations", 4, "--warmup", 1, "-q")
VERIFY = ("verify", "--device", "cpu", "-q")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "us.py"
    path.write_text(MINE)
    return path


def test_verify_fails_the_one_that_raises_and_keeps_the_rest(
    fsample: Fsample, mine: Path, tmp_path: Path
) -> None:
    names = f"{mine}:right,{mine}:at_once,{mine}:large_batches"
    out = tmp_path / "verify.json"
    asked = ("--test", "rows,range", "--draws", 400, "--batch", "4,8", "--sampler", names, "--output", out)
    done = fsample(*VERIFY, *asked)
    assert done.code == 1 and done.err == "", done.err
    rows = json.loads(out.read_text())["results"]
    by = {name: [row for row in rows if row["sampler"] == f"{mine}:{name}"] for name in
          ("right", "at_once", "large_batches")}  # fmt: skip
    assert {row["verdict"] for row in by["right"]} == {"pass"}
    assert [(row["case"], row["verdict"]) for row in by["at_once"]] == [
        ("B=4 call", "fail"), ("B=8 call", "fail"), ("call", "fail")
    ]  # fmt: skip
    assert by["at_once"][0]["note"] == f"{mine}:at_once raised ValueError: boom (us.py:{LINE})"
    verdicts = {row["case"]: row["verdict"] for row in by["large_batches"] if row["test"] == "rows"}
    assert verdicts == {**{f"B=4 row {k}": "pass" for k in range(4)}, "B=8 call": "fail"}


@pytest.mark.parametrize(
    ("function", "broken"),
    [("right", set()), ("by_row", {"equal: seed+1 row-1"}), ("odd", {"equal: seed+1"})],
)
def test_neighbouring_seeds_reach_the_function(
    fsample: Fsample, mine: Path, tmp_path: Path, function: str, broken: set[str]
) -> None:
    out = tmp_path / "verify.json"
    done = fsample(*VERIFY, "--test", "independence", "--sampler", f"{mine}:{function}", "--output", out)
    assert done.code == bool(broken), done.err
    failed = {row["case"] for row in json.loads(out.read_text())["results"] if row["verdict"] == "fail"}
    assert failed >= broken and bool(failed) == bool(broken)


def test_verify_fails_one_that_returns_no_tensor_and_keeps_the_rest(
    fsample: Fsample, mine: Path, tmp_path: Path
) -> None:
    out = tmp_path / "verify.json"
    names = f"{mine}:right,{mine}:no_tensor"
    done = fsample(*VERIFY, "--test", "range", "--sampler", names, "--output", out)
    assert done.code == 1 and done.err == "", done.err
    rows = json.loads(out.read_text())["results"]
    assert [row["verdict"] for row in rows if row["sampler"].endswith("right")] == ["pass"] * 12
    [failed] = [row for row in rows if row["sampler"].endswith("no_tensor")]
    assert failed["verdict"] == "fail" and "must return a tensor of ids, got list" in failed["note"]


def test_a_signal_inside_one_stops_the_run_and_keeps_what_had_ended(
    fsample: Fsample, mine: Path, tmp_path: Path
) -> None:
    out = tmp_path / "bench.json"
    done = fsample(*BENCH, "--batch", "4,8", "--sampler", f"gemm,{mine}:stopped", "--output", out)
    assert done.code == 130, done.err
    assert "stopped by SIGINT" in json.loads(out.read_text())["settings"]["unfinished"]


def test_one_that_ignores_its_seed_fails_by_that_alone(fsample: Fsample, mine: Path) -> None:
    done = fsample(
        *VERIFY, "--test", "independence", "--sampler", f"{mine}:unseeded,{mine}:right", "--format", "json"
    )
    failed = [row for row in json.loads(done.out)["results"] if row["verdict"] == "fail"]
    assert done.code == 1 and [row["case"] for row in failed] == ["same call twice"]
    assert (
        failed[0]["sampler"].endswith("unseeded")
        and "the same seed must give the same ids" in failed[0]["note"]
    )


def test_bench_says_why_in_the_row_and_times_the_rest(fsample: Fsample, mine: Path, tmp_path: Path) -> None:
    names = f"gemm,{mine}:right,{mine}:at_once,{mine}:large_batches,{mine}:later"
    out = tmp_path / "bench.json"
    done = fsample(*BENCH, "--batch", "5,8", "--sampler", names, "--output", out)
    assert done.code == 0 and done.err == "", done.err
    rows = json.loads(out.read_text())["results"]
    timed = {(row["sampler"].rpartition(":")[2], row["batch"]): len(row["samples_us"]) for row in rows}
    notes = {(row["sampler"].rpartition(":")[2], row["batch"]): row["note"] for row in rows}
    assert {key for key, count in timed.items() if count == 4} == {
        ("gemm", 5), ("gemm", 8), ("right", 5), ("right", 8), ("large_batches", 5)
    }  # fmt: skip
    assert notes["at_once", 5] == f"unavailable: raised ValueError: boom (us.py:{LINE})"
    assert notes["large_batches", 8].startswith("unavailable: raised KeyError: 'eight'")
    assert notes["later", 5].startswith("unavailable: raised ValueError: boom")


def test_one_that_raises_alone_is_a_line_and_not_a_traceback(
    fsample: Fsample, mine: Path, tmp_path: Path
) -> None:
    done = fsample(*BENCH, "--sampler", f"{mine}:at_once", "--output", tmp_path / "bench.json")
    assert done.code == 2 and "at_once is unavailable: raised ValueError: boom" in done.error
    done = fsample("trace", *BENCH[1:], "--sampler", f"{mine}:at_once", "--chrome", tmp_path / "trace.json")
    assert done.code == 2 and "no sampler could be traced" in done.error and "ValueError: boom" in done.error


@pytest.mark.parametrize("command", [VERIFY, BENCH])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def draw(:\n", "SyntaxError"),
        ("import no_such_package\n", "No module named 'no_such_package' (broken.py:1); install what it"),
        ("import json.no_such_part\n", "No module named 'json.no_such_part'"),
        ("1 / 0\n", "ZeroDivisionError: division by zero (broken.py:1)"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line(
    fsample: Fsample,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[object, ...],
    text: str,
    words: str,
) -> None:
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # restores sys.path afterwards
    for name in (f"{tmp_path / 'broken.py'}:draw", "broken:draw"):
        done = fsample(*command, "--sampler", name)
        assert done.code == 2 and "must be importable, it raised" in done.error, done.error
        assert words in done.error, done.error


def test_a_missing_part_of_a_users_own_package_is_told_from_the_module_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "module.py").write_text("import ours.other\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="ours.module must be importable, it raised ModuleNotFoundError"):
        samplers.load("ours.module:draw")
    with pytest.raises(UsageError, match="no module 'ours.none'"):
        samplers.load("ours.none:draw")
