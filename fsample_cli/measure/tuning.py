"""From measured candidates to a table: the fastest of each batch class, or the built-in one if as fast."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

from fsample_cli.errors import InputError
from fsample_cli.hardware import find_gpu
from fsample_cli.measure import cold_cache, environment, inputs
from fsample_cli.measure.clocks import make_clock_reader
from fsample_cli.measure.inputs import TORCH_DTYPES
from fsample_cli.measure.settings import Progress, Settings
from fsample_cli.measure.sweep import sweep
from fsample_cli.measure.timing import choose_timer, make_stopwatch
from fsample_cli.records import Json, Record
from fsample_cli.reporters import write_file
from fsample_cli.results import BenchResult
from fsample_cli.samplers.candidate import BUILT_IN, Candidate, choices
from fsample_cli.workloads import Workload
from fsample_kernels import tables
from fsample_kernels.ops import arguments

MARGIN = 0.01  # a change has to be worth more than this, or the built-in choice stays


def entries(record: Record) -> list[dict[str, Json]]:
    """Rows of the table: `tables.Entry` with the medians it was chosen by, one a batch size measured.

    A batch size stands for its class: everything above the one before. Raises InputError for a record that
    `fsample tune` did not make, and where the built-in choice has no time.
    """
    known, architecture = record.settings.get("candidates"), record.settings.get("architecture")
    if not isinstance(known, Mapping) or not isinstance(architecture, str) or record.workload is None:
        raise InputError("the record must be one of `fsample tune`", "run fsample tune --output FILE.json")
    found: list[dict[str, Json]] = []
    for batch in dict.fromkeys(row.batch for row in record.results):
        timed = {row.sampler: row for row in record.results if row.batch == batch and row.median_us}
        if BUILT_IN not in timed:
            raise InputError(f"B={batch} has no time of the {BUILT_IN} choice", "tune again")
        best = fastest(list(timed.values()))
        chosen = known.get(best.sampler)
        if not isinstance(chosen, Mapping) or not {"choice", "config"} <= set(chosen):
            raise InputError(
                f"settings.candidates must hold a choice and a config of {best.sampler!r}, got {chosen!r}",
                "tune again",
            )
        entry = tables.Entry(
            architecture, record.workload.vocab, record.workload.hidden,
            str(TORCH_DTYPES[record.workload.dtype]).removeprefix("torch."), batch,
            cast(Any, chosen["choice"] or timed[BUILT_IN].implementation), cast(Any, chosen["config"]),
        )  # fmt: skip
        found.append(asdict(entry) | {"median_us": best.median_us, "built_in_us": timed[BUILT_IN].median_us})
    return found


def fastest(timed: Sequence[BenchResult]) -> BenchResult:
    """The lowest median; the built-in choice where nothing beats it by more than MARGIN."""
    built_in = next(row for row in timed if row.sampler == BUILT_IN)
    best = min(timed, key=lambda row: row.median_us or float("inf"))
    assert best.median_us is not None and built_in.median_us is not None
    return best if best.median_us < (1 - MARGIN) * built_in.median_us else built_in


def write(record: Record, file: Path) -> int:
    """Write the table that `fsample_kernels.load_table` reads; returns the number of entries."""
    rows = entries(record)
    machine = record.environment
    names = ("gpu", "driver", "torch", "triton", "commit", "date")
    text = json.dumps(
        {"schema": tables.SCHEMA, "kind": "table", "command": record.command,
         "measured": {name: getattr(machine, name, None) for name in names}, "entries": rows},
        indent=1,
    )  # fmt: skip
    write_file(file, text + "\n", "--emit-table")
    return len(rows)


def measure(
    workload: Workload,
    batches: Sequence[int],
    *,
    timer: str,
    warmup: int,
    iterations: int,
    cold: bool,
    seed: int,
    command: str,
    stage: Callable[[str], None],
    tick: Callable[[], None],
    where: str = "cuda",
) -> Record:
    """Gate and time every candidate at every batch size. Raises what `sweep` raises."""
    device = torch.device("cuda", torch.cuda.current_device()) if where == "cuda" else torch.device(where)
    architecture = arguments.architecture(device)
    known = choices(architecture)
    chosen = choose_timer(timer, where)
    found = environment.collect()
    settings = Settings(where, chosen, warmup, iterations, 1.0, seed, BUILT_IN, find_gpu(found.gpu))
    outcome = sweep(
        list(known), workload, batches, settings,
        make_stopwatch=lambda: make_stopwatch(chosen),
        flush=cold_cache.make_flush(device) if cold else None,
        clock_reader=make_clock_reader(where),
        progress=Progress(stage, tick),
        load=lambda label, transform: Candidate(label, *known[label], transform),
    )  # fmt: skip
    described: dict[str, Json] = {
        "timer": chosen,
        "cache": cold_cache.describe(device, cold),
        "warmup": warmup,
        "iterations": iterations,
        "order": "interleaved",
        "seed": seed,
        "baseline": BUILT_IN,
        "architecture": architecture,
        "candidates": {
            label: {"choice": choice, "config": config} for label, (choice, config) in known.items()
        },
        "problems": list(outcome.problems),
    }
    return Record("bench", command, found, inputs.describe(workload), outcome.results, described)
