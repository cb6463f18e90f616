"""`fsample bench` end to end on the CPU: records, tables, gates, and rows without a number."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fsample_kernels
from fsample_cli.measure.clocks import ClockReading
from fsample_cli.measure.settings import Settings
from fsample_cli.measure.sweep import sweep
from fsample_cli.measure.timing import WallStopwatch
from fsample_cli.records import Record
from fsample_cli.samplers import features, multinomial
from fsample_cli.workloads import Workload
from tests.cli.conftest import Fsample

TINY = ("--vocab", 600, "--hidden", 16, "--iterations", 4, "--warmup", 1, "--quiet")


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def strict(text: str) -> dict[str, Any]:
    data = json.loads(text, parse_constant=refuse)
    assert isinstance(data, dict)
    return data


def test_a_sweep_end_to_end(fsample: Fsample) -> None:
    done = fsample(
        "bench", "--preset", "cpu-small", "--batch", "1,3", "--iterations", 3, "--warmup", 1,
        "--sampler", "fused,gemm,multinomial-eager,fi2", "--device", "cpu", "--format", "json",
    )  # fmt: skip
    assert done.code == 0, done.err
    data = strict(done.out)
    record = Record.from_dict(data)
    assert record.to_dict() == data
    rows = {(row.sampler, row.batch): row for row in record.results}
    assert list(rows) == [(s, b) for b in (1, 3) for s in ("fused", "gemm", "multinomial-eager", "fi2")]
    for (name, _), row in rows.items():
        if name == "fi2":
            assert row.median_us is None and row.samples_us == () and "needs an NVIDIA GPU" in row.note
            continue
        assert len(row.samples_us) == row.iterations == 3 and min(row.samples_us) > 0
        assert row.p10_us <= row.median_us <= row.p90_us
        assert row.timer == "wall"
    gemm = rows["gemm", 3]
    assert gemm.ratio_to_gemm == 1.0
    assert rows["fused", 3].ratio_to_gemm == pytest.approx(rows["fused", 3].median_us / gemm.median_us)
    assert rows["fused", 1].implementation == "reference" and rows["fused", 1].algorithm == "grouped"
    assert record.settings["timer"] == "wall" and "cold cache" in str(record.settings["cache"])
    assert "torch.multinomial(" in str(record.settings["samplers"])
    stored = record.settings["logits_in_memory"]
    assert isinstance(stored, dict) and stored["multinomial-eager"] == "float32"
    assert "fused:grouped" not in stored and "fused" not in stored  # its logits never reach memory
    assert "fsample: checking fused" in done.err  # progress is on stderr


def test_the_table_fits_80_columns_and_names_timer_and_cache(shell: Fsample) -> None:
    done = shell("bench", *TINY, "--batch", "1,16", "--sampler", "fused:element,gemm,multinomial-eager,fi1")
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 80
    assert "…" not in done.out and "timer=wall" in done.out and "cold cache" in done.out
    assert "fused:element" in done.out and "needs an NVIDIA GPU" in done.out.replace("\n  ", " ")


def test_warm_caches_and_a_baseline_of_ones_own_choice(fsample: Fsample) -> None:
    done = fsample(
        "bench", *TINY, "--batch", 2, "--no-cold", "--sampler", "fused,unfused", "--baseline", "unfused",
        "--format", "json",
    )  # fmt: skip
    data = strict(done.out)
    assert done.code == 0 and data["settings"]["cache"].startswith("warm")
    fused, unfused = data["results"]
    assert unfused["speedup"] == 1.0
    assert fused["speedup"] == pytest.approx(unfused["median_us"] / fused["median_us"])
    assert fused["ratio_to_gemm"] is None  # the GEMM did not run


def test_two_algorithms_are_two_rows_and_either_is_a_baseline(fsample: Fsample) -> None:
    names = "fused,fused:element"
    for baseline, one in (("fused", 0), ("fused:element", 1)):
        done = fsample(
            "bench", *TINY, "--batch", 2, "--sampler", names, "--baseline", baseline, "--format", "json"
        )
        rows = strict(done.out)["results"]
        assert [row["algorithm"] for row in rows] == ["grouped", "element"]
        assert rows[one]["speedup"] == 1.0 and rows[1 - one]["speedup"] != 1.0


def test_a_baseline_that_does_not_run_is_refused(fsample: Fsample) -> None:
    done = fsample("bench", *TINY, "--sampler", "fused", "--baseline", "fi2")
    assert done.code == 2 and "--baseline" in done.error and "add --sampler fi2" in done.error
    done = fsample("bench", *TINY, "--baseline", "unfused")  # alone it would replace the default list
    assert done.code == 2 and done.error.endswith("run --sampler fused,gemm,multinomial-eager,multinomial,"
                                                  "race,fi1,fi2,unfused")  # fmt: skip
    for given in ((), ("--sampler", "fused")):
        done = fsample("bench", *TINY, *given, "--baseline", "foo")
        assert done.code == 2 and done.error.endswith("got 'foo'; choose one of them")


def test_a_gpu_timer_on_the_cpu_is_refused_before_the_run(fsample: Fsample) -> None:
    done = fsample("bench", *TINY, "--device", "cpu", "--timer", "cupti")
    assert done.code == 2 and "--timer cupti needs a GPU" in done.error


MINE = """
import torch
CALLS = 0
def _draw(logits, seed):
    return torch.multinomial(torch.softmax(logits, -1), 1, generator=torch.Generator().manual_seed(seed))
