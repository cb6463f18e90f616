"""How times are taken: one stopwatch for all samplers of a run, iterations interleaved, raw samples kept.

Protocol, in the order of `time_interleaved`: warm-up calls of every sampler; on a GPU a busy stretch that
brings the clocks up; then rounds of one iteration of every sampler, the order rotating from round to round,
the cache emptied before each, compilations counted. No sample is filtered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy
import torch

from fsample_cli.errors import MissingError, UsageError
from fsample_cli.measure.clocks import ClockReader, ClockReading
from fsample_cli.measure.compilations import CompilationCounter
from fsample_cli.measure.team import SOLO, Solo
from fsample_kernels import guard

BUSY_MS = 100  # clocks of an idle GPU need about this long to come up

Call = Callable[[int], object]  # iteration number -> whatever the sampler returns


class Stopwatch(Protocol):
    """Times one call after another; the samples are known once the block is left."""

    name: str
    includes: str  # what a sample holds, in words

    def __enter__(self) -> Stopwatch: ...

    def __exit__(self, *exception: object) -> None: ...

    def time(self, call: Call, iteration: int) -> None: ...

    def samples_us(self) -> list[float]: ...


class WallStopwatch:
    """Wall clock around a call that is finished when it returns (CPU)."""

    name = "wall"
    includes = "wall clock from call to return, Python overhead included"

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._samples: list[float] = []

    def __enter__(self) -> WallStopwatch:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def time(self, call: Call, iteration: int) -> None:
        start = self._now_ns()
        call(iteration)
        self._samples.append((self._now_ns() - start) / 1e3)

    def samples_us(self) -> list[float]:
        return self._samples


class EventStopwatch:
    """CUDA events around a call. The flush keeps the GPU busy, so that the host runs ahead of it."""

    name = "events"

    def __init__(self, graph: bool = False) -> None:
        self.includes = (
            "CUDA events: a graph's replay, with what torch hands its generator's state over by"
            if graph
            else "CUDA events: kernels, gaps between them, and launch work that the flush does not hide"
        )
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._samples: list[float] = []

    def __enter__(self) -> EventStopwatch:
        torch.cuda.synchronize()
        return self

    def __exit__(self, *exception: object) -> None:
        torch.cuda.synchronize()
        self._samples = [1e3 * start.elapsed_time(end) for start, end in self._pairs]

    def time(self, call: Call, iteration: int) -> None:
        start, end = _event(), _event()
        start.record()
        call(iteration)
        end.record()
        self._pairs.append((start, end))

    def samples_us(self) -> list[float]:
        return self._samples


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def choose_timer(requested: str, device: str) -> str:
    """The timer a run uses, from what --timer took. `auto`: cupti where it can run, else CUDA events; the
    wall clock on a CPU.

    Raises MissingError when cupti is asked for by name and cannot run (never a silent second choice),
    UsageError for a GPU timer on the CPU or the other way round, and in checked mode.
    """
    from fsample_cli.measure import cupti

    if guard.active():
        raise UsageError(f"{guard.VARIABLE} would have the checks of every call timed", "unset it")
    if device == "cpu":
        if requested in ("cupti", "events"):
            raise UsageError(
                f"--timer {requested} needs a GPU, the run is on the CPU", "use --timer wall or auto"
            )
        return "wall"
    if requested == "wall":
        raise UsageError(
            "--timer wall would time launches only on a GPU", "use --timer events, cupti or auto"
        )
    if requested == "events":
        return "events"
    problem = cupti.why_not()
    if problem is None:
        return "cupti"
    if requested == "cupti":
        raise MissingError(f"--timer cupti cannot run: {problem.reason}", problem.remedy)
    return "events"


def make_stopwatch(timer: str, graph: bool = False) -> Stopwatch:
    """A fresh stopwatch of the kind that `choose_timer` returned; graph: calls are replays of CUDA graphs."""
    if timer == "cupti":
        from fsample_cli.measure.cupti import CuptiStopwatch

        return CuptiStopwatch(graph)
    return EventStopwatch(graph) if timer == "events" else WallStopwatch()


def keep_busy(device: torch.device, milliseconds: float = BUSY_MS) -> None:
    """Run matmuls for at least that long, so that timing starts at working clocks. Nothing on a CPU."""
    if device.type != "cuda":
        return
    square = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        for _ in range(16):
            square @ square
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Timed:
    """One batch of timed calls: `samples_us[k]` belongs to `calls[k]`, in the order taken."""

    samples_us: tuple[tuple[float, ...], ...]
    compilations: tuple[
        str, ...
    ]  # what was compiled between the first and the last timed iteration: should be none
    clocks: tuple[ClockReading, ...]
    fastest_us: tuple[
        tuple[float, ...], ...
    ]  # the same calls on the fastest rank; `samples_us` on the slowest


def time_interleaved(
    calls: Sequence[Call],
    *,
    stopwatch: Stopwatch,
    device: torch.device,
    warmup: int,
    iterations: int,
    flush: Callable[[], None] | None,
    clock_reader: ClockReader,
    tick: Callable[[], None] = lambda: None,
    team: Solo = SOLO,
) -> Timed:
    """Time `iterations` calls of each, A B C B C A C A B ..., every one with its own iteration number.

    Iteration numbers run on from the warm-up's, so that no call repeats another's noise. `tick` is called
    after each round, for a progress bar. `flush` empties the cache and is never inside the measured span.
    With a team of ranks they start each call together, and a sample is the time of the slowest.
    """
    flush = team.before_call(flush)
    for i in range(warmup):
        for call in calls:
            if flush is not None:
                flush()
            call(i)
    keep_busy(device)
    order = list(range(len(calls)))
    taken: list[int] = []
    clocks: list[ClockReading] = []
    with stopwatch, CompilationCounter() as counter:
        for i in range(iterations):
            first = i % max(len(calls), 1)
            for k in order[first:] + order[:first]:
                if flush is not None:
                    flush()
                stopwatch.time(calls[k], warmup + i)
                taken.append(k)
            if i % max(iterations // 4, 1) == 0:
                clocks += clock_reader.read()
            tick()
    samples: list[list[float]] = [[] for _ in calls]
    for k, sample in zip(taken, stopwatch.samples_us(), strict=True):
        samples[k].append(sample)
    slowest, fastest = team.over_ranks(tuple(map(tuple, samples)))
    return Timed(slowest, tuple(counter.events), tuple(clocks), fastest)


@dataclass(frozen=True)
class Quantiles:
    """Microseconds."""

    median_us: float
    p10_us: float
    p90_us: float


def quantiles(samples_us: Sequence[float]) -> Quantiles:
    """Median, 10th and 90th percentile with linear interpolation: 1, 2, ..., 100 give 50.5, 10.9, 90.1."""
    p10, median, p90 = numpy.percentile(samples_us, [10, 50, 90])
    return Quantiles(median_us=float(median), p10_us=float(p10), p90_us=float(p90))
