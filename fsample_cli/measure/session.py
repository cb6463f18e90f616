"""One timed run from its options: which timer, which GPU, which protocol, and all of it written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fsample_cli.hardware import ceilings, find_gpu
from fsample_cli.measure import cold_cache, environment
from fsample_cli.measure.clocks import make_clock_reader
from fsample_cli.measure.sweep import Outcome, Progress, Settings, sweep
from fsample_cli.measure.timing import choose_timer, make_stopwatch
from fsample_cli.records import Environment, Json
from fsample_cli.workloads import Workload


@dataclass(frozen=True)
class Session:
    environment: Environment
    outcome: Outcome
    settings: Mapping[str, Json]  # the protocol, for the record


def run(
    names: Sequence[str],
    workload: Workload,
    batches: Sequence[int],
    *,
    device: str,
    timer: str,
    warmup: int,
    iterations: int,
    cold: bool,
    temperature: float,
    seed: int,
    baseline: str | None,
    progress: Progress,
) -> Session:
    """Choose the timer, time every sampler at every batch size, describe how. Raises what `choose_timer` and
    `sweep` raise, before anything is timed.
    """
    chosen = choose_timer(timer, device)
    found = environment.collect()
    gpu = find_gpu(found.gpu) if device == "cuda" else None
    settings = Settings(device, chosen, warmup, iterations, temperature, seed, baseline, gpu)
    outcome = sweep(
        names,
        workload,
        batches,
        settings,
        make_stopwatch=lambda: make_stopwatch(chosen),
        flush=cold_cache.make_flush(torch.device(device)) if cold else None,
        clock_reader=make_clock_reader(device),
        progress=progress,
    )
    bandwidth, rate = (None, None) if gpu is None else ceilings(gpu, workload.dtype)
    described: dict[str, Json] = {
        "timer": chosen,
        "span": make_stopwatch(chosen).includes,
        "cache": cold_cache.describe(torch.device(device), cold),
        "warmup": warmup,
        "iterations": iterations,
        "order": "interleaved",
        "temperature": temperature,
        "seed": seed,
        "roofline_bytes_per_s": bandwidth,
        "roofline_flop_per_s": rate,
        "samplers": outcome.descriptions,
        "problems": list(outcome.problems),
    }
    return Session(found, outcome, described)
