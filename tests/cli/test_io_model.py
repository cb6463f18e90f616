"""`fsample io-model`: predictions without a run, and the measured overhead beside them."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Fsample


def test_predictions_need_no_run_and_match_the_published_table(fsample: Fsample) -> None:
    done = fsample(
        "io-model", "--preset", "qwen3-8b", "--no-measure", "--batch", "1..256", "--format", "json"
    )
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["workload"]["dtype"] == "bf16"
    rows = {row["batch"]: row for row in data["results"] if row["sampler"] == "fused+store"}
    for batch, percent in {1: 0.05, 16: 0.78, 64: 3.13, 128: 6.25, 256: 12.5}.items():
        assert 100 * (rows[batch]["predicted_speedup_simple"] - 1) == pytest.approx(percent, abs=0.0051)
        assert rows[batch]["predicted_speedup"] == pytest.approx(
            rows[batch]["predicted_speedup_simple"], rel=1e-3
        )
        assert rows[batch]["measured_overhead"] is None and rows[batch]["samples_us"] == []


def test_the_default_on_a_cpu_is_not_to_measure(fsample: Fsample) -> None:
    done = fsample("io-model", "--device", "cpu", "--batch", 1)
    assert done.code == 0 and "measured=no" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize("asked", [("--no-measure",), ("--tp", 2), ("--measure", "--device", "cpu")])
def test_a_timer_that_is_none_is_refused_measured_or_not(fsample: Fsample, asked: tuple[object, ...]) -> None:
    done = fsample("io-model", *asked, "--timer", "bogus")
    assert done.code == 2 and "--timer must be one of auto, cupti, events, wall, got 'bogus'" in done.error


def test_ranks_receive_words_or_logits(fsample: Fsample) -> None:
    done = fsample(
        "io-model", "--preset", "llama3-70b", "--tp", 6, "--batch", "16,256", "--format", "json"
    )  # fmt: skip
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["kind"] == "tp-model" and data["workload"]["tp"] == 6
    rows = {(row["batch"], row["tp"]): row for row in data["results"]}
    assert sorted(rows) == [(batch, ranks) for batch in (16, 256) for ranks in (1, 2, 4, 6)]
    # 128,256 logits of 2 bytes in two halves; a word of 8 bytes a row from each of the others
    assert rows[256, 2]["link_bytes_gather"] == 256 * 64_128 * 2
    assert rows[256, 4]["link_bytes_candidates"] == 3 * 256 * 8
    assert rows[16, 6]["shard_bytes"] == (21_376 + 16) * 8192 * 2
    assert rows[16, 1]["link_bytes_gather"] == rows[16, 1]["link_bytes_candidates"] == 0
    # the measured two-rank shard GEMM of this shape takes 270 us; the floor of its bytes is 239
    assert rows[16, 2]["predicted_candidates_us"] == pytest.approx(239, rel=0.01)
    assert rows[256, 2]["predicted_candidates_us"] == pytest.approx(341, rel=0.01)
    assert rows[256, 6]["predicted_speedup"] > 1.4 and rows[256, 6]["scaling"] < 6
    assert fsample("io-model", "--tp", 2, "--measure").code == 2


def test_the_table_over_ranks_fits_a_terminal(fsample: Fsample) -> None:
    done = fsample("io-model", "--tp", 8, "--batch", "1,256")
    assert done.code == 0 and max(map(len, done.out.splitlines())) <= 80, done.out


def test_measured_on_the_cpu_when_asked(fsample: Fsample) -> None:
    done = fsample(
        "io-model", "--measure", "--device", "cpu", "--vocab", 600, "--hidden", 16, "--batch", "1,8",
        "--iterations", 4, "--warmup", 1, "--quiet", "--format", "json",
    )  # fmt: skip
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["environment"]["torch"] and data["settings"]["timer"] == "wall"
    by = {(row["sampler"], row["batch"]): row for row in data["results"]}
    for batch in (1, 8):
        plain, stored = by["fused", batch], by["fused+store", batch]
        overhead = stored["median_us"] / plain["median_us"] - 1
        assert stored["measured_overhead"] == pytest.approx(overhead)
        # fp32 weights: 4 B V more bytes on 4 V D + 4 B D + 8 B
        predicted = 4 * batch * 600 / (4 * 600 * 16 + 4 * batch * 16 + 8 * batch)
        assert stored["measured_over_predicted"] == pytest.approx(overhead / predicted)
        assert stored["bytes"] - plain["bytes"] == 4 * batch * 600
        assert plain["measured_overhead"] is None
