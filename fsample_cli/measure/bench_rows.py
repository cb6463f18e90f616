"""From samples to a record's row: medians, bytes, rooflines, ratios, and what ranks add."""

from __future__ import annotations

from dataclasses import replace

from fsample_cli.hardware import roofline_us
from fsample_cli.measure.clocks import ClockReading
from fsample_cli.measure.settings import Settings
from fsample_cli.measure.timing import quantiles
from fsample_cli.measure.traffic import floor, traffic
from fsample_cli.results import BenchResult
from fsample_cli.samplers.protocol import Sampler
from fsample_cli.workloads import Workload


def make_row(
    sampler: Sampler,
    note: str,
    samples: tuple[float, ...],
    batch: int,
    workload: Workload,
    settings: Settings,
    medians: dict[str, float],
    clocks: tuple[ClockReading, ...],
) -> BenchResult:
    """The row of one sampler. `note` says why it has no samples; medians: of every sampler at this batch."""
    moved, least = traffic(sampler.name, workload, batch), floor(workload, batch)
    roof = roofline_us(least.bytes, least.flops, settings.gpu, workload.dtype)
    spread = quantiles(samples) if samples else None
    median = None if spread is None else spread.median_us
    gemm, base = medians.get("gemm"), medians.get(pick_baseline(settings.baseline, medians) or "")
    reasons = sorted({reason for reading in clocks for reason in reading.reasons})
    return BenchResult(
        sampler=sampler.name,
        algorithm=sampler.algorithm,
        implementation=sampler.implementation,
        batch=batch,
        timer=settings.timed_by,
        iterations=len(samples),
        samples_us=samples,
        median_us=median,
        p10_us=None if spread is None else spread.p10_us,
        p90_us=None if spread is None else spread.p90_us,
        bytes=None if moved is None else moved.bytes,
        flops=None if moved is None else moved.flops,
        roofline_us=roof,
        ratio_to_gemm=None if median is None or gemm is None else median / gemm,
        ratio_to_roofline=None if median is None or roof is None else median / roof,
        speedup=None if median is None or base is None else base / median,
        note=note or (f"GPU slowed down: {', '.join(reasons)}" if reasons else ""),
        clock_sm_mhz=min((reading.sm_mhz for reading in clocks), default=None),
        throttled=bool(reasons) if clocks else None,
    )


def over_ranks(row: BenchResult, fastest: tuple[float, ...]) -> BenchResult:
    """The row with what the fastest rank took; unchanged where there is one process."""
    if not fastest:
        return row
    skew = [slow - fast for slow, fast in zip(row.samples_us, fastest, strict=True)]
    return replace(row, fastest_rank_us=quantiles(fastest).median_us, skew_us=quantiles(skew).median_us)


def across_ranks(row: BenchResult, medians: dict[str, float], ranks: int) -> BenchResult:
    """The row beside the ideal of its batch and the draw of a shard alone, where those were timed."""
    if row.median_us is None:
        return row
    whole, alone = medians.get("one-rank"), medians.get("shard")
    exchanged = row.sampler == "fused" and alone is not None
    return replace(
        row,
        minimum_us=min(row.samples_us),
        ideal_us=None if whole is None else whole / ranks,
        exchange_us=row.median_us - alone if exchanged and alone is not None else None,
    )


def pick_baseline(requested: str | None, medians: dict[str, float]) -> str | None:
    """What speed-ups refer to: the sampler asked for, else fi2, else multinomial, among those with a time."""
    wanted = ("fi2", "multinomial") if requested is None else (requested,)
    return next((name for name in wanted if name in medians), None)
