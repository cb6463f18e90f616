"""`bench --graph` without a GPU: rows of replays, their gate, what cannot be captured, what is put back."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsample_cli.errors import FsampleError
from fsample_cli.measure import graphs
from fsample_cli.measure.clocks import NoClocks
from fsample_cli.measure.cupti import CuptiStopwatch, Span, replays_us
from fsample_cli.measure.graphs import Captured, CudaCapture, NotCaptured
from fsample_cli.measure.session import replays
from fsample_cli.measure.settings import Settings
from fsample_cli.measure.sweep import Outcome, sweep
from fsample_cli.measure.timing import EventStopwatch, WallStopwatch, make_stopwatch
from fsample_cli.samplers import seeding
from fsample_cli.workloads import Workload
from fsample_kernels.distributed import RankError
from tests.cli.conftest import Fsample

WARM_UP, ITERATIONS = 2, 3


class Recorder:
    """Captures as a GPU would: a replay makes the call again, into the tensor of the capture."""

    def __init__(self, spoil: Callable[[int, Tensor], None] = lambda number, output: None) -> None:
        self.spoil = spoil  # (how many captures there were, what a replay wrote)
        self.replays: list[int] = []
        self.live = 0

    def __call__(self, call: graphs.Draw) -> Captured:
        number = len(self.replays)
        self.replays.append(0)
        self.live += 1
        eager = call()
        output = call().clone()

        def replay() -> None:
            assert self.live
            self.replays[number] += 1
            output.copy_(call())
            self.spoil(number, output)

        def free() -> None:
            self.live -= 1

        return Captured(eager, output, replay, free)


def run(capture: graphs.Capture, *names: str, batches: tuple[int, ...] = (4,)) -> Outcome:
    return sweep(
        names, Workload("custom", 600, 16, "fp32"), batches,
        Settings("cpu", "wall", WARM_UP, ITERATIONS, 1.0, 0, None, None, graph=True),
        make_stopwatch=WallStopwatch, flush=None, clock_reader=NoClocks(), capture=capture,
    )  # fmt: skip


def test_replays_are_timed_and_freed_after_each_batch() -> None:
    recorder = Recorder()
    outcome = run(recorder, "fused", "gemm", "multinomial-eager", "unfused", batches=(1, 4))
    assert outcome.problems == () and len(outcome.results) == 8
    assert all(row.timer == "wall+graph" and len(row.samples_us) == ITERATIONS for row in outcome.results)
    # the gate's, the warm-up's, the timed ones: nothing else is called once a graph is there
    assert recorder.replays == [1 + WARM_UP + ITERATIONS] * 8
    assert recorder.live == 0


def test_what_cannot_be_captured_is_a_note_and_the_run_goes_on() -> None:
    recorder = Recorder()

    def capture(call: graphs.Draw) -> Captured:
        if recorder.replays:  # the second sampler's
            recorder.replays.append(0)
            raise NotCaptured("it waits for the device")
        return recorder(call)

    outcome = run(capture, "fused", "multinomial-eager")
    fused, multinomial = outcome.results
    assert fused.median_us is not None
    assert multinomial.median_us is None and multinomial.note == "not captured: it waits for the device"
    assert outcome.problems == () and recorder.live == 0


@pytest.mark.parametrize(
    "name, wrong, said",
    [
        ("fused", lambda output: output.add_(1).remainder_(600), "4 of 4 ids differ from those outside"),
        ("unfused", lambda output: output[2].add_(1).remainder_(600), "1 of 4 ids differ from those outside"),
        ("multinomial-eager", lambda output: output[0].fill_(600), "ids must lie in [0, 600), got 600"),
        ("gemm", lambda output: output[0, 3].add_(3), "largest error of the logits"),
    ],
)
def test_a_replay_that_is_wrong_gets_no_time(name: str, wrong: Callable[[Tensor], Any], said: str) -> None:
    def spoil(number: int, output: Tensor) -> None:
        wrong(output)

    outcome = run(Recorder(spoil), name)
    (row,) = outcome.results
    assert row.median_us is None and row.note.startswith("failed its gate: ") and said in row.note
    assert len(outcome.problems) == 1


@pytest.mark.parametrize("name", ["fused", "multinomial-eager", "gemm"])
def test_a_replay_that_writes_nothing_is_seen(name: str) -> None:
    def capture(call: graphs.Draw) -> Captured:
        return Captured(call(), call(), lambda: None, lambda: None)

    (row,) = run(capture, name).results
    assert row.note.startswith("failed its gate: ")


def test_graphs_are_freed_when_the_run_ends_early() -> None:
    def spoil(number: int, output: Tensor) -> None:
        raise KeyboardInterrupt

    recorder = Recorder(spoil)
    with pytest.raises(KeyboardInterrupt):
        run(recorder, "fused")
    assert recorder.replays == [1] and recorder.live == 0


def test_a_cpu_is_refused_by_name(fsample: Fsample) -> None:
    for words in (("bench", "--graph"), ("bench", "--graph", "--features")):
        done = fsample(*words, "--device", "cpu")
        assert done.code == 2
        assert done.error == (
            "fsample: --graph replays CUDA graphs and needs a GPU, got --device cpu; leave out --graph"
        )


def test_records_say_what_was_replayed() -> None:
    assert replays()["graph"] is True and "position 0" in str(replays()["replays"])
    assert "graph" in EventStopwatch(graph=True).includes and "graph" not in EventStopwatch().includes
    assert make_stopwatch("events", True).includes == EventStopwatch(graph=True).includes


def test_a_graph_s_nodes_are_attributed_by_time_whatever_their_correlation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = SimpleNamespace(CONCURRENT_KERNEL=1, MEMCPY=2, MEMSET=3, RUNTIME=4, DRIVER=5)
    module = SimpleNamespace(ActivityKind=kind)
    monkeypatch.setitem(sys.modules, "cupti", SimpleNamespace(cupti=module))
    monkeypatch.setitem(sys.modules, "cupti.cupti", module)

    now = iter([10_000, 20_000, 50_000, 60_000])
    module.get_timestamp = lambda: next(now)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def record(what: int, start: int, end: int, graph: int = 0) -> SimpleNamespace:
        return SimpleNamespace(kind=what, start=start, end=end, correlation_id=3, name="k", graph_id=graph)

    # torch fills in its generator's state by launches of its own; between replays the cache is emptied
    records = [
        record(kind.DRIVER, 10_100, 10_200), record(kind.CONCURRENT_KERNEL, 11_000, 11_100),
        record(kind.MEMSET, 12_000, 12_100, 7), record(kind.CONCURRENT_KERNEL, 13_000, 19_000, 7),
        record(kind.CONCURRENT_KERNEL, 25_000, 45_000),
        # by its own clock a node may begin before its window does
        record(kind.MEMSET, 49_900, 50_100, 7), record(kind.CONCURRENT_KERNEL, 51_000, 55_900, 7),
    ]  # fmt: skip
    stopwatch = CuptiStopwatch(graph=True)
    for iteration in range(2):
        stopwatch.time(lambda i: None, iteration)
    stopwatch._completed(records)
    assert stopwatch.samples_us() == [7.0, 6.0]


@pytest.mark.parametrize(
    "nodes, said",
    [
        ([(11, 7), (12, 7), (51, 7)], "1 nodes of 1 graphs, others [2]"),
        ([(11, 7), (51, 7), (52, 8)], "2 nodes of 2 graphs"),
        ([(11, 7)], "0 nodes of 0 graphs"),
        ([(11, 0), (51, 0)], "0 nodes of 0 graphs"),
    ],
)
def test_records_that_fit_no_replay_are_an_error(nodes: list[tuple[int, int]], said: str) -> None:
    spans = [Span(start, start + 1, 3, "k", graph) for start, graph in nodes]
    with pytest.raises(FsampleError, match=re.escape(said)):
        replays_us([(10, 20), (50, 60)], spans)
    assert replays_us([(10, 20), (50, 60)], [Span(11, 2011, 3, "k", 7), Span(51, 551, 3, "k", 8)]) == [2, 0.5]


def test_nothing_is_seeded_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    generator = SimpleNamespace(manual_seed=seeded.append)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        seeding.seed_default_generator(torch.device("cuda", 0), 3, 4)
    assert seeded == [seeding.call_seed(3, 4)]


@pytest.mark.parametrize(
    "error, text",
    [
        (RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore"),
         "CUDA error: operation not permitted when stream is capturing"),
        (torch.OutOfMemoryError("Tried to allocate"), "out of GPU memory"),
        (RuntimeError(""), "RuntimeError"),
    ],
)  # fmt: skip
def test_what_a_capture_raises_is_a_reason_of_one_line(error: RuntimeError, text: str) -> None:
    found = graphs.reason(error)
    assert isinstance(found, NotCaptured) and str(found) == text


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), ValueError("no"), RankError("rank 1"), torch.distributed.DistError("gone")]
)
def test_what_is_no_capture_s_fault_is_passed_on(error: BaseException) -> None:
    assert graphs.reason(error) is error


class FakeCuda:
    """torch.cuda as far as a capture uses it: a capture in which something was raised ends with an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.capturing = False
        self.mode = 0
        self.lost = False  # after an error torch captures nothing any more
        self.broken = True  # an error breaks the capture, as one of CUDA does
        for name, value in {
            "synchronize": lambda device: None, "stream": self.on, "graph": self.graph,
            "graph_pool_handle": lambda: (0, 5), "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": self.watch,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None, reset=lambda: None),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: self.log.append("release"))
        self.capture = object.__new__(CudaCapture)
        self.capture.__dict__ |= {
            "_device": torch.device("cuda", 1),
            "_stream": "side",
            "_word": torch.ones(1),
        }

    def watch(self, mode: Any) -> None:
        self.mode = 2 if mode == "error" else mode

    def end(self, device: int, pool: tuple[int, int]) -> None:
        self.log.append(f"end {device} {pool}")
        raise RuntimeError("not recording")  # a torch that had ended it itself

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        self.log.append(f"on {stream}")
        try:
            yield
        finally:
            self.log.append("back")

    @contextmanager
    def graph(
        self, graph: object, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        assert stream == "side" and not self.mode
        if self.lost:
            raise RuntimeError("captures_underway")
        self.log.append("capture" if pool else "mend")
        self.capturing = True
        try:
            yield
        except BaseException:
            if not self.broken:
                raise
            self.lost = "lost" in self.log
            raise RuntimeError("operation failed due to a previous error during capture") from None
        finally:
            self.capturing = False

    def raising(self, error: BaseException) -> Tensor:
        if self.capturing:
            raise error
        return torch.zeros(2)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_call_is_warmed_up_watched_and_captured_on_one_stream(cuda: FakeCuda) -> None:
    modes: list[tuple[int, bool]] = []

    def call() -> Tensor:
        modes.append((cuda.mode, cuda.capturing))
        return torch.full((2,), len(modes))

    found = cuda.capture(call)
    assert modes == [(0, False)] * graphs.WARM_UP + [(2, False), (0, True)]
    assert found.eager.tolist() == [graphs.WARM_UP + 1] * 2 and found.output.tolist() == [5] * 2
    assert cuda.log == ["on side", "capture", "back"] and cuda.mode == 0


def test_a_call_that_waits_is_found_before_its_capture(cuda: FakeCuda) -> None:
    def call() -> Tensor:
        if cuda.mode:
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.zeros(2)

    with pytest.raises(NotCaptured, match="it waits for the device"):
        cuda.capture(call)
    assert cuda.log == ["on side", "back"] and cuda.mode == 0


def test_after_a_failed_capture_allocator_generator_and_stream_are_put_back(cuda: FakeCuda) -> None:
    with pytest.raises(NotCaptured, match="^not permitted when stream is capturing$"):
        cuda.capture(lambda: cuda.raising(RuntimeError("not permitted when stream is capturing")))
    assert cuda.log == ["on side", "capture", "end 1 (0, 5)", "release", "mend", "back"]


def test_a_capture_that_ended_in_order_is_left_to_its_graph(cuda: FakeCuda) -> None:
    """It gives its memory back itself, and a second time would end the process."""
    cuda.broken = False
    with pytest.raises(NotCaptured, match="^a generator of its own$"):
        cuda.capture(lambda: cuda.raising(RuntimeError("a generator of its own")))
    assert cuda.log == ["on side", "capture", "back"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no")])
def test_other_errors_leave_a_capture_as_they_are(cuda: FakeCuda, error: BaseException) -> None:
    with pytest.raises(type(error)) as found:
        cuda.capture(lambda: cuda.raising(error))
    assert found.value is error


def test_a_torch_that_captures_nothing_any_more_ends_the_run(cuda: FakeCuda) -> None:
    cuda.log.append("lost")
    with pytest.raises(FsampleError, match="captures nothing since: captures_underway; leave out --graph"):
        cuda.capture(lambda: cuda.raising(RuntimeError("no")))
