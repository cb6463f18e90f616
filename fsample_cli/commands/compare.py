"""`fsample compare`: two benchmark records, and whether what changed is more than noise."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsample_cli.errors import InputError, UsageError
from fsample_cli.options import (
    ForceOption,
    FormatOption,
    OutputOption,
    QuietOption,
    check_output,
    command_line,
    note,
)
from fsample_cli.records import Record, without_folders
from fsample_cli.reporters import write_report
from fsample_cli.results import CompareResult

if TYPE_CHECKING:
    import numpy

KINDS = ("bench", "io-model")
RESAMPLES = 4_000
CONFIDENCE = 0.95
# A bootstrap of few samples is too narrow: of 5 it misses one true ratio in six. Below this many the interval
# comes from order statistics, which hold for any distribution.
FEW = 20
# Unlike in these, two times are of two different things; in the others they are merely worth a warning.
HOST = ("gpu", "cpu", "platform", "numa_nodes", "cpu_threads")
SOFTWARE = ("driver", "torch", "cuda", "triton", "flashinfer", "python", "clock_sm_max_mhz", "power_limit_w")
WORKLOAD = ("vocab", "hidden", "dtype", "tp", "softcap", "logit_scale", "distribution")
Key = tuple[str, str | None, int]


def compare(
    before: Annotated[Path, typer.Argument(help="Record of the run to compare with: bench, io-model.")],
    after: Annotated[Path, typer.Argument(help="Record of the run to judge.")],
    threshold: Annotated[
        float, typer.Option("--threshold", help="Slower by more than this fraction is a regression.")
    ] = 0.05,
    allow_unlike: Annotated[
        bool,
        typer.Option("--allow-unlike", help="Compare runs of unlike hosts or workloads too."),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the bootstrap.")] = 0,
    format: FormatOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare two benchmark records: what changed, beyond noise.

    For each sampler and batch the ratio of medians, after / before, with a 95% interval from the raw samples:
    bootstrap, or order statistics below 20 samples, or none below 7. A regression is a ratio above
    1 + threshold whose whole interval lies above 1; one makes the exit code 1. Records of unlike hosts are
    refused.
    """
    if not 0 <= threshold < float("inf"):
        raise UsageError(f"--threshold must be a finite fraction, 0 or above, got {threshold}", "0.05 is 5%")
    target = check_output(format, output, force)
    old, new = _read(before), _read(after)
    unlike = _unlike_hosts(old, new) + _unlike_workloads(old, new)
    if unlike and not allow_unlike:
        raise InputError(
            f"{before} and {after} are not of like runs: {'; '.join(unlike)}",
            "run both on one host, or add --allow-unlike",
        )
    warnings = unlike + _differences(old.environment, new.environment, SOFTWARE)
    for warning in warnings:
        note(f"unlike in {warning}", quiet)
    results = compare_records(old, new, threshold, seed)
    if not any(row.ratio is not None for row in results):
        raise InputError(
            f"{before} and {after} share no timed sampler and batch", "run the same bench command twice"
        )
    record = Record(
        "compare", command_line(), new.environment, new.workload, tuple(results),
        {"before": without_folders(str(before)), "after": without_folders(str(after)),
         "threshold": threshold, "confidence": CONFIDENCE,
         "resamples": RESAMPLES, "seed": seed, "unlike": warnings},
    )  # fmt: skip
    write_report(record, target)
    if any(row.verdict == "regression" for row in results):
        raise typer.Exit(1)


def compare_records(old: Record, new: Record, threshold: float, seed: int) -> list[CompareResult]:
    """One result a (sampler, algorithm, batch): in the new record's order, then what only the old one has."""
    import numpy

    generator = numpy.random.default_rng(seed)
    before, after = _by_key(old), _by_key(new)
    results = []
    for key in [*after, *(key for key in before if key not in after)]:
        first, second = before.get(key), after.get(key)
        if first is None or second is None or not first.samples_us or not second.samples_us:
            results.append(_one_sided(key, first, second))
            continue
        interval = ratio_interval(first.samples_us, second.samples_us, generator)
        low, high = interval or (None, None)
        ratio = float(numpy.median(second.samples_us) / numpy.median(first.samples_us))
        results.append(
            CompareResult(
                *key,
                first.median_us,
                second.median_us,
                ratio,
                low,
                high,
                _verdict(ratio, interval, threshold),
                "" if interval else f"{len(first.samples_us)} and {len(second.samples_us)} samples",
            )
        )
    return results


