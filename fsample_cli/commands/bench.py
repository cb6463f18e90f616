"""`fsample bench`: time samplers on one LM head over a sweep of batch sizes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated

import typer

from fsample_cli import interrupts, launch, samplers
from fsample_cli.errors import FsampleError, MissingError, UsageError
from fsample_cli.options import (
    BatchOption,
    CheckpointOption,
    Device,
    DeviceOption,
    DType,
    DTypeOption,
    ForceOption,
    FormatOption,
    HiddenOption,
    OutputOption,
    QuietOption,
    SamplerOption,
    SeedOption,
    StatesOption,
    TemperatureOption,
    TpOption,
    VocabOption,
    check_output,
    command_line,
    note,
    parse_batches,
    preset_option,
)
from fsample_cli.progress import progress_bar
from fsample_cli.records import Record
from fsample_cli.reporters import write_report
from fsample_cli.request import build_workload, parse_samplers, resolve_device
from fsample_cli.shards import check_shards
from fsample_cli.timing_options import ColdOption, IterationsOption, RunsOption, TimerOption, WarmupOption
from fsample_cli.workloads import PRESETS


def bench(
    batch: BatchOption = "1..256",
    sampler: SamplerOption = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", help="Speed-ups refer to it. Default: fi2, else multinomial.", show_default=False
        ),
    ] = None,
    features: Annotated[
        bool, typer.Option("--features", help="Time each option of fused alone, beside the plain call.")
    ] = False,
    preset: Annotated[str | None, preset_option("qwen3-8b, on a CPU cpu-small")] = None,
    vocab: VocabOption = None,
    hidden: HiddenOption = None,
    checkpoint: CheckpointOption = None,
    states: StatesOption = None,
    tp: TpOption = 1,
    temperature: TemperatureOption = 1.0,
    timer: TimerOption = "auto",
    graph: Annotated[
        bool,
        typer.Option("--graph/--no-graph", help="Capture each call in a CUDA graph once, and time replays."),
    ] = False,
    warmup: WarmupOption = 25,
    iterations: IterationsOption = 100,
    runs: RunsOption = None,
    cold: ColdOption = True,
    device: DeviceOption = Device.auto,
    dtype: DTypeOption = DType.auto,
    seed: SeedOption = 0,
    format: FormatOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Time samplers on one LM head: ours, the bare GEMM, and the ones in use today.

    Every sampler passes a quick correctness gate first and is timed on the same tensors, interleaved, with
    one timer. Samplers: fused (fused:element, ...), gemm, multinomial-eager, multinomial, race, fi1, fi2,
    unfused (hidden @ weight.T in the inputs' dtype, then our sample_logits; the library's own way over fp32
    logits is fused:unfused), fused+store, or your own module:function taking (hidden, weight, temperature,
    seed) and returning ids.

    With --tp the head is split over ranks, which are started here unless torchrun has done so: fused with
    its exchanges (fused:p2p, fused:p2p_after, fused:candidates, fused:log_mass), baselines with the
    all-gather of logits inside (in one compiled graph: multinomial, race, fi1-compiled, fi2-compiled), gemm a
    rank's own product, shard a rank's own draw without an exchange, one-rank the whole head on each. Times
    are the slowest rank's, over 5 runs unless --runs says otherwise.

    With --features: temperature a row, one row in four greedy (none at B = 1); seed and position a row; mask,
    packed and bool; bias, dense [B, V] and [V], sparse, and of the head; logit scale; soft-cap; a vocabulary
    bound 100 ids under V; logprob; lse; four samples; element noise. Each alone, with values that change no
    token, and gated by the plain call's ids.

    With --graph, on a GPU: each call as an engine runs it, without the host between its launches. Seed and
    position of a replay are those of the capture; samplers that draw from torch's generator go on drawing.
    One replay is gated too; what cannot be captured gets a row that says why, and no time.

    Stopped by SIGINT or SIGTERM it still writes the batches that had ended, marked as unfinished (exit code
    130 or 143; with --tp nothing is kept).
    """
    if not launch.runs_here(tp):
        raise typer.Exit(launch.supervise(tp, quiet=quiet))
    target = check_output(format, output, force)
    batches = parse_batches(batch)
    where = resolve_device(device)
    known: tuple[str, ...] = samplers.NAMES
    default: tuple[str, ...] = samplers.DEFAULT
    if tp > 1:
        known = samplers.TP_NAMES
        default = samplers.TP_DEFAULT_GPU if where == "cuda" else samplers.TP_DEFAULT
    if features:
        if sampler or baseline or tp > 1:
            raise UsageError(
                "--features brings its own samplers and baseline, on one rank",
                "leave out --sampler, --baseline and --tp",
            )
        baseline = "fused"
    if graph and where != "cuda":
        raise UsageError(
            f"--graph replays CUDA graphs and needs a GPU, got --device {where}", "leave out --graph"
        )
    names = samplers.FEATURES if features else parse_samplers(sampler, known, default)
    bases = {name.partition(":")[0] for name in names if not samplers.is_user_function(name)}
    if baseline is not None and baseline not in bases.union(names):
        hint = "choose one of them"
        if baseline.partition(":")[0] in known or samplers.is_user_function(baseline):
            # where none was named, one named would replace the default list
            hint = f"add --sampler {baseline}" if sampler else f"run --sampler {','.join((*names, baseline))}"
        raise UsageError(
            f"--baseline must be one of the samplers that run ({', '.join(names)}), got {baseline!r}", hint
        )
    workload = build_workload(
        preset=preset, vocab=vocab, hidden=hidden, checkpoint=checkpoint, states=states,
        device=where, dtype=dtype,
        default=PRESETS["qwen3-8b" if where == "cuda" else "cpu-small"].workload(),
    )  # fmt: skip

    from fsample_cli.measure import inputs, session
    from fsample_cli.measure.settings import Progress
    from fsample_cli.measure.team import team_of

    workload = replace(workload, tp=tp)
    check_shards(workload.vocab, tp)
    rounds = runs or (1 if tp == 1 else 5)
    with (
        team_of(launch.place(tp) if tp > 1 else None, where) as team,
        progress_bar(iterations * rounds * len(batches), quiet or team.rank > 0) as (stage, tick),
        interrupts.terminable() if tp == 1 else nullcontext(),
    ):
        done = session.run(
            names, workload, batches, device=where, timer=timer, warmup=warmup, iterations=iterations,
            runs=rounds, cold=cold, temperature=temperature, seed=seed, baseline=baseline,
            progress=Progress(stage, tick), team=team, graph=graph,
        )  # fmt: skip
    if team.rank > 0:
        return
    if done.outcome.compiled:
        note(done.outcome.compiled, quiet)
    timed = {row.sampler for row in done.outcome.results if row.median_us is not None}
    used = baseline or next((name for name in ("fi2", "multinomial") if name in timed), None)
    settings = {**done.settings, "baseline": used, **({"features": True} if features else {})}
    stopped = done.outcome.stopped
    if stopped:
        settings["unfinished"] = f"stopped by {stopped}; batches that had ended are kept"
    rows, problems = done.outcome.results, done.outcome.problems
    write_report(
        Record("bench", command_line(), done.environment, inputs.describe(workload), rows, settings), target
    )
    if stopped:
        note(f"bench: unfinished: {settings['unfinished']}", False)
        raise typer.Exit(interrupts.exit_code(stopped))
    if problems:
        raise FsampleError(
            f"bench: {problems[0]}", f"{len(problems)} such in the record, under settings.problems"
        )
    if not timed:
        reasons = dict.fromkeys(f"{row.sampler} is {row.note}" for row in rows)
        raise MissingError(f"bench: no sampler could be timed: {'; '.join(reasons)}")
