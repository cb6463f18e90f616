"""Kernel times from CUPTI activity records: span = last kernel end - first kernel start of one iteration.

The span leaves out the launch latency of the first kernel and includes the gaps between kernels, where an
eager baseline waits for the host. Kernels are assigned to an iteration through the host-side launch records
(correlation ids), so that no drift between host and device clocks can move one into a neighbour. Nodes of a
graph cannot be: before CUDA 13.1 Update 1 CUPTI gets the correlation of graph launches wrong in every session
but the first (its release notes). They go by time, and each replay must hold the same number of them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from fsample_cli.errors import FsampleError
from fsample_cli.measure.nsys import UNDER_NSYS
from fsample_cli.measure.timing import Call

BUFFER_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Problem:
    reason: str
    remedy: str


def inside_profiler() -> str | None:
    """The profiler that this process runs under and that holds CUPTI already, or None."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    if any(name.startswith(("NSYS_", UNDER_NSYS)) for name in os.environ) or "ToolsInjection" in preloaded:
        return "nsys"
    if "CUDA_INJECTION64_PATH" in os.environ or "NVTX_INJECTION64_PATH" in os.environ:
        return "a CUDA profiler"
    return None


def why_not() -> Problem | None:
    """Why CUPTI cannot time here, found before any run, or None."""
    profiler = inside_profiler()
    if profiler is not None:
        return Problem(
            f"{profiler} holds CUPTI, and only one client may run at a time",
            "use --timer events under a profiler",
        )
    try:
        importlib.import_module("cupti.cupti")
        major = int(importlib.metadata.version("cupti-python").split(".")[0])
    except ModuleNotFoundError as error:
        return Problem(f"module {error.name!r} is missing", "pip install cupti-python, or --timer events")
    except (ImportError, RuntimeError, importlib.metadata.PackageNotFoundError) as error:
        return Problem(
            f"cupti-python does not load: {error}", "install the cupti-python of this CUDA version"
        )
    if major < 13:
        return Problem(f"cupti-python {major}.x is too old", "pip install 'cupti-python>=13'")
    return None


@dataclass(frozen=True)
class Launch:
    """A host-side API call; `start` in ns on CUPTI's clock."""

    start: int
    correlation: int


@dataclass(frozen=True)
class Span:
    """A kernel, copy or memset on the device, ns."""

    start: int
    end: int
    correlation: int
    name: str
    graph: int = 0  # the graph whose node it is; 0: launched by itself


@dataclass
class Activities:
    launches: list[Launch] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


def spans_us(windows: Iterable[tuple[int, int]], activities: Activities) -> list[float]:
    """Per window of host time: from the first start to the last end of everything launched in it, in us.

    Raises FsampleError for a window without device work: a time of 0 would be an invention.
    """
    launches = sorted(activities.launches, key=lambda launch: launch.start)
    starts = [launch.start for launch in launches]
    by_correlation: dict[int, list[Span]] = defaultdict(list)
    for span in activities.spans:
        by_correlation[span.correlation].append(span)
    times = []
    for begin, end in windows:
        ids = {
            launch.correlation for launch in launches[bisect_left(starts, begin) : bisect_right(starts, end)]
        }
        found = [span for correlation in ids for span in by_correlation.get(correlation, ())]
        if not found:
            raise FsampleError(
                "CUPTI recorded no kernel for a timed iteration",
                hint="another profiler may be active: --timer events",
            )
        times.append((max(span.end for span in found) - min(span.start for span in found)) / 1e3)
    return times


def replays_us(windows: Sequence[tuple[int, int]], spans: Iterable[Span]) -> list[float]:
    """Per window of host time: from the first start to the last end of the nodes of the graph replayed in it.

    The device is idle at both ends of a window, so a node belongs to the window whose time is nearer. What is
    launched between windows, or by torch before the graph, is no node. Raises FsampleError where a window has
    nodes of several graphs, or not as many as that graph's other replays.
    """
    middles = [(before[1] + after[0]) // 2 for before, after in pairwise(windows)]
    nodes: list[list[Span]] = [[] for _ in windows]
    for span in spans:
        if span.graph:
            nodes[bisect_right(middles, span.start)].append(span)
    of_graph: dict[int, int] = {}
    for found in nodes:
        graphs = {span.graph for span in found}
        if len(graphs) != 1 or of_graph.setdefault(min(graphs), len(found)) != len(found):
            raise FsampleError(
                "CUPTI's records do not fit the replays of a graph: a replay has "
                f"{len(found)} nodes of {len(graphs)} graphs, others {sorted(of_graph.values())}",
                "use --timer events",
            )
    return [(max(span.end for span in found) - min(span.start for span in found)) / 1e3 for found in nodes]


class CuptiStopwatch:
    """Synchronises before and after each call, so that one iteration's kernels never overlap the next
    one's flush.

    Replays of graphs (`graph`): what torch launches before one, its generator's state, is left out.
    """

    name = "cupti"

    def __init__(self, graph: bool = False) -> None:
        self._graph = graph
        span = "CUPTI span of a graph's replay" if graph else "CUPTI span"
        self.includes = f"{span}: first kernel start to last kernel end, gaps between kernels included"
        self._cupti: Any = importlib.import_module("cupti.cupti")
        kind = self._cupti.ActivityKind
        self._device_kinds = (kind.CONCURRENT_KERNEL, kind.MEMCPY, kind.MEMSET)
        self._kinds = (kind.RUNTIME, kind.DRIVER, *self._device_kinds)
        self._activities = Activities()
        self._windows: list[tuple[int, int]] = []

    def __enter__(self) -> CuptiStopwatch:
        torch.cuda.synchronize()
        for kind in self._kinds:
            self._cupti.activity_enable(kind)
        self._cupti.activity_register_callbacks(lambda: (BUFFER_BYTES, 0), self._completed)
        return self

    def __exit__(self, *exception: object) -> None:
        torch.cuda.synchronize()
        self._cupti.activity_flush_all(0)
        for kind in self._kinds:
            self._cupti.activity_disable(kind)
        self._cupti.finalize()

    def time(self, call: Call, iteration: int) -> None:
        torch.cuda.synchronize()
        begin = self._cupti.get_timestamp()
        call(iteration)
        if self._graph:
            torch.cuda.synchronize()
        end = self._cupti.get_timestamp()
        torch.cuda.synchronize()
        self._windows.append((begin, end))

    def samples_us(self) -> list[float]:
        if self._graph:
            return replays_us(self._windows, self._activities.spans)
        return spans_us(self._windows, self._activities)

    def _completed(self, records: list[Any]) -> None:
        for record in records:
            if record.kind in self._device_kinds:
                name = record.name if record.kind == self._device_kinds[0] else "copy or memset"
                self._activities.spans.append(
                    Span(record.start, record.end, record.correlation_id, name, record.graph_id)
                )
            else:
                self._activities.launches.append(Launch(record.start, record.correlation_id))
