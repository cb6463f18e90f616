"""`fsample trace` on the CPU, kernel attribution on a made-up GPU trace, ranges without nvtx."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fsample_cli.measure import nvtx_ranges
from fsample_cli.measure.kernel_times import kernel_times, short_name
from fsample_cli.measure.nvtx_ranges import Ranges, parse_range, range_name
from fsample_kernels import checked
from tests.cli.conftest import Fsample

TINY = ("--vocab", 600, "--hidden", 16, "--iterations", 2, "--warmup", 1, "--device", "cpu")


def test_a_cpu_trace_has_a_range_a_stage_and_times_that_add_up(fsample: Fsample, tmp_path: Path) -> None:
    chrome = tmp_path / "out.json"
    done = fsample(
        "trace", *TINY, "--batch", 4, "--sampler", "fused,gemm,multinomial-eager,fi2", "--chrome", chrome,
        "--format", "json",
    )  # fmt: skip
    assert done.code == 0, done.err
    events = json.loads(chrome.read_text())["traceEvents"]
    ranges = [parsed for event in events if (parsed := parse_range(event.get("name", "")))]
    assert set(ranges) >= {
        ("prepare", "fused", 4), ("warm-up", "fused", 4), ("fused kernel", "fused", 4), ("GEMM", "gemm", 4),
        ("GEMM", "multinomial-eager", 4), ("sampler", "multinomial-eager", 4),
    }  # fmt: skip
    assert ranges.count(("sampler", "multinomial-eager", 4)) == 2
    rows = json.loads(done.out)["results"]
    for name in ("fused", "gemm", "multinomial-eager"):
        stages = [
            r for r in rows if r["sampler"] == name and r["name"] == r["stage"] and r["share"] is not None
        ]
        assert sum(r["share"] for r in stages) == pytest.approx(1)
        for stage in stages:
            inside = [
                r for r in rows if r["sampler"] == name and r["stage"] == stage["stage"] and r is not stage
            ]
            assert sum(r["total_us"] for r in inside) == pytest.approx(stage["total_us"])
            assert stage["calls"] == 2
    # its row may be folded: on a busy machine a softmax of microseconds can wait milliseconds for a core
    assert any(event.get("name") == "aten::multinomial" for event in events)
    inside = [r for r in rows if (r["sampler"], r["stage"]) == ("multinomial-eager", "sampler")]
    assert any(r["name"] != "sampler" for r in inside)
    assert "fi2" in done.err and "fi2" not in {r["sampler"] for r in rows}


def test_only_our_own_lines_are_on_stderr(shell: Fsample, tmp_path: Path) -> None:
    """Kineto's probes would be there too."""
    done = shell("trace", *TINY, "--batch", 4, "--sampler", "fused", "--chrome", tmp_path / "out.json")
    assert done.code == 0, done.err
    assert [line for line in done.err.splitlines() if not line.startswith("fsample: ")] == []