def right(hidden, weight, temperature, seed):
    return _draw(hidden @ weight.T / temperature, seed)
def too_hot(hidden, weight, temperature, seed):
    return _draw(hidden @ weight.T / (1.2 * temperature), seed)
def past_the_end(hidden, weight, temperature, seed):
    ids = right(hidden, weight, temperature, seed)
    ids[0] = weight.shape[0]
    return ids
def frozen(hidden, weight, temperature, seed):
    return right(hidden, weight, temperature, 7)
def never_rarest(hidden, weight, temperature, seed):
    logits = hidden @ weight.T / temperature
    return _draw(logits.masked_fill(logits < logits.median(), float("-inf")), seed)
def nothing(hidden, weight, temperature, seed):
    return None
def compiles_late(hidden, weight, temperature, seed):
    global CALLS
    CALLS += 1
    from triton import knobs
    if knobs.compilation.listener is not None:
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=False)
    return right(hidden, weight, temperature, seed)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "my_samplers.py"
    path.write_text(MINE)
    return path


def test_a_users_right_function_is_timed(fsample: Fsample, mine: Path) -> None:
    done = fsample("bench", *TINY, "--batch", 4, "--sampler", f"{mine}:right", "--format", "json")
    assert done.code == 0, done.err
    (row,) = strict(done.out)["results"]
    assert row["sampler"] == f"{mine}:right" and row["median_us"] > 0 and row["bytes"] is None


@pytest.mark.parametrize("function", ["too_hot", "past_the_end", "frozen", "never_rarest"])
def test_no_number_for_a_sampler_that_draws_wrong_tokens(fsample: Fsample, mine: Path, function: str) -> None:
    done = fsample(
        "bench", *TINY, "--batch", 4, "--sampler", "multinomial-eager", "--sampler", f"{mine}:{function}",
        "--baseline", "multinomial-eager", "--format", "json",
    )  # fmt: skip
    assert done.code == 1
    assert done.err.startswith("fsample: bench: ") and "failed its gate" in done.err
    right, wrong = strict(done.out)["results"]
    assert right["median_us"] > 0
    assert wrong["note"].startswith("failed its gate")
    assert wrong["median_us"] is None and wrong["speedup"] is None and wrong["samples_us"] == []


def test_a_function_that_returns_no_ids_is_left_out_with_the_reason(fsample: Fsample, mine: Path) -> None:
    done = fsample("bench", *TINY, "--batch", 4, "--sampler", f"gemm,{mine}:nothing", "--format", "json")
    assert done.code == 0, done.err
    gemm, nothing = strict(done.out)["results"]
    assert gemm["median_us"] > 0
    assert nothing["median_us"] is None and nothing["note"].startswith("unavailable: ")
    assert "must return a tensor of ids, got NoneType" in nothing["note"]


def test_a_compilation_inside_the_timed_section_fails_the_run(fsample: Fsample, mine: Path) -> None:
    done = fsample("bench", *TINY, "--batch", 4, "--sampler", f"{mine}:compiles_late", "--format", "json")
    assert done.code == 1 and "compiled inside the timed section" in done.err
    assert len(strict(done.out)["settings"]["problems"]) == 4  # one for each timed iteration


def test_nothing_timed_is_a_failure_with_a_record(fsample: Fsample) -> None:
    done = fsample("bench", *TINY, "--sampler", "fi1,fi2", "--batch", 1, "--format", "json")
    assert done.code == 2 and "no sampler could be timed" in done.err
    assert done.err.count("needs an NVIDIA GPU") == 2 and "fi1 is unavailable" in done.err
    assert len(strict(done.out)["results"]) == 2


def settings(**changes: Any) -> Settings:
    return Settings(
        **{
            "device": "cpu",
            "timer": "wall",
            "warmup": 0,
            "iterations": 4,
            "temperature": 1.0,
            "seed": 0,
            "baseline": None,
            "gpu": None,
            **changes,
        }  # fmt: skip
    )


class Throttling:
    def read(self) -> list[ClockReading]:
        return [ClockReading(1200, ("power cap",))]


