"""`fsample compare`: injected changes are found, noise is not, unlike runs are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsample_cli.commands.compare import compare_records, median_interval, ratio_interval
from fsample_cli.records import Record
from fsample_cli.reporters import render
from fsample_cli.results import BenchResult, Environment
from fsample_cli.workloads import PRESETS

Fsample = Callable[..., Any]
HOST = Environment(
    gpu="NVIDIA H200", cpu="A CPU", driver="580", torch="2.11.0", python="3.12.3", commit="aaaa"
)


def row(
    sampler: str, batch: int, samples: Sequence[float], timer: str = "cupti", note: str = ""
) -> BenchResult:
    there = list(samples) or None
    median, p10, p90 = np.quantile(there, (0.5, 0.1, 0.9)) if there else (None, None, None)
    return BenchResult(
        sampler, None, "x", batch, timer, len(samples), tuple(samples), median, p10, p90, None, None, None,
        None, None, None, note,
    )  # fmt: skip


def noisy(seed: int, scale: float = 1.0) -> list[float]:
    return [float(x) for x in scale * np.random.default_rng(seed).normal(300, 6, 100)]


def record(*rows: BenchResult, environment: Environment = HOST, **settings: Any) -> Record:
    return Record("bench", "fsample bench", environment, PRESETS["qwen3-8b"].workload(), rows, settings)


def save(path: Path, saved: Record) -> Path:
    path.write_text(render(saved, "json"), encoding="utf-8")
    return path


def test_interval_covers_the_true_ratio_at_its_rate() -> None:
    generator = np.random.default_rng(1)
    hits = 0
    for trial in range(60):
        interval = ratio_interval(noisy(2 * trial), noisy(2 * trial + 1, 1.1), generator)
        assert interval is not None
        low, high = interval
        hits += low <= 1.1 <= high
        assert 0.05 > high - low > 0
    assert 52 <= hits <= 60  # 57 expected, deviation 1.7


@pytest.mark.parametrize("count", [7, 8, 10, 19])
def test_few_noisy_samples_flag_no_regression_more_often_than_said(count: int) -> None:
    """Of times with a long tail and no change at all, at most one interval in twenty leaves out 1."""
    draw = np.random.default_rng(count)
    missed = 0
    for _ in range(1000):
        before, after = draw.lognormal(5, 0.5, count), draw.lognormal(5, 0.5, count)
        interval = ratio_interval(list(before), list(after), draw)
        assert interval is not None
        missed += not interval[0] <= 1 <= interval[1]
    assert missed <= 50


def test_order_statistics_miss_the_median_as_rarely_as_asked() -> None:
    assert median_interval(range(6), 0.025) is None  # the ends of 6 miss it in 2 of 64
    assert median_interval(range(7), 0.025) == (0, 6)  # 2 of 128
    assert median_interval(range(10), 0.025) == (1, 8)  # 22 of 1,024
    assert median_interval([3.0, 1.0, 2.0], 1.0) == (1.0, 3.0)


def test_a_doubling_over_few_samples_is_found_and_over_too_few_left_open(
    tmp_path: Path, fsample: Fsample
) -> None:
    for count, code, verdict in ((4, 0, "too few"), (7, 1, "regression")):
        before = save(tmp_path / f"{count}a.json", record(row("fused", 1, noisy(1)[:count])))
        after = save(tmp_path / f"{count}b.json", record(row("fused", 1, noisy(2, 2.0)[:count])))
        done = fsample("compare", before, after)
        assert done.code == code and verdict in done.out
        (result,) = compare_records(
            record(row("fused", 1, noisy(1)[:count])), record(row("fused", 1, noisy(2, 2.0)[:count])), 0.05, 0
        )
        assert result.verdict == verdict and (result.low is None) == (count == 4)


def test_verdicts() -> None:
    old = record(
        *(row("fused", b, noisy(b)) for b in (1, 2, 4, 8)), row("gone", 1, noisy(9)), row("fi2", 1, [])
    )
    new = record(
        row("fused", 1, noisy(11)),
        row("fused", 2, noisy(12, 1.10)),
        row("fused", 4, noisy(14, 1.03)),
        row("fused", 8, noisy(18, 0.9)),
        row("new", 1, noisy(19)),
        row("fi2", 1, [], note="not installed"),
    )
    results = {(r.sampler, r.batch): r for r in compare_records(old, new, 0.05, 0)}
    verdicts = {key: r.verdict for key, r in results.items()}
    assert verdicts == {
        ("fused", 1): "same", ("fused", 2): "regression", ("fused", 4): "slower", ("fused", 8): "faster",
        ("new", 1): "only after", ("gone", 1): "only before", ("fi2", 1): "no time",
    }  # fmt: skip
    assert results["fi2", 1].note == "not installed"
    assert results["fused", 2].ratio == pytest.approx(1.10, abs=0.01)
    assert compare_records(old, new, 0.05, 0) == compare_records(old, new, 0.05, 0)


def test_a_wide_spread_beyond_the_threshold_is_no_regression() -> None:
    old, new = record(row("fused", 1, [1, 100] * 12)), record(row("fused", 1, [1, 150] * 12))
    (result,) = compare_records(old, new, 0.05, 0)
    assert result.ratio is not None and result.ratio > 1.05 and result.verdict == "same"


def test_exit_codes_and_formats(tmp_path: Path, fsample: Fsample) -> None:
    before = save(tmp_path / "a.json", record(row("fused", 1, noisy(1)), cache="cold"))
    slower = save(tmp_path / "b.json", record(row("fused", 1, noisy(2, 1.2)), cache="cold"))
    assert fsample("compare", before, before).code == 0
    done = fsample("compare", before, slower, "--format", "json")
    assert done.code == 1 and done.err == ""
    compared = Record.from_dict(json.loads(done.out))
    (result,) = compared.results
    assert (compared.settings["before"], compared.settings["after"]) == ("a.json", "b.json")  # no folders
    assert result.verdict == "regression" and result.low < 1.2 < result.high
    assert fsample("compare", before, slower, "--threshold", "0.3").code == 0
    assert fsample("compare", slower, before).code == 0  # faster is no regression
    text = fsample("compare", before, slower).out
    assert "regression" in text and "1.2" in text
    for bad in ("nan", "-0.1", "inf"):
        done = fsample("compare", before, slower, "--threshold", bad)
        assert done.code == 2 and "--threshold" in done.error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": "NVIDIA B200"}, "gpu (NVIDIA H200 and NVIDIA B200)"),
        ({"cpu": "Another"}, "cpu (A CPU and Another)"),
        ({"numa_nodes": 2}, "numa_nodes (None and 2)"),
    ],
)
def test_unlike_hosts_are_refused(
    tmp_path: Path, fsample: Fsample, change: dict[str, Any], words: str
) -> None:
    old = save(tmp_path / "a.json", record(row("fused", 1, noisy(1))))
    new = save(tmp_path / "b.json", record(row("fused", 1, noisy(1)), environment=replace(HOST, **change)))
    done = fsample("compare", old, new)
    assert done.code == 2 and words in done.error and "--allow-unlike" in done.error
    done = fsample("compare", old, new, "--allow-unlike")
    assert done.code == 0 and words in done.err and words not in done.out.replace("\n", "")


def test_unlike_software_is_a_warning(tmp_path: Path, fsample: Fsample) -> None:
    old = save(tmp_path / "a.json", record(row("fused", 1, noisy(1))))
    other = replace(HOST, driver="590", torch="2.12.0", clock_sm_max_mhz=1980, commit="bbbb")
    new = save(tmp_path / "b.json", record(row("fused", 1, noisy(1)), environment=other))
    done = fsample("compare", old, new)
    assert done.code == 0
    assert [line.split(" (")[0] for line in done.err.splitlines()] == [
        "fsample: unlike in driver", "fsample: unlike in torch", "fsample: unlike in clock_sm_max_mhz"
    ]  # fmt: skip
    assert fsample("compare", old, new, "--quiet").err == ""


def test_unlike_protocols_are_refused(tmp_path: Path, fsample: Fsample) -> None:
    old = save(tmp_path / "a.json", record(row("fused", 1, noisy(1)), cache="cold"))
    cases = {
        "timer (cupti and events)": record(row("fused", 1, noisy(1), timer="events"), cache="cold"),
        "cache (cold and warm)": record(row("fused", 1, noisy(1)), cache="warm"),
        "hidden (4096 and 8192)": replace(
            record(row("fused", 1, noisy(1)), cache="cold"),
            workload=replace(PRESETS["qwen3-8b"].workload(), hidden=8192),
        ),
    }
    for words, saved in cases.items():
        done = fsample("compare", old, save(tmp_path / "b.json", saved))
        assert done.code == 2 and words in done.error


def test_bad_files(tmp_path: Path, fsample: Fsample) -> None:
    good = save(tmp_path / "good.json", record(row("fused", 1, noisy(1))))
    other = save(tmp_path / "other.json", record(row("fused", 2, noisy(1))))
    presets = save(tmp_path / "presets.json", Record("presets", "", None, None, ()))
    texts = {
        "empty": "", "text": "hello", "list": "[]", "binary": "\x00", "schema": '{"schema": 7}',
        "deep": "[" * 100_000,
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for path in [tmp_path / "none", tmp_path, presets, *(tmp_path / name for name in texts)]:
        done = fsample("compare", good, path)
        assert done.code == 2 and str(path) in done.error
        assert re.search("; (give a file|write it again)", done.error), done.error
    done = fsample("compare", good, other)
    assert done.code == 2 and "share no timed sampler" in done.error
    assert fsample("compare", good).code == 2


@pytest.mark.parametrize("sample", [0, 0.0, -1.5, 10**400], ids=["0", "0.0", "-1.5", "10**400"])
def test_times_that_are_none_are_refused(tmp_path: Path, fsample: Fsample, sample: float) -> None:
    good = save(tmp_path / "good.json", record(row("fused", 1, noisy(1))))
    for count in (10, 30):  # order statistics, bootstrap
        data = json.loads(good.read_text())
        data["results"][0]["samples_us"] = [sample] * count
        (tmp_path / "bad.json").write_text(json.dumps(data))
        for pair in ((tmp_path / "bad.json", good), (good, tmp_path / "bad.json")):
            done = fsample("compare", *pair)
            assert done.code == 2 and "bad.json: results[0]: samples_us must be" in done.error, done


def test_the_seed_is_said_to_be_of_the_bootstrap_alone(fsample: Fsample) -> None:
    assert "Of the bootstrap." in fsample("compare", "--help").out
