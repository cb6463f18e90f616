"""One timed run from its options: which timer, which GPU, which protocol, and all of it written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fsample_cli import samplers
from fsample_cli.errors import UsageError
from fsample_cli.hardware import ceilings, find_gpu
from fsample_cli.measure import cold_cache, environment
from fsample_cli.measure.clocks import make_clock_reader
from fsample_cli.measure.graphs import POSITION, CudaCapture
from fsample_cli.measure.settings import Progress, Settings
from fsample_cli.measure.sweep import Outcome, sweep
from fsample_cli.measure.team import SOLO, Solo, same_counts
from fsample_cli.measure.timing import choose_timer, make_stopwatch
from fsample_cli.records import Json
from fsample_cli.results import Environment
from fsample_cli.samplers.protocol import Sampler, Transform
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
    runs: int = 1,
    cold: bool,
    temperature: float,
    seed: int,
    baseline: str | None,
    progress: Progress,
    team: Solo = SOLO,
    graph: bool = False,
) -> Session:
    """Choose the timer, time every sampler at every batch size, describe how. Raises what `choose_timer` and
    `sweep` raise, before anything is timed. graph: on a GPU alone, see `graphs`.
    """
    chosen = choose_timer(timer, device) if team.size == 1 else timer_of_ranks(timer, device)
    if team.size > 1:
        warmup, iterations, runs = same_counts((warmup, iterations, runs))
    found = environment.collect()
    gpu = find_gpu(found.gpu) if device == "cuda" else None
    settings = Settings(device, chosen, warmup, iterations, temperature, seed, baseline, gpu, runs, graph)
    outcome = sweep(
        names,
        workload,
        batches,
        settings,
        make_stopwatch=lambda: make_stopwatch(chosen, graph),
        flush=cold_cache.make_flush(torch.device(device)) if cold else None,
        clock_reader=make_clock_reader(device),
        progress=progress,
        team=team,
        load=loader(team),
        capture=CudaCapture(torch.device(device)) if graph else None,
    )
    bandwidth, rate = (None, None) if gpu is None else ceilings(gpu, workload.dtype)
    described: dict[str, Json] = {
        "timer": settings.timed_by,
        "span": make_stopwatch(chosen, graph).includes,
        **(replays() if graph else {}),
        "cache": cold_cache.describe(torch.device(device), cold),
        "warmup": warmup,
        "iterations": iterations,
        **({"runs": runs} if runs > 1 else {}),
        "order": "interleaved",
        "temperature": temperature,
        "seed": seed,
        "roofline_bytes_per_s": bandwidth,
        "roofline_flop_per_s": rate,
        **(across(team, device) if team.size > 1 else {}),
        "samplers": outcome.descriptions,
        "logits_in_memory": outcome.logits,
        "problems": list(outcome.problems),
    }
    return Session(found, outcome, described)


def loader(team: Solo) -> Callable[[str, Transform], Sampler]:
    """What makes the samplers: on several ranks, those of a split head."""
    if team.size == 1:
        return samplers.load
    from fsample_cli.samplers import tensor_parallel

    return tensor_parallel.load


def timer_of_ranks(requested: str, device: str) -> str:
    """The timer of several ranks. Raises UsageError for cupti, beside what `choose_timer` raises."""
    if requested == "cupti":
        raise UsageError(
            "--timer cupti counts the wait for a slower rank's launch, and NCCL's watchdog crashes beside it",
            "use --timer events or auto",
        )
    return choose_timer("events" if (requested, device) == ("auto", "cuda") else requested, device)


def replays() -> dict[str, Json]:
    """What a replayed call repeats and what it does not."""
    return {
        "graph": True,
        "replays": f"of one captured call, at position {POSITION}: its seed and position are every replay's; "
        "torch's generator goes on",
    }


def across(team: Solo, device: str) -> dict[str, Json]:
    """How times of several ranks became one."""
    start = "a barrier of the ranks' devices behind 2 ms of sleep" if device == "cuda" else "a barrier"
    return {
        "ranks": team.size,
        "sample": f"slowest rank of each iteration, {start} before it outside the measured span",
        "counts": "agreed from rank 0",
    }