def ratio_interval(
    before: Sequence[float], after: Sequence[float], generator: numpy.random.Generator
) -> tuple[float, float] | None:
    """Interval of median(after) / median(before): percentile bootstrap, both sides resampled.

    Of fewer than FEW samples on a side, the quotient of both medians' intervals, which holds the ratio at
    least as often. None where the samples are too few for any.
    """
    import numpy

    if min(len(before), len(after)) < FEW:
        first, second = (median_interval(samples, (1 - CONFIDENCE) / 2) for samples in (before, after))
        return None if first is None or second is None else (second[0] / first[1], second[1] / first[0])
    medians = []
    for samples in (before, after):
        values = numpy.asarray(samples, dtype=numpy.float64)  # [N]
        picks = generator.integers(0, values.size, (RESAMPLES, values.size))
        medians.append(numpy.median(values[picks], axis=1))  # [RESAMPLES]
    tail = (1 - CONFIDENCE) / 2
    low, high = numpy.quantile(medians[1] / medians[0], (tail, 1 - tail))
    return float(low), float(high)


def median_interval(samples: Sequence[float], miss: float) -> tuple[float, float] | None:
    """The narrowest pair of order statistics that misses the median with probability at most `miss`.

    With N samples, the k-th and the (N + 1 - k)-th miss it with probability 2 P(Binomial(N, 1/2) < k).
    """
    ordered, count = sorted(samples), len(samples)
    below, k = 0, 0  # sequences of N coin tosses with fewer than k heads
    while k < count // 2 and 2 * (below + math.comb(count, k)) <= miss * 2**count:
        below += math.comb(count, k)
        k += 1
    return (ordered[k - 1], ordered[count - k]) if k else None


def _verdict(ratio: float, interval: tuple[float, float] | None, threshold: float) -> str:
    if interval is None:
        return "too few"
    low, high = interval
    if ratio > 1 + threshold and low > 1:
        return "regression"
    return "slower" if low > 1 else "faster" if high < 1 else "same"


def _one_sided(key: Key, first: Any, second: Any) -> CompareResult:
    """A row without two times to compare."""
    old = None if first is None else first.median_us
    new = None if second is None else second.median_us
    verdict = (
        "only after" if old is None and new is not None else "only before" if old is not None else "no time"
    )
    reasons = [row.note for row in (first, second) if row is not None and row.note]
    return CompareResult(*key, old, new, None, None, None, verdict, "; ".join(dict.fromkeys(reasons)))


def _by_key(record: Record) -> dict[Key, Any]:
    return {(row.sampler, row.algorithm, row.batch): row for row in record.results}


def _read(path: Path) -> Record:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"record {path} cannot be read: {error.strerror}", "give a file of bench --format json"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"record {path} is not JSON: {error}", "give a file of bench --format json"
        ) from None
    record = Record.from_dict(data, f"record {path}")
    if record.kind not in KINDS:
        raise InputError(
            f"record {path} must be of {' or '.join(KINDS)}, got {record.kind}",
            "give a file of bench --format json",
        )
    return record


def _unlike_hosts(old: Record, new: Record) -> list[str]:
    return _differences(old.environment, new.environment, HOST)


def _unlike_workloads(old: Record, new: Record) -> list[str]:
    """Workload, protocol and timers: a figure of one clock is not to be divided by a figure of another."""
    found = _differences(old.workload, new.workload, WORKLOAD)
    for name in ("cache", "temperature"):
        first, second = old.settings.get(name), new.settings.get(name)
        if first != second:
            found.append(f"{name} ({first} and {second})")
    after = _by_key(new)
    clocks = {
        f"timer ({row.timer} and {after[key].timer})"
        for key, row in _by_key(old).items()
        if key in after and row.samples_us and after[key].samples_us and row.timer != after[key].timer
    }
    return found + sorted(clocks)


def _differences(first: object, second: object, names: Sequence[str]) -> list[str]:
    pairs = [(name, getattr(first, name, None), getattr(second, name, None)) for name in names]
    return [f"{name} ({one} and {other})" for name, one, other in pairs if one != other]