def test_what_cannot_be_traced_says_why_and_writes_nothing(
    fsample: Fsample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = ("trace", *TINY, "--sampler", "fi1", "--chrome", tmp_path / "trace.json", "-q")
    done = fsample(*traced, "--output", tmp_path / "record.json")
    assert done.code == 2 and "no sampler could be traced, so nothing is written: fi1: Flash" in done.error
    assert "fsample doctor" in done.error and done.out == "" and list(tmp_path.iterdir()) == []
    monkeypatch.setenv("FSAMPLE_UNDER_NSYS", "1")
    assert fsample(*traced).code == 2


def test_checked_calls_are_not_traced(fsample: Fsample, tmp_path: Path) -> None:
    with checked():
        done = fsample("trace", *TINY, "--sampler", "fused", "--chrome", tmp_path / "trace.json", "-q")
    assert done.code == 2 and list(tmp_path.iterdir()) == []
    assert done.error == "fsample: FSAMPLE_CHECK would have the checks of every call traced; unset it"


def test_two_algorithms_stay_apart(fsample: Fsample, tmp_path: Path) -> None:
    done = fsample(
        "trace",
        *TINY,
        "--sampler",
        "fused,fused:element",
        "--chrome",
        tmp_path / "t.json",
        "--format",
        "json",
    )
    rows = json.loads(done.out)["results"]
    whole = [(r["sampler"], r["algorithm"], r["calls"]) for r in rows if r["name"] == "fused kernel"]
    assert whole == [("fused", "grouped", 2), ("fused", "element", 2)]


def test_an_existing_trace_is_kept_without_force(fsample: Fsample, tmp_path: Path) -> None:
    chrome = tmp_path / "out.json"
    chrome.write_text("mine")
    done = fsample("trace", *TINY, "--sampler", "gemm", "--chrome", chrome)
    assert done.code == 2 and "--force" in done.error and chrome.read_text() == "mine"
    assert f"--chrome {chrome}" in done.error  # not --output, which was not given
    done = fsample("trace", *TINY, "--chrome", tmp_path / "none" / "out.json")
    assert done.code == 2 and "--chrome needs a folder" in done.error
    done = fsample("trace", *TINY, "--chrome", tmp_path)
    assert done.code == 2 and "--chrome must be a file" in done.error
    assert fsample("trace", *TINY, "--sampler", "gemm", "--chrome", chrome, "--force").code == 0


def test_the_record_and_the_trace_are_two_files(fsample: Fsample, tmp_path: Path) -> None:
    chrome = tmp_path / "out.json"
    chrome.write_text("mine")
    (tmp_path / "link.json").symlink_to(chrome)
    (tmp_path / "folder").mkdir()
    for output in (chrome, tmp_path / "folder" / ".." / "out.json", tmp_path / "link.json"):
        done = fsample("trace", *TINY, "--chrome", chrome, "--output", output, "--force")
        assert done.code == 2 and f"--chrome must be different files, got {output}" in done.error
    assert chrome.read_text() == "mine"


def test_nsys_without_a_gpu_is_refused_and_the_bare_flag_parses(fsample: Fsample, tmp_path: Path) -> None:
    done = fsample("trace", *TINY, "--nsys-libraries", tmp_path / "none", "--chrome", tmp_path / "out.json")
    assert done.code == 2 and f"--nsys-libraries must be a folder, got {tmp_path / 'none'}" in done.error
    done = fsample("trace", *TINY, "--nsys", "--chrome", tmp_path / "out.json")
    assert done.code == 2 and "--nsys needs a GPU" in done.error


def test_inside_a_profiler_only_ranges_run(
    fsample: Fsample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSAMPLE_UNDER_NSYS", "1")
    chrome = tmp_path / "out.json"
    done = fsample("trace", *TINY, "--sampler", "fused,gemm", "--chrome", chrome)
    assert done.code == 0 and done.out == "" and not chrome.exists()
    assert "ranges only" in done.err
    done = fsample("trace", *TINY, "--nsys", "--chrome", chrome)
    assert done.code == 2 and "around this run already" in done.error


def event(
    cat: str, name: str, ts: float, dur: float, tid: Any = 1, correlation: int | None = None
) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def gpu_trace() -> dict[str, Any]:
    """Two fused calls of two kernels each; the device runs behind the host, past the end of the ranges."""
    fused, reduction = range_name("fused", 8, "fused kernel"), range_name("fused", 8, "reduction")
    events = [event("user_annotation", range_name("fused", 8, "prepare"), 0, 50)]
    for k, start in enumerate((100.0, 300.0)):
        events += [
            event("user_annotation", fused, start, 40),
            event("cuda_driver", "cuLaunchKernelEx", start + 5, 2, correlation=10 * k + 1),
            event("user_annotation", reduction, start + 20, 10),
            event("cuda_driver", "cuLaunchKernelEx", start + 22, 2, correlation=10 * k + 2),
            event("kernel", "lm_head_sample_kernel", start + 60, 90, tid=7, correlation=10 * k + 1),
            event("kernel", "reduce_candidates_kernel", start + 150, 10, tid=7, correlation=10 * k + 2),
            event("cpu_op", "aten::empty", start + 1, 3),
        ]
    return {"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}


def test_kernels_belong_to_the_innermost_range_of_their_launch() -> None:
    rows = kernel_times(gpu_trace(), {"fused": ("fused", "grouped")})
    found = {(row.stage, row.name): (row.calls, row.total_us, row.share) for row in rows}
    assert found == {
        ("prepare", "prepare"): (1, 50.0, None),
        ("fused kernel", "fused kernel"): (2, 180.0, pytest.approx(0.9)),
        ("fused kernel", "lm_head_sample_kernel"): (2, 180.0, pytest.approx(0.9)),
        ("reduction", "reduction"): (2, 20.0, pytest.approx(0.1)),
        ("reduction", "reduce_candidates_kernel"): (2, 20.0, pytest.approx(0.1)),
    }
    assert all(row.algorithm == "grouped" and row.batch == 8 for row in rows)


def test_a_trace_without_ranges_has_no_rows() -> None:
    assert kernel_times({"traceEvents": [event("kernel", "k", 0, 1, correlation=1)]}, {}) == ()
    assert kernel_times({}, {}) == ()


def test_operators_count_their_own_time_only() -> None:
    trace = {
        "traceEvents": [
            event("user_annotation", range_name("gemm", 1, "GEMM"), 0, 100),
            event("cpu_op", "aten::matmul", 10, 60),
            event("cpu_op", "aten::mm", 20, 45),
            event("cpu_op", "aten::empty", 25, 5),
            event("cpu_op", "aten::sum", 200, 60),  # outside: the flush
        ]
    }
    own = {
        row.name: row.total_us
        for row in kernel_times(trace, {"gemm": ("gemm", None)})
        if row.name != row.stage
    }
    assert own == {"aten::mm": 40.0, "aten::matmul": 15.0, "aten::empty": 5.0}


def test_small_names_share_a_row_and_no_time_is_lost() -> None:
    events = [event("user_annotation", range_name("gemm", 1, "GEMM"), 0, 2_000)]
    events += [event("cpu_op", f"aten::tiny{k}", 10 * k, 2) for k in range(3)]
    trace = {"traceEvents": [*events, event("cpu_op", "aten::mm", 100, 1_000)]}
    own = {row.name: (row.calls, row.total_us) for row in kernel_times(trace, {"gemm": ("gemm", None)})}
    assert own == {"GEMM": (1, 1_006.0), "aten::mm": (1, 1_000.0), "3 others": (3, 6.0)}


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::reduce_kernel<512, 1, at::native::R<float> >(at::native::R<float>)",
            "at::native::reduce_kernel",
        ),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT"),
        ("void (anonymous namespace)::softmax<float>(float*)", "softmax"),
    ],
)
def test_kernel_names_lose_their_template_arguments(name: str, short: str) -> None:
    assert short_name(name) == short


