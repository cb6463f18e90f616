"""The benchmark itself: samplers x batch sizes, each gated, then timed together; a record row a pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsample_cli import samplers
from fsample_cli.interrupts import name_of, unwrapped
from fsample_cli.measure import gate
from fsample_cli.measure.bench_rows import across_ranks, make_row, over_ranks
from fsample_cli.measure.clocks import ClockReader
from fsample_cli.measure.compile_ahead import compile_ahead
from fsample_cli.measure.graphs import POSITION, Capture, Captured, NotCaptured
from fsample_cli.measure.inputs import load_weight, make_hidden
from fsample_cli.measure.settings import Progress, Settings
from fsample_cli.measure.team import SOLO, Solo
from fsample_cli.measure.timing import Call, Stopwatch, quantiles, time_interleaved
from fsample_cli.results import BenchResult
from fsample_cli.samplers.protocol import (
    HeldToAnother,
    Sampler,
    SamplerRaised,
    SamplerUnavailable,
    ShapeUnsupported,
    Transform,
)
from fsample_cli.workloads import Workload


@dataclass
class Contender:
    """One sampler of the run, and why it has no number, if so."""

    asked: str  # the name it was asked for by, as in fused:element
    sampler: Sampler
    problem: str = ""  # holds for the whole run


@dataclass(frozen=True)
class Outcome:
    results: tuple[BenchResult, ...]
    descriptions: dict[str, str]  # sampler -> exact call
    logits: dict[str, str]  # sampler -> dtype in which its logits reach memory; without those whose never do
    problems: tuple[str, ...]  # gate failures, compilations inside a timed section: do not trust the run
    compiled: str = ""  # what was compiled before it began, in words
    stopped: str = ""  # the signal that ended the run early, if one did; batches that had ended are kept


def sweep(
    names: Sequence[str],
    workload: Workload,
    batches: Sequence[int],
    settings: Settings,
    *,
    make_stopwatch: Callable[[], Stopwatch],
    flush: Callable[[], None] | None,
    clock_reader: ClockReader,
    progress: Progress = Progress(),  # noqa: B008 - frozen
    team: Solo = SOLO,
    load: Callable[[str, Transform], Sampler] = samplers.load,
    capture: Capture | None = None,
) -> Outcome:
    """Gate and time every named sampler at every batch size.

    A sampler that cannot run here, or not on this shape, gets rows that say why, and the run goes on. One
    that fails its gate gets no time. Raises MissingError when the head does not fit in memory, FsampleError
    for unknown names. On a team of ranks every one runs it and gets the same rows;
    `load` makes their samplers. With `capture` each call is captured, one replay gated, and replays are
    timed; what cannot be captured gets a row that says why. A KeyboardInterrupt after the first batch, on one
    rank, ends the run there.
    """
    device = torch.device(settings.device)
    transform = Transform(workload.logit_scale, workload.softcap)
    for name in names:
        load(name, transform)  # a wrong name is found before gigabytes are made
    weight = load_weight(workload, settings.device, settings.seed)
    compiled = ""
    if device.type == "cuda":
        progress.stage("compiling")
        changes = dict.fromkeys((transform, Transform()))  # in one order on every rank
        ours = [load(name, change) for name in names for change in changes]
        compiled = compile_ahead(ours, [weight], [*batches, gate.SMALL_ROWS], settings.temperature).text
        team.meet()  # a rank that still compiles is waited for here, and not by a kernel of another
    contenders = [_admit(name, transform, weight, device, settings, progress, team, load) for name in names]
    stopped = ""
    results: list[BenchResult] = []
    problems = [c.problem for c in contenders if c.problem.startswith("failed")]
    for batch in batches:
        hidden = make_hidden(workload, batch, settings.device, settings.seed, weight)
        try:
            with unwrapped():
                rows, found = _one_batch(
                    contenders, hidden, weight, transform, workload, settings, make_stopwatch=make_stopwatch,
                    flush=flush, clock_reader=clock_reader, progress=progress, team=team, capture=capture,
                )  # fmt: skip
        except KeyboardInterrupt as stop:
            if team.size > 1 or not results:  # the other ranks are inside a call that this one has left
                raise
            stopped = name_of(stop)
            break
        results += rows
        problems += found
    descriptions = {c.asked: c.sampler.description for c in contenders}
    logits = {c.asked: c.sampler.logits_dtype for c in contenders if c.sampler.logits_dtype is not None}
    return Outcome(tuple(results), descriptions, logits, tuple(problems), compiled, stopped)


def _admit(
    name: str,
    transform: Transform,
    weight: Tensor,
    device: torch.device,
    settings: Settings,
    progress: Progress,
    team: Solo,
    load: Callable[[str, Transform], Sampler],
) -> Contender:
    progress.stage(f"checking {name}")
    sampler = load(name, transform)
    if isinstance(sampler, HeldToAnother):  # on the tensors that are timed
        return Contender(name, sampler)
    plain = sampler if transform.is_identity else load(name, Transform())
    try:
        verdict = gate.check_small(
            plain,
            hidden_size=weight.shape[1],
            dtype=weight.dtype,
            device=device,
            temperature=settings.temperature,
            seed=settings.seed,
        )
    except (SamplerUnavailable, ShapeUnsupported) as error:
        if samplers.is_user_function(name):  # it breaks its signature, on a head that has no transform
            raise
        return Contender(name, sampler, team.agree(_why(sampler, error)))
    except SamplerRaised as error:
        return Contender(name, sampler, _why(sampler, error))
    return Contender(
        name, sampler, team.agree("" if verdict.passed else f"failed its gate: {verdict.reason}")
    )


def _one_batch(
    contenders: Sequence[Contender],
    hidden: Tensor,
    weight: Tensor,
    transform: Transform,
    workload: Workload,
    settings: Settings,
    *,
    make_stopwatch: Callable[[], Stopwatch],
    flush: Callable[[], None] | None,
    clock_reader: ClockReader,
    progress: Progress,
    team: Solo,
    capture: Capture | None,
) -> tuple[list[BenchResult], list[str]]:
    batch = hidden.shape[0]
    notes = [c.problem for c in contenders]
    calls: dict[int, Call] = {}
    graphs: list[Captured] = []
    try:
        for k, contender in enumerate(contenders):
            if notes[k]:
                continue
            sampler = contender.sampler
            progress.stage(f"B={batch}: preparing {sampler.name}")
            notes[k] = team.agree(_prepare(sampler, hidden, weight, transform, settings))
            eager = _call(sampler, hidden, weight, settings)
            if capture is None:
                calls[k] = eager
            elif not notes[k]:
                progress.stage(f"B={batch}: capturing {sampler.name}")
                notes[k] = _capture(sampler, eager, hidden, weight, capture, graphs, team)
                if not notes[k]:
                    calls[k] = _replay(graphs[-1])
        timed = None
        while timed is None:
            runners = [k for k, text in enumerate(notes) if not text]
            progress.stage(f"B={batch}: timing")
            try:
                timed = time_interleaved(
                    [calls[k] for k in runners],
                    stopwatch=make_stopwatch(),
                    device=hidden.device,
                    warmup=settings.warmup,
                    iterations=settings.iterations * settings.runs,
                    flush=flush,
                    clock_reader=clock_reader,
                    tick=progress.tick,
                    team=team,
                )
            except SamplerRaised as error:  # the others are timed again, interleaved without it
                late = next(k for k in runners if contenders[k].sampler.name == error.sampler)
                notes[late] = _why(contenders[late].sampler, error)
    finally:
        for graph in graphs:
            graph.free()
    fastest = dict(zip(runners, timed.fastest_us, strict=True)) if team.size > 1 else {}
    samples = dict(zip(runners, timed.samples_us, strict=True))
    medians: dict[str, float] = {}
    for k, taken in samples.items():  # under both names; of two algorithms the first is "fused"
        for known_as in (contenders[k].asked, contenders[k].sampler.name):
            medians.setdefault(known_as, quantiles(taken).median_us)
    rows = [
        over_ranks(
            make_row(
                c.sampler, notes[k], samples.get(k, ()), batch, workload, settings, medians, timed.clocks
            ),
            fastest.get(k, ()),
        )
        for k, c in enumerate(contenders)
    ]
    if team.size > 1:
        rows = [across_ranks(row, medians, team.size) for row in rows]
    problems = [
        f"B={batch}: {c.sampler.name} {notes[k]}"
        for k, c in enumerate(contenders)
        if notes[k].startswith("failed") and not c.problem
    ]
    problems += [f"B={batch}: compiled inside the timed section: {event}" for event in timed.compilations]
    return rows, problems


def _prepare(
    sampler: Sampler, hidden: Tensor, weight: Tensor, transform: Transform, settings: Settings
) -> str:
    """Empty when the sampler may be timed on these tensors, else the note of its row."""
    try:
        sampler.prepare(hidden, weight, temperature=settings.temperature)
        if isinstance(sampler, HeldToAnother):
            wrong = sampler.problem(hidden, weight, temperature=settings.temperature, seed=settings.seed)
            return wrong and f"failed its gate: {wrong}"
        verdict = gate.check_shape(
            sampler, hidden, weight, temperature=settings.temperature, seed=settings.seed, transform=transform
        )
    except (SamplerRaised, SamplerUnavailable, ShapeUnsupported) as error:
        return _why(sampler, error)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "unsupported: out of GPU memory at this shape"
    return "" if verdict.passed else f"failed its gate: {verdict.reason}"


def _capture(
    sampler: Sampler,
    call: Callable[[int], Tensor],
    hidden: Tensor,
    weight: Tensor,
    capture: Capture,
    graphs: list[Captured],
    team: Solo,
) -> str:
    """Empty when the last of `graphs` is the call, else the note of its row; the same on every rank."""
    note = ""
    try:
        graphs.append(capture(lambda: call(POSITION)))
    except NotCaptured as error:
        note = f"not captured: {error}"
    note = team.agree(note)  # before the replay, in which the others would wait
    if note:
        return note
    verdict = gate.check_replay(sampler, hidden, weight, graphs[-1])
    return team.agree("" if verdict.passed else f"failed its gate: {verdict.reason}")


def _replay(graph: Captured) -> Call:
    return lambda iteration: graph.replay()


def _why(sampler: Sampler, error: SamplerRaised | SamplerUnavailable | ShapeUnsupported) -> str:
    if isinstance(error, SamplerRaised):
        return f"unavailable: {error.message.removeprefix(f'{sampler.name} ')}"
    kind = "unavailable" if isinstance(error, SamplerUnavailable) else "unsupported"
    return f"{kind}: {str(error).removeprefix(f'{sampler.name}: ')}"


def _call(sampler: Sampler, hidden: Tensor, weight: Tensor, settings: Settings) -> Callable[[int], Tensor]:
    def call(iteration: int) -> Tensor:
        return sampler.sample(
            hidden, weight, temperature=settings.temperature, seed=settings.seed, position=iteration
        )

    return call
