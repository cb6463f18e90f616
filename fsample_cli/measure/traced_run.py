"""The short annotated run that a trace looks at."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fsample_cli.errors import UsageError
from fsample_cli.measure.cold_cache import make_flush
from fsample_cli.measure.compile_ahead import compile_ahead
from fsample_cli.measure.inputs import load_weight, make_hidden
from fsample_cli.measure.nvtx_ranges import FUSED, GEMM, PREPARE, SAMPLER, WARM_UP, Ranges
from fsample_cli.measure.session import loader
from fsample_cli.measure.team import SOLO, Solo
from fsample_cli.samplers.protocol import (
    Sampler,
    SamplerRaised,
    SamplerUnavailable,
    ShapeUnsupported,
    Transform,
    TwoStage,
)
from fsample_cli.workloads import Workload
from fsample_kernels import guard


@dataclass(frozen=True)
class Run:
    """What to trace; the same whether torch.profiler or nsys looks on."""

    names: tuple[str, ...]
    workload: Workload
    batches: tuple[int, ...]
    device: str
    temperature: float
    seed: int
    warmup: int
    iterations: int


@dataclass(frozen=True)
class Traced:
    ran: dict[str, tuple[str, str | None]]  # name in the ranges -> (sampler, algorithm)
    notes: tuple[str, ...]  # why others did not
    compiled: str  # what was compiled before, in words


def traced_run(run: Run, chrome: Path | None, stage: Callable[[str], None], team: Solo = SOLO) -> Traced:
    """Run every sampler at every batch size under ranges; with `chrome`, torch.profiler writes its trace
    there if any sampler ran. Every rank of a team runs it.

    Iterations are synchronised, so that ranges on the host and kernels on the device line up. Raises
    UsageError in checked mode.
    """
    if guard.active():
        raise UsageError(f"{guard.VARIABLE} would have the checks of every call traced", "unset it")
    # Kineto writes its own probes on stderr at level 5, above errors; it reads this at its first profile.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    device = torch.device(run.device)
    transform = Transform(run.workload.logit_scale, run.workload.softcap)
    load = loader(team)
    loaded = {name: load(name, transform) for name in run.names}
    weight = load_weight(run.workload, run.device, run.seed)
    compiled = ""
    if device.type == "cuda":
        stage("compiling")
        compiled = compile_ahead(loaded.values(), [weight], run.batches, run.temperature).text
        team.meet()
    flush = make_flush(device)
    ran: dict[str, tuple[str, str | None]] = {}
    notes: list[str] = []
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler: AbstractContextManager[Any] = (
        nullcontext() if chrome is None else profile(activities=activities)
    )
    with profiler as profiling:
        for batch in run.batches:
            hidden = make_hidden(run.workload, batch, run.device, run.seed, weight)
            for asked, sampler in loaded.items():
                stage(f"B={batch}: {asked}")
                rank = team.rank if team.size > 1 else None
                ranges = Ranges(asked, batch, weight.shape[0], weight.shape[1], rank)
                problem = team.agree(_prepare(sampler, hidden, weight, run, ranges))
                if problem:
                    notes.append(problem)
                    continue
                _trace_one(sampler, hidden, weight, run, team.before_call(flush) or flush, ranges)
                ran[asked] = sampler.name, sampler.algorithm
    if chrome is not None and ran:
        profiling.export_chrome_trace(str(chrome))
    return Traced(ran, tuple(dict.fromkeys(notes)), compiled)


def _prepare(sampler: Sampler, hidden: Tensor, weight: Tensor, run: Run, ranges: Ranges) -> str:
    """Empty, or why the sampler cannot run here."""
    try:
        with ranges.stage(PREPARE):
            sampler.prepare(hidden, weight, temperature=run.temperature)
            _synchronize(hidden)
    except (SamplerRaised, SamplerUnavailable, ShapeUnsupported) as error:
        return str(error)
    return ""


def _trace_one(
    sampler: Sampler, hidden: Tensor, weight: Tensor, run: Run, flush: Callable[[], None], ranges: Ranges
) -> None:
    with ranges.stage(WARM_UP):
        for i in range(run.warmup):
            sampler.sample(hidden, weight, temperature=run.temperature, seed=run.seed, position=i)
        _synchronize(hidden)
    for i in range(run.warmup, run.warmup + run.iterations):
        flush()
        _synchronize(hidden)
        _step(sampler, hidden, weight, run, i, ranges)
        _synchronize(hidden)


def _step(sampler: Sampler, hidden: Tensor, weight: Tensor, run: Run, position: int, ranges: Ranges) -> None:
    if not sampler.draws:
        with ranges.stage(GEMM):
            sampler.sample(hidden, weight, temperature=run.temperature, seed=run.seed, position=position)
    elif sampler.name.startswith("fused"):
        with ranges.reductions(), ranges.stage(FUSED):
            sampler.sample(hidden, weight, temperature=run.temperature, seed=run.seed, position=position)
    elif isinstance(sampler, TwoStage):
        with ranges.stage(GEMM):
            logits = sampler.product(hidden, weight)  # [B, V]; of a split head, gathered
        with ranges.stage(SAMPLER):
            sampler.draw(logits, temperature=run.temperature, seed=run.seed, position=position)
    else:  # one graph, or a user's function: product and draw cannot be told apart from outside
        with ranges.stage(SAMPLER):
            sampler.sample(hidden, weight, temperature=run.temperature, seed=run.seed, position=position)


def _synchronize(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize()
