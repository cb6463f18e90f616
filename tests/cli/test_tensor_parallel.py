"""`--tp`: ranks that start, agree and end together; times of the slowest; the battery over a split head."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsample_cli import launch
from fsample_cli.errors import FsampleError, MissingError, UsageError
from fsample_cli.measure.team import lost_ranks, team_of
from fsample_cli.shards import check_shards, rows_of
from fsample_kernels.distributed import RankError
from tests.cli import rank_jobs
from tests.cli.conftest import ROOT, Fsample
from tests.kernels.ranks import LOST, run_ranks

SHAPE = ("--device", "cpu", "--vocab", 1000, "--hidden", 16, "--quiet", "--format", "json")


def test_bench_on_two_ranks(shell: Fsample) -> None:
    names = "fused:candidates,fused:log_mass,gemm,shard,one-rank,multinomial-eager,unfused,fi2"
    done = shell(
        "bench", "--tp", 2, *SHAPE, "--sampler", names, "--batch", "1,8,64", "--iterations", 7, "--runs", 2,
        "--warmup", 2,
        "--baseline", "multinomial-eager",
    )  # fmt: skip
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["workload"]["tp"] == 2 and data["settings"]["ranks"] == 2
    assert (
        data["settings"]["iterations"] == 7
        and data["settings"]["runs"] == 2
        and "rank 0" in data["settings"]["counts"]
    )
    assert "all_gather(hidden @ weight_shard.T)" in data["settings"]["samplers"]["multinomial-eager"]
    rows = {(row["sampler"], row["algorithm"], row["batch"]): row for row in data["results"]}
    assert len(rows) == 24
    for (name, _, batch), row in rows.items():
        if name == "fi2":
            assert row["median_us"] is None and "unavailable" in row["note"]
            continue
        assert len(row["samples_us"]) == row["iterations"] == 14
        assert row["minimum_us"] == min(row["samples_us"])
        assert row["ideal_us"] == rows["one-rank", "grouped", batch]["median_us"] / 2
        assert row["fastest_rank_us"] <= row["median_us"] and row["skew_us"] >= 0
        alone = rows["shard", "grouped", batch]["median_us"]
        assert row["exchange_us"] == (row["median_us"] - alone if name == "fused" else None)
        if name == "multinomial-eager":
            assert row["speedup"] == 1.0
    assert rows["fused", "log_mass", 8]["implementation"] == "reference+log_mass"
    assert rows["fused", "candidates", 8]["implementation"] == "reference+candidates"


def test_verify_on_three_ranks(shell: Fsample) -> None:
    """Shards of 384, 384 and 232 ids; exchanged candidates are held to the oracle's tokens as well."""
    done = shell("verify", "--tp", 3, *SHAPE, "--test", "rows,pathwise", "--draws", 2000)
    assert done.code == 0, done.out + done.err
    rows = json.loads(done.out)["results"]
    assert {row["verdict"] for row in rows if row["test"] == "rows"} == {"pass"}
    paths = {row["algorithm"]: row["verdict"] for row in rows if row["test"] == "pathwise"}
    assert paths == {"candidates": "pass", "log_mass": "skipped", "element": "pass", "online": "skipped"}


def test_the_first_line_says_that_ranks_start(shell: Fsample) -> None:
    """Even where a rank then refuses the arguments, which takes seconds."""
    done = shell("bench", "--tp", 2, "--device", "cpu", "--vocab", 1000)
    assert done.code == 2 and done.err.startswith("fsample: starting 2 ranks\n")


def test_ranks_that_torchrun_started_are_joined(child_env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "fsample_cli", "verify", "--tp", "2", *map(str, SHAPE), "--test", "rows", "--draws", "200"]
    done = subprocess.run(
        [*command, *words], env=child_env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["workload"]["tp"] == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("bench", "--sampler", "somewhere:function"),
            "does not run on several ranks; choose from fused, gemm",
        ),
        (("bench", "--sampler", "fused+store"), "--sampler must be one of fused, gemm, shard, one-rank"),
        (("verify", "--self-test"), "--self-test runs on one rank, got --tp 2"),
    ],
)
def test_what_ranks_cannot_do_is_one_line(shell: Fsample, arguments: tuple[str, ...], message: str) -> None:
    done = shell(*arguments, "--tp", 2, *SHAPE)
    assert done.code == 2 and message in done.error


def test_bench_refuses_ranks_without_a_row_of_the_head(shell: Fsample) -> None:
    check_shards(129, 2)
    check_shards(300, 3)
    with pytest.raises(UsageError, match="got 4 ranks for V = 300; try --tp 3"):
        check_shards(300, 4)
    done = shell("bench", "--tp", 2, "-q", "--vocab", 128, "--hidden", 8)
    assert done.code == 2 and "got 2 ranks for V = 128; leave out --tp" in done.error


