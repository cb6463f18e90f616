"""`fsample io-model`: predictions without a run, and the measured overhead beside them."""

from __future__ import annotations

import json
from statistics import median

import pytest

from fsample_cli.measure.link_traffic import MEASURED, NCCL_US, P2P_US
from fsample_cli.records import Record
from fsample_cli.shards import width_of
from tests.cli.conftest import ROOT, Fsample


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


@pytest.mark.parametrize("asked", [(), ("--no-measure",), ("--tp", 2)])
@pytest.mark.parametrize(
    ("name", "value"),
    [("timer", ["wall"]), ("iterations", [100]), ("temperature", [1]), ("warmup", [2]), ("seed", [1]),
     ("states", ["x.npy"]), ("no-cold", [])],
)  # fmt: skip
def test_what_only_a_measurement_reads_is_refused_without_one(
    fsample: Fsample, asked: tuple[object, ...], name: str, value: list[object]
) -> None:
    done = fsample("io-model", *asked, "--device", "cpu", f"--{name}", *value)
    assert done.code == 2
    assert f"--{name} goes with --measure" in done.error
    assert ("or add --measure" in done.error) == (asked == ())
    assert ("or --no-measure" in done.error) == ("--no-measure" in asked)


def test_a_gpu_is_refused_where_nothing_is_measured(fsample: Fsample) -> None:
    for asked in (("--no-measure",), ("--tp", 2)):
        assert "--device goes with --measure" in fsample("io-model", *asked, "--device", "cuda").error


def test_ranks_receive_words_or_logits(fsample: Fsample) -> None:
    done = fsample(
        "io-model", "--preset", "llama3-70b", "--tp", 6, "--batch", "16,256", "--format", "json"
    )  # fmt: skip
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["kind"] == "tp-model" and data["workload"]["tp"] == 6
    rows = {(row["batch"], row["tp"]): row for row in data["results"]}
    assert sorted(rows) == [(batch, ranks) for batch in (16, 256) for ranks in (1, 2, 4, 6)]
    # 128,256 logits of 2 bytes in two halves; a word of 8 bytes a row from each of the others, tagged 16
    assert rows[256, 2]["link_bytes_gather"] == 256 * 64_128 * 2
    assert rows[256, 4]["link_bytes_candidates"] == 3 * 256 * 8
    assert rows[256, 4]["link_bytes_p2p"] == 3 * 256 * 16
    assert rows[16, 6]["shard_bytes"] == (width_of(128_256, 6) + 16) * 8192 * 2 == (21_376 + 16) * 8192 * 2
    assert rows[256, 4]["link_bytes_gather"] == 3 * 256 * 32_128 * 2  # as bench pads shards: 251 times 128
    assert rows[16, 1]["link_bytes_gather"] == rows[16, 1]["link_bytes_p2p"] == 0
    # the floor of two ranks' bytes and products is 239 and 341 us
    assert rows[16, 2]["predicted_p2p_us"] == pytest.approx(239 + P2P_US, rel=0.005)
    assert rows[256, 2]["predicted_candidates_us"] == pytest.approx(341 + NCCL_US, rel=0.005)
    assert rows[256, 6]["predicted_speedup"] > 1.4 and rows[256, 6]["scaling"] < 6
    assert fsample("io-model", "--tp", 2, "--measure").code == 2
    refused = fsample("io-model", "--tp", 4, "--vocab", 300, "--hidden", 8)
    assert refused.code == 2 and "got 4 ranks for V = 300; try --tp 3" in refused.error


@pytest.mark.skipif(not (ROOT / MEASURED).exists(), reason="a source distribution carries no records")
def test_an_exchange_costs_what_the_record_says() -> None:
    record = Record.from_dict(json.loads((ROOT / MEASURED).read_text()))
    costs: dict[str | None, list[float]] = {}
    for row in record.results:
        if row.exchange_us is not None:
            costs.setdefault(row.algorithm, []).append(row.exchange_us)
    assert median(costs["p2p"]) == pytest.approx(P2P_US, abs=0.05)
    assert median(costs["candidates"]) == pytest.approx(NCCL_US, abs=0.05)


def test_the_papers_figures_stand_beside_its_own_shape_alone(fsample: Fsample) -> None:
    done = fsample("io-model", "--preset", "llama3-70b", "--tp", 8, "--batch", "16,32", "--format", "json")
    data = json.loads(done.out)
    assert "B200" in data["settings"]["paper"]
    rows = {(row["batch"], row["tp"]): row for row in data["results"]}
    assert rows[16, 8]["paper_us"] == 87.07
    assert rows[16, 8]["paper_speedup"] == pytest.approx(164.16 / 87.07)
    assert rows[16, 8]["paper_scaling"] == pytest.approx(333.82 / 87.07)
    assert rows[32, 8]["paper_us"] is None
    other = fsample("io-model", "--preset", "qwen3-8b", "--tp", 2, "--batch", 16)
    assert "paper" not in other.out
    shown = fsample("io-model", "--preset", "llama3-70b", "--tp", 2, "--batch", 16).out
    assert "paper us  its speed-up  its scaling" in shown and "B200" in shown


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
