"""Where the time of a traced run went: per sampler and stage, and per kernel (GPU) or operator (CPU) inside
it.

Reads the Chrome trace that torch.profiler writes. A GPU kernel belongs to the innermost `fsample` range that
its launch lies in; on a CPU-only trace the self time of each operator takes the place of kernels.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from fsample_cli.measure.nvtx_ranges import PREPARE, WARM_UP, parse_range
from fsample_cli.results import TraceResult

DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
SMALL_SHARE = 0.01  # of the sampler's time: names below it share one row a stage
LAUNCH_CATEGORIES = {"cuda_runtime", "cuda_driver"}


@dataclass(frozen=True)
class Range:
    stage: str
    sampler: str
    batch: int
    start: float  # us
    end: float


@dataclass(frozen=True)
class Piece:
    """One kernel, or one operator's self time, in one range."""

    where: Range
    name: str
    us: float


def kernel_times(
    trace: Mapping[str, Any], ran: Mapping[str, tuple[str, str | None]]
) -> tuple[TraceResult, ...]:
    """Rows in the order of the run: a row for each stage, then its kernels, the longest first and the
    smallest as one row.

    `ran` maps the names in the ranges to (sampler, algorithm); ranges of others are left out. Shares are of
    the sampler's time at that batch without prepare and warm-up. Stages that ran but launched nothing on the
    device have host time and say so.
    """
    events = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]
    ranges = [r for r in _ranges(events) if r.sampler in ran]
    pieces = _device_pieces(events, ranges) or _operator_pieces(events, ranges)
    inside: dict[tuple[str, int, str], list[Piece]] = defaultdict(list)
    for piece in pieces:
        inside[piece.where.sampler, piece.where.batch, piece.where.stage].append(piece)
    totals: dict[tuple[str, int], float] = defaultdict(float)
    for (sampler, batch, stage), found in inside.items():
        if stage not in (PREPARE, WARM_UP):
            totals[sampler, batch] += sum(piece.us for piece in found)
    rows: list[TraceResult] = []
    for sampler, batch, stage in dict.fromkeys((r.sampler, r.batch, r.stage) for r in ranges):
        known_as = ran[sampler]
        mine = [r for r in ranges if (r.sampler, r.batch, r.stage) == (sampler, batch, stage)]
        if stage in (PREPARE, WARM_UP):
            lengths = [r.end - r.start for r in mine]
            rows.append(_row(stage, known_as, batch, stage, lengths, None, "host time"))
            continue
        found = inside[sampler, batch, stage]
        per_range = [sum(piece.us for piece in found if piece.where is r) for r in mine]
        total = totals[sampler, batch]
        rows.append(_row(stage, known_as, batch, stage, per_range, total, ""))
        by_name: dict[str, list[float]] = defaultdict(list)
        for piece in found:
            by_name[short_name(piece.name)].append(piece.us)
        small = [name for name, times in by_name.items() if sum(times) < SMALL_SHARE * total]
        if len(small) > 1:
            merged = [us for name in small for us in by_name.pop(name)]
            by_name[f"{len(small)} others"] = merged
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1])):
            rows.append(_row(stage, known_as, batch, name, times, total, ""))
    return tuple(rows)


def short_name(name: str) -> str:
    """A kernel's name without return type, template arguments and parameters: at::native::reduce_kernel."""
    bare = re.sub(r"\(anonymous namespace\)::", "", name).removeprefix("void ")
    return re.split(r"[<(]", bare, maxsplit=1)[0].strip() or name


def _row(
    stage: str,
    known_as: tuple[str, str | None],
    batch: int,
    name: str,
    times: Sequence[float],
    total: float | None,
    note: str,
) -> TraceResult:
    return TraceResult(
        stage=stage,
        sampler=known_as[0],
        algorithm=known_as[1],
        batch=batch,
        name=name,
        calls=len(times),
        total_us=float(sum(times)),
        median_us=float(numpy.median(times)) if times else 0.0,
        share=None if not total else float(sum(times)) / total,
        note=note,
    )


def _ranges(events: Sequence[Mapping[str, Any]]) -> list[Range]:
    found = []
    for event in events:
        parsed = parse_range(event["name"]) if event.get("cat") == "user_annotation" else None
        if parsed is not None:
            start = float(event["ts"])
            found.append(Range(*parsed, start, start + float(event["dur"])))
    return sorted(found, key=lambda r: (r.start, -r.end))


def _innermost(ranges: Sequence[Range], time: float) -> Range | None:
    """Ranges nest on the one host thread, so the one that started last of those around `time` is the
    innermost.
    """
    around = [r for r in ranges if r.start <= time <= r.end]
    return around[-1] if around else None


def _device_pieces(events: Sequence[Mapping[str, Any]], ranges: Sequence[Range]) -> list[Piece]:
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
    }
    pieces = []
    for event in events:
        launch = launches.get(event.get("args", {}).get("correlation"))
        if event.get("cat") in DEVICE_CATEGORIES and launch is not None:
            where = _innermost(ranges, float(launch["ts"]))
            if where is not None:
                pieces.append(Piece(where, event["name"], float(event["dur"])))
    return pieces


def _operator_pieces(events: Sequence[Mapping[str, Any]], ranges: Sequence[Range]) -> list[Piece]:
    """Self time of operators: duration minus that of the operators they call."""
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event.get("tid")].append(event)
    pieces = []
    for operators in threads.values():
        own = [float(event["dur"]) for event in operators]
        order = sorted(range(len(operators)), key=lambda k: (float(operators[k]["ts"]), -own[k]))
        open_: list[tuple[float, int]] = []
        for k in order:
            start = float(operators[k]["ts"])
            while open_ and open_[-1][0] <= start:
                open_.pop()
            if open_:
                own[open_[-1][1]] -= float(operators[k]["dur"])
            open_.append((start + float(operators[k]["dur"]), k))
        for k in order:
            where = _innermost(ranges, float(operators[k]["ts"]))
            if where is not None:
                pieces.append(Piece(where, str(operators[k]["name"]), max(own[k], 0.0)))
    return pieces
