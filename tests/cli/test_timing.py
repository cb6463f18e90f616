"""Stopwatches, the interleaved protocol, the choice of a timer: with fake clocks and records, no GPU."""

from __future__ import annotations

import importlib

import pytest
import torch

from fsample_cli.errors import FsampleError, MissingError, UsageError
from fsample_cli.measure import cold_cache
from fsample_cli.measure.clocks import ClockReading, NoClocks
from fsample_cli.measure.compilations import CompilationCounter
from fsample_cli.measure.cupti import Activities, Launch, Span, spans_us
from fsample_cli.measure.timing import Call, Timed, WallStopwatch, choose_timer, quantiles, time_interleaved
from fsample_kernels import checked

CPU = torch.device("cpu")


class FakeClock:
    """Nanoseconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def run(
    calls: list[Call], clock: FakeClock, *, warmup: int = 2, iterations: int = 4, flush_ns: int = 0
) -> Timed:
    def flush() -> None:
        clock.now += flush_ns

    return time_interleaved(
        calls,
        stopwatch=WallStopwatch(clock),
        device=CPU,
        warmup=warmup,
        iterations=iterations,
        flush=flush,
        clock_reader=NoClocks(),
    )


def test_quantiles_come_under_their_own_names() -> None:
    found = quantiles([float(k) for k in range(100, 0, -1)])
    assert (found.median_us, found.p10_us, found.p90_us) == pytest.approx((50.5, 10.9, 90.1))


def test_samples_are_per_call_and_without_the_flush() -> None:
    clock = FakeClock()

    def taking(nanoseconds: int) -> Call:
        def call(iteration: int) -> None:
            clock.now += nanoseconds

        return call

    timed = run([taking(1_000), taking(7_000)], clock, flush_ns=1_000_000)
    assert timed.samples_us == ((1.0,) * 4, (7.0,) * 4)


def test_iterations_interleave_rotate_and_never_repeat_a_position() -> None:
    log: list[tuple[str, int]] = []
    names = ["a", "b", "c"]

    def logging(name: str) -> Call:
        return lambda iteration: log.append((name, iteration))

    run([logging(name) for name in names], FakeClock(), warmup=2, iterations=3)
    timed = log[2 * 3 :]
    assert "".join(name for name, _ in timed) == "abcbcacab"
    for name in names:
        positions = [position for seen, position in log if seen == name]
        assert positions == [0, 1, 2, 3, 4]  # warm-up first, then on


def test_no_calls_is_no_samples() -> None:
    assert run([], FakeClock()).samples_us == ()


def test_compilations_inside_the_timed_section_are_counted_and_the_listener_put_back() -> None:
    compilation = importlib.import_module("triton.knobs").compilation
    heard: list[bool] = []

    def listener(
        *, src: object, metadata: object, metadata_group: object, times: object, cache_hit: bool
    ) -> None:
        heard.append(cache_hit)

    def compiling(iteration: int) -> None:
        if compilation.listener is not None:
            compilation.listener(
                src=None, metadata={}, metadata_group={}, times=None, cache_hit=iteration == 3
            )

    compilation.listener = listener
    try:
        timed = run([compiling], FakeClock(), warmup=2, iterations=2)
        assert compilation.listener is listener
    finally:
        compilation.listener = None
    # the two of the warm-up are not counted; whoever listened before still hears everything
    assert timed.compilations == ("triton: a kernel compiled", "triton: a kernel loaded from the disk cache")
    assert heard == [False, False, False, True]


def test_a_retraced_frame_counts_as_a_compilation() -> None:
    function = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    function(torch.zeros(2))
    with CompilationCounter() as counter:
        function(torch.zeros(2))
    assert counter.events == []
    with CompilationCounter() as counter:
        function(torch.zeros(3))
    assert counter.events == ["torch.compile: a frame was traced again"]


@pytest.mark.parametrize(
    ("timer", "device", "error"),
    [
        ("cupti", "cpu", UsageError),
        ("events", "cpu", UsageError),
        ("wall", "cuda", UsageError),
    ],
)
def test_a_timer_that_does_not_fit_is_refused(timer: str, device: str, error: type[FsampleError]) -> None:
    with pytest.raises(error, match="--timer"):
        choose_timer(timer, device)


def test_checked_calls_are_not_timed() -> None:
    with checked(), pytest.raises(UsageError, match="FSAMPLE_CHECK would have the checks .* timed; unset it"):
        choose_timer("auto", "cpu")


def test_cupti_missing_is_an_error_when_asked_for_and_events_when_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="cupti")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(
        MissingError, match=r"--timer cupti cannot run: module 'cupti' is missing; pip install"
    ):
        choose_timer("cupti", "cuda")
    assert choose_timer("auto", "cuda") == "events"
    assert choose_timer("auto", "cpu") == "wall"


@pytest.mark.parametrize(
    "variable", ["NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "FSAMPLE_UNDER_NSYS"]
)
def test_a_second_cupti_client_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(MissingError, match="only one client"):
        choose_timer("cupti", "cuda")
    assert choose_timer("auto", "cuda") == "events"


def test_spans_follow_correlations_not_timestamps() -> None:
    # the second window's kernel starts, by its drifting clock, before the first window's last one ends
    activities = Activities(
        launches=[Launch(105, 1), Launch(106, 2), Launch(205, 3), Launch(150, 9)],
        spans=[
            Span(1_000, 4_000, 1, "a"),
            Span(5_000, 9_000, 2, "b"),
            Span(8_000, 8_500, 3, "a"),
            Span(0, 1, 9, "flush"),
        ],
    )
    assert spans_us([(100, 110), (200, 210)], activities) == [8.0, 0.5]


def test_a_window_without_kernels_is_an_error_and_not_a_zero() -> None:
    activities = Activities(launches=[Launch(105, 1)], spans=[])
    with pytest.raises(FsampleError, match="no kernel"):
        spans_us([(100, 110)], activities)


def test_the_flush_mode_is_named_and_bounded_on_a_cpu() -> None:
    assert 2**25 <= cold_cache.flush_bytes(CPU) <= cold_cache.CPU_FLUSH_LIMIT
    assert cold_cache.describe(CPU, cold=True).startswith("cold cache: ")
    assert cold_cache.describe(CPU, cold=False).startswith("warm cache")
    cold_cache.make_flush(CPU)()


def test_clock_readings_are_taken_beside_the_iterations() -> None:
    class Throttling:
        def read(self) -> list[ClockReading]:
            return [ClockReading(1200, ("power cap",))]

    timed = time_interleaved(
        [lambda i: None],
        stopwatch=WallStopwatch(),
        device=CPU,
        warmup=0,
        iterations=8,
        flush=None,
        clock_reader=Throttling(),
    )
    assert len(timed.clocks) == 4 and len(timed.samples_us[0]) == 8