def test_without_nvtx_ranges_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "nvtx" else find(name, *rest)
    )
    with Ranges("fused", 1, 10, 10).stage("GEMM"):
        pass


def test_nvtx_gets_domain_stage_sampler_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    class FakeNvtx:
        numpy_dtype = None

        def annotate(self, **given: Any) -> Any:
            seen.append(given)
            return nullcontext()

    monkeypatch.setattr(nvtx_ranges, "_nvtx", FakeNvtx)
    with Ranges("race", 64, 151_936, 4_096).stage("sampler"):
        pass
    (call,) = seen
    assert (call["message"], call["domain"], call["category"]) == ("sampler", "fsample", "race")
    assert {name: int(call["payload"][name]) for name in ("B", "V", "D")} == {
        "B": 64,
        "V": 151_936,
        "D": 4_096,
    }


@pytest.fixture
def launches() -> Iterator[Any]:
    runtime = importlib.import_module("triton.knobs").runtime
    before = list(runtime.launch_enter_hook.calls), list(runtime.launch_exit_hook.calls)
    yield runtime
    assert (list(runtime.launch_enter_hook.calls), list(runtime.launch_exit_hook.calls)) == before


def test_reduction_kernels_get_a_range_of_their_own(launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Metadata:
        def __init__(self, name: str) -> None:
            self.name = name

        def get(self) -> dict[str, str]:
            return {"name": self.name}

    opened: list[str] = []

    def record(name: str) -> nullcontext[None]:
        opened.append(name)
        return nullcontext()

    ranges = Ranges("fused", 1, 10, 10)
    monkeypatch.setattr(nvtx_ranges, "record_function", record)
    with ranges.reductions():
        for name in ("lm_head_sample_kernel", "reduce_candidates_kernel"):
            launches.launch_enter_hook(Metadata(name))
            launches.launch_exit_hook(Metadata(name))
    assert opened == [range_name("fused", 1, "reduction")]