def test_the_slowest_rank_decides_and_counts_are_rank_0s() -> None:
    slow, other = run_ranks(2, rank_jobs.time_a_slow_rank)
    assert slow == other
    slowest, fastest, counts = slow
    assert counts == (2, 5) and len(slowest) == len(fastest) == 5
    assert min(slowest) > 20_000
    assert sorted(fastest)[2] < 20_000  # the median: a busy machine may hold up a rank for one call


def test_gathered_logits_are_the_whole_product() -> None:
    assert run_ranks(3, rank_jobs.gather_products) == [[True] * 4] * 3


def test_flashinfers_gather_is_in_the_compiled_graph() -> None:
    assert run_ranks(2, rank_jobs.compile_the_gather) == [[True] * 2] * 2


def test_a_sampler_runs_on_every_rank_or_on_none() -> None:
    assert run_ranks(3, rank_jobs.agree_on_notes) == [["", "no compiler"]] * 3


@pytest.mark.parametrize(
    "vocab, size", [(128_256, 2), (128_256, 8), (151_936, 2), (1000, 3), (3, 4), (50_257, 8)]
)
def test_shards_start_at_multiples_of_128_and_cover_the_vocabulary(vocab: int, size: int) -> None:
    parts = [rows_of(vocab, rank, size) for rank in range(size)]
    assert parts[0].start == 0 and parts[-1].stop == vocab
    assert all(a.stop == b.start for a, b in zip(parts, parts[1:], strict=False))
    assert all(part.start % 128 == 0 or part.start == part.stop for part in parts)


def script(text: str) -> list[str]:
    head = "import os, sys, time\nrank = int(os.environ['FSAMPLE_RANK'].split('/')[0])\n"
    return [sys.executable, "-c", head + text]


def test_a_rank_that_fails_ends_the_others_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    text = "if rank == 1:\n  print('fsample: out of paper', file=sys.stderr); sys.exit(2)\ntime.sleep(60)"
    with pytest.raises(FsampleError, match="rank 1 of 3 ended: out of paper"):
        launch.supervise(3, script(text))


def test_rank_0s_exit_code_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "END_S", 0.2)
    assert launch.supervise(2, script("sys.exit(0 if rank else 1)")) == 1
    assert launch.supervise(2, script("time.sleep(60) if rank else sys.exit(0)")) == 0


def test_the_others_may_end_by_themselves_after_rank_0(tmp_path: Path) -> None:
    """A profiler that holds them writes at their end what it saw."""
    done = tmp_path / "done"
    text = f"if rank == 1:\n  time.sleep(1); open({str(done)!r}, 'w').close()"
    assert launch.supervise(2, script(text)) == 0
    assert done.exists()


def test_another_number_of_ranks_than_torchruns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.place(2) is None and not launch.runs_here(2) and launch.runs_here(1)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    assert launch.place(4) == launch.Place(1, 4, 1, None)
    with pytest.raises(UsageError, match="torchrun started, 4, got 2"):
        launch.place(2)


def test_trace_on_two_ranks_writes_rank_0s(shell: Fsample, tmp_path: Path) -> None:
    chrome = tmp_path / "trace.json"
    done = shell(
        "trace", "--tp", 2, *SHAPE, "--sampler", "fused,gemm,multinomial-eager,fi2", "--batch", 4,
        "--chrome", chrome, "--iterations", 2, "--warmup", 1,
    )  # fmt: skip
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["workload"]["tp"] == 2 and "FlashInfer" in data["settings"]["notes"][0]
    stages = {(row["sampler"], row["algorithm"], row["stage"]) for row in data["results"]}
    assert {("fused", "candidates", "fused kernel"), ("gemm", None, "GEMM")} <= stages
    assert {("multinomial-eager", None, stage) for stage in ("GEMM", "sampler")} <= stages
    assert '"ph": "X"' in chrome.read_text()


def test_a_rank_that_dies_is_an_error_of_the_command() -> None:
    message, lost = run_ranks(2, rank_jobs.lose_a_rank)
    assert message.startswith("a rank was lost: ") and lost == LOST


@pytest.mark.parametrize("error", [RankError("rank 1 is gone"), torch.distributed.DistError("no peer")])
def test_what_a_lost_rank_raises_is_an_error_of_the_command(error: RuntimeError) -> None:
    with pytest.raises(FsampleError, match="a rank was lost: "), lost_ranks():
        raise error
    with pytest.raises(RuntimeError, match="^something else$"), lost_ranks():
        raise RuntimeError("something else")


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(MissingError, match="--tp 2 needs a GPU for each rank, found 1"):
        with team_of(launch.Place(1, 2, 1, "store"), "cuda"):
            pass