def run_sweep(*names: str) -> dict[str, Any]:
    outcome = sweep(
        names,
        Workload("custom", 600, 16, "fp32"),
        [2],
        settings(),
        make_stopwatch=WallStopwatch,
        flush=None,
        clock_reader=Throttling(),
    )
    assert not outcome.problems
    return {row.sampler: row for row in outcome.results}


def test_throttled_rows_keep_their_samples_and_are_flagged() -> None:
    row = run_sweep("gemm")["gemm"]
    assert len(row.samples_us) == 4 and row.median_us > 0
    assert row.throttled is True and row.clock_sm_mhz == 1200 and "power cap" in row.note


def test_an_unsupported_vocabulary_is_a_note_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multinomial, "MOST_CATEGORIES", 599)
    rows = run_sweep("multinomial-eager", "fused")
    assert rows["multinomial-eager"].note.startswith("unsupported: torch.multinomial takes at most 2^24")
    assert rows["multinomial-eager"].median_us is None
    assert rows["fused"].median_us > 0


@pytest.mark.slow
def test_compiled_samplers_run_on_the_cpu(fsample: Fsample) -> None:
    done = fsample(
        "bench", *TINY, "--sampler", "multinomial,race", "--batch", 2, "--device", "cpu", "--format", "json"
    )
    assert done.code == 0, done.err
    timed = {row["sampler"] for row in strict(done.out)["results"] if row["median_us"]}
    assert timed == {"multinomial", "race"}


def test_features_are_timed_beside_the_plain_call_and_draw_its_ids(
    fsample: Fsample, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = fsample("bench", "--features", *TINY, "--batch", "5", "--seed", 2**63 + 1, "--format", "json")
    assert done.code == 0, done.err
    record = Record.from_dict(strict(done.out))
    assert [row.sampler for row in record.results][:2] == ["fused", "gemm"]
    assert {row.sampler.partition("+")[2] for row in record.results[2:-1]} == set(features.FEATURES)
    assert record.results[-1].algorithm == "element"
    assert all(row.median_us and row.speedup for row in record.results), done.err
    assert record.settings["baseline"] == "fused" and record.settings["features"] is True
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "profiles")
    tables = importlib.import_module("tables")
    heads, _, cells = (line.split(" | ") for line in tables.features(record).splitlines())
    plain, mask = record.results[0], next(row for row in record.results if row.sampler == "fused+mask")
    assert heads[1] == "**fused**" and heads[-1] == "element |" and "+bias" in heads
    assert cells[heads.index("+mask")] == f"{mask.median_us / plain.median_us:.3f}"


@pytest.mark.parametrize("feature", features.FEATURES)
def test_a_feature_that_changes_tokens_gets_no_time(
    fsample: Fsample, monkeypatch: pytest.MonkeyPatch, feature: str
) -> None:
    inner = fsample_kernels.sample

    def other_position(*args: Any, position: Any, **named: Any) -> fsample_kernels.SampleResult:
        is_plain = "implementation" in named  # `Fused` names all it has, `Featured` what differs
        return inner(*args, position=position if is_plain else position + 1, **named)

    monkeypatch.setattr(fsample_kernels, "sample", other_position)
    sampler = features.Featured(feature)
    hidden, weight = torch.randn(8, 16), torch.randn(600, 16) * 0.1
    sampler.prepare(hidden, weight, temperature=1.0)
    assert "ids differ" in sampler.problem(hidden, weight, temperature=1.0, seed=3)


def test_every_row_has_its_own_seed_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(8, 16), torch.randn(600, 16) * 0.1
    sampler = features.Featured("seeds")
    sampler.prepare(hidden, weight, temperature=1.0)
    assert sampler.problem(hidden, weight, temperature=1.0, seed=2**64 - 3) == ""
    inner = fsample_kernels.sample

    def first_rows(*args: Any, seed: Any, **named: Any) -> fsample_kernels.SampleResult:
        return inner(*args, seed=seed[:1].expand(8) if isinstance(seed, torch.Tensor) else seed, **named)

    monkeypatch.setattr(fsample_kernels, "sample", first_rows)
    assert "ids differ" in sampler.problem(hidden, weight, temperature=1.0, seed=3)


@pytest.mark.parametrize("rows, greedy", [(1, []), (2, [1]), (8, [1, 5])])
def test_greedy_rows_are_mixed_in_from_two_rows_on(rows: int, greedy: list[int]) -> None:
    heat = features.options("temperature", torch.randn(rows, 16), torch.randn(600, 16), 0.7)["temperature"]
    assert (heat == 0).nonzero()[:, 0].tolist() == greedy


def test_features_bring_their_own_samplers(fsample: Fsample) -> None:
    done = fsample("bench", "--features", "--sampler", "gemm")
    assert done.code == 2 and "--features" in done.error and "--sampler" in done.error
