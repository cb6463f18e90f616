"""Which fields each kind of record shows, under which heading and in which words: for tables and markdown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsample_cli.records import Record

MISSING = "-"


@dataclass(frozen=True)
class Column:
    heading: str
    value: Callable[[Any], str]  # takes a result row
    left: bool = False


def number(value: float | None, digits: int) -> str:
    return MISSING if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def microseconds(value: float | None) -> str:
    """At least three digits, whatever the size: 0.123, 12.3, 283, 152,345."""
    if value is None or not math.isfinite(value):
        return MISSING
    return number(value, 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3)


def ratio(value: float | None) -> str:
    return number(value, 3 if value is not None and abs(value) < 10 else 1)


def percent(value: float | None) -> str:
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.2f}%"


def p_value(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:.4f}" if value >= 1e-3 or value == 0 else f"{value:.1e}"


def significant(value: float | None) -> str:
    return MISSING if value is None or not math.isfinite(value) else f"{value:.3g}"


def sampler(row: Any) -> str:
    return f"{row.sampler}:{row.algorithm}" if row.algorithm else str(row.sampler)


def spread(row: Any) -> str:
    return MISSING if row.p10_us is None else f"{microseconds(row.p10_us)}..{microseconds(row.p90_us)}"


BATCH = Column("B", lambda r: str(r.batch))
SAMPLER = Column("sampler", sampler, left=True)
STATISTIC = (
    Column("test", lambda r: r.test, left=True),
    SAMPLER,
    Column("case", lambda r: r.case, left=True),
    Column("stat", lambda r: number(r.statistic, 1)),
    Column("dof", lambda r: MISSING if r.dof is None else str(r.dof)),
    Column("p", lambda r: p_value(r.p_value)),
)

TP_MODEL = (
    BATCH,
    Column("ranks", lambda r: str(r.tp)),
    Column("logit MB", lambda r: number(r.link_bytes_gather / 1e6, 2)),
    Column("p2p KB", lambda r: number(r.link_bytes_p2p / 1e3, 2)),
    Column("gather us", lambda r: microseconds(r.predicted_gather_us)),
    Column("NCCL us", lambda r: microseconds(r.predicted_candidates_us)),
    Column("p2p us", lambda r: microseconds(r.predicted_p2p_us)),
    Column("speed-up", lambda r: ratio(r.predicted_speedup)),
    Column("scaling", lambda r: ratio(r.scaling)),
)

COLUMNS: dict[str, tuple[Column, ...]] = {
    "bench": (
        BATCH,
        SAMPLER,
        Column("median us", lambda r: microseconds(r.median_us)),
        Column("p10..p90", spread),
        Column("/ GEMM", lambda r: ratio(r.ratio_to_gemm)),
        Column("/ roof", lambda r: ratio(r.ratio_to_roofline)),
        Column("speed-up", lambda r: ratio(r.speedup)),
    ),
    "bench --tp": (
        BATCH,
        SAMPLER,
        Column("median us", lambda r: microseconds(r.median_us)),
        Column("min us", lambda r: microseconds(r.minimum_us)),
        Column("exchange", lambda r: microseconds(r.exchange_us)),
        Column("/ GEMM", lambda r: ratio(r.ratio_to_gemm)),
        Column("ideal us", lambda r: microseconds(r.ideal_us)),
        Column("speed-up", lambda r: ratio(r.speedup)),
    ),
    "io-model": (
        BATCH,
        Column("sampler", lambda r: r.sampler, left=True),
        Column("MB", lambda r: number(None if r.bytes is None else r.bytes / 1e6, 1)),
        Column("exact", lambda r: ratio(r.predicted_speedup)),
        Column("1+2B/D", lambda r: ratio(r.predicted_speedup_simple)),
        Column("median us", lambda r: microseconds(r.median_us)),
        Column("overhead", lambda r: percent(r.measured_overhead)),
        Column("meas/pred", lambda r: ratio(r.measured_over_predicted)),
    ),
    "tp-model": TP_MODEL,
    "tp-model and the paper's": (
        *TP_MODEL,
        Column("paper us", lambda r: microseconds(r.paper_us)),
        Column("its speed-up", lambda r: ratio(r.paper_speedup)),
        Column("its scaling", lambda r: ratio(r.paper_scaling)),
    ),
    "verify": (
        *STATISTIC,
        Column("verdict", lambda r: r.verdict, left=True),
    ),
    "verify --details": (
        *STATISTIC,
        Column("Holm", lambda r: p_value(r.p_adjusted)),
        Column("draws", lambda r: f"{r.draws:,}"),
        Column("sees", lambda r: significant(r.seen_at_80)),  # with power 0.8
        Column("less", lambda r: significant(r.deficit_at_80)),
        Column("of", lambda r: r.effect or MISSING, left=True),
        Column("s", lambda r: number(r.seconds, 2)),
        Column("verdict", lambda r: r.verdict, left=True),
    ),
    "trace": (
        Column("stage", lambda r: r.stage, left=True),
        SAMPLER,
        BATCH,
        Column("name", lambda r: r.name, left=True),
        Column("calls", lambda r: str(r.calls)),
        Column("total us", lambda r: microseconds(r.total_us)),
        Column("median us", lambda r: microseconds(r.median_us)),
        Column("share", lambda r: percent(r.share)),
    ),
    "compare": (
        BATCH,
        SAMPLER,
        Column("before us", lambda r: microseconds(r.before_us)),
        Column("after us", lambda r: microseconds(r.after_us)),
        Column("ratio", lambda r: ratio(r.ratio)),
        Column("95% interval", lambda r: MISSING if r.low is None else f"{ratio(r.low)}..{ratio(r.high)}"),
        Column("verdict", lambda r: r.verdict, left=True),
    ),
    "replay": (
        SAMPLER,
        Column("row", lambda r: str(r.row)),
        Column("token", lambda r: str(r.token)),
        Column("runner-up", lambda r: MISSING if r.runner_up is None else str(r.runner_up)),
        Column("margin", lambda r: significant(r.margin)),
        Column("budget", lambda r: significant(r.budget)),
        Column("of", lambda r: r.decided or MISSING, left=True),
        Column("given", lambda r: MISSING if r.given is None else str(r.given)),
        Column("verdict", lambda r: r.verdict, left=True),
    ),
    "doctor": (
        Column("topic", lambda r: r.topic, left=True),
        Column("name", lambda r: r.name, left=True),
        Column("status", lambda r: r.status, left=True),
        Column("detail", lambda r: r.detail, left=True),
    ),
    "presets": (
        Column("preset", lambda r: r.preset, left=True),
        Column("V", lambda r: f"{r.vocab:,}"),
        Column("D", lambda r: f"{r.hidden:,}"),
        Column("head GB", lambda r: number(r.weight_gb, 2)),
        Column("config.json of", lambda r: r.source, left=True),
    ),
    "hardware": (
        Column("GPU", lambda r: r.gpu, left=True),
        Column("GB", lambda r: number(r.memory_gb, 0)),
        Column("TB/s", lambda r: number(r.bandwidth_tb_s, 2)),
        Column("bf16", lambda r: number(r.bf16_tflops, 0)),
        Column("fp32", lambda r: number(r.fp32_tflops, 0)),
        Column("cache MiB", lambda r: number(r.cache_mib, 0)),
        Column("roof TB/s", lambda r: number(r.roofline_tb_s, 2)),
        Column("roof bf16", lambda r: number(r.roofline_tflops, 0)),
    ),
}


def columns_of(record: Record) -> tuple[Column, ...]:
    if record.kind == "bench" and record.workload is not None and record.workload.tp > 1:
        return COLUMNS["bench --tp"]
    if record.kind == "verify" and record.settings.get("details"):
        return COLUMNS["verify --details"]
    if record.kind == "tp-model" and any(row.paper_us is not None for row in record.results):
        return COLUMNS["tp-model and the paper's"]
    return COLUMNS[record.kind]


def heading(record: Record) -> list[str]:
    """Lines over a table: what was asked, on what, and how it was measured."""
    lines = []
    if record.workload is not None:
        w = record.workload
        shape = f"{w.preset}: V={w.vocab:,} D={w.hidden:,} {w.dtype}" + (f" tp={w.tp}" if w.tp > 1 else "")
        lines.append(f"{shape}; {w.distribution}" if w.distribution else shape)
    if record.environment is not None and record.kind != "doctor":
        e = record.environment
        commit = f", commit {e.short_commit}" if e.commit else ""
        lines.append(
            f"{e.gpu or e.cpu or 'CPU'}, torch {e.torch}, triton {e.triton or 'absent'}{commit}, {e.date}"
        )
    shown = {name: value for name, value in record.settings.items() if isinstance(value, (str, int, float))}
    if shown:
        lines.append(", ".join(f"{name}={value}" for name, value in shown.items()))
    claims = record.settings.get("claims")
    if isinstance(claims, dict):  # samplers that claim the same share a line
        by_text: dict[str, list[str]] = {}
        for name, text in claims.items():
            by_text.setdefault(str(text), []).append(name)
        lines += [f"{', '.join(names)}: {text}" for text, names in by_text.items()]
    return lines


def footnotes(record: Record) -> list[str]:
    """Lines under a table: the notes and remedies of its rows, each once with the rows it is of."""
    if record.kind == "hardware":
        sources: dict[str, list[str]] = {}
        for row in record.results:
            sources.setdefault(row.source, []).append(row.gpu)
        return [f"{', '.join(names)}: {source}" for source, names in sources.items()]
    by_text: dict[str, dict[str, None]] = {}
    for row in record.results:
        is_check = record.kind == "doctor"
        text = row.remedy if is_check else getattr(row, "note", "")
        if text:
            by_text.setdefault(text, {})[row.name if is_check else sampler(row)] = None
    return [f"{', '.join(names)}: {text}" for text, names in by_text.items()]
