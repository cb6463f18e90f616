"""`fsample bench`: time samplers on one LM head over a sweep of batch sizes."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from fsample_cli import samplers
from fsample_cli.errors import FsampleError, UsageError
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
    PresetOption,
    QuietOption,
    SamplerOption,
    SeedOption,
    StatesOption,
    TemperatureOption,
    VocabOption,
    build_workload,
    check_output,
    command_line,
    parse_batches,
    parse_samplers,
    resolve_device,
)
from fsample_cli.progress import progress_bar
from fsample_cli.records import Record
from fsample_cli.reporters import write_report
from fsample_cli.workloads import PRESETS

TimerOption = Annotated[
    str, typer.Option("--timer", help="auto, cupti, events or wall; auto prefers cupti on a GPU.")
]
WarmupOption = Annotated[int, typer.Option("--warmup", min=0, help="Untimed calls of each sampler first.")]
IterationsOption = Annotated[
    int, typer.Option("--iterations", min=1, help="Timed calls, the same number for every sampler.")
]
ColdOption = Annotated[bool, typer.Option("--cold/--no-cold", help="Empty the cache before every call.")]


def bench(
    batch: BatchOption = "1..256",
    sampler: SamplerOption = None,
    baseline: Annotated[
        Optional[str],  # noqa: UP045 - as in options
        typer.Option(
            "--baseline", help="Speed-ups refer to it. Default: fi2, else multinomial.", show_default=False
        ),
    ] = None,
    preset: PresetOption = None,
    vocab: VocabOption = None,
    hidden: HiddenOption = None,
    checkpoint: CheckpointOption = None,
    states: StatesOption = None,
    temperature: TemperatureOption = 1.0,
    timer: TimerOption = "auto",
    warmup: WarmupOption = 25,
    iterations: IterationsOption = 100,
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
    unfused, fused+store, or your own module:function taking (hidden, weight, temperature, seed) and returning
    ids.
    """
    target = check_output(format, output, force)
    batches = parse_batches(batch)
    names = parse_samplers(sampler, samplers.NAMES, samplers.DEFAULT)
    bases = {name.partition(":")[0] if not samplers.is_user_function(name) else name for name in names}
    if baseline is not None and baseline not in bases:
        raise UsageError(
            f"--baseline must be one of the samplers that run ({', '.join(names)}), got {baseline!r}",
            f"add --sampler {baseline}",
        )
    where = resolve_device(device)
    workload = build_workload(
        preset=preset, vocab=vocab, hidden=hidden, checkpoint=checkpoint, states=states,
        device=where, dtype=dtype,
        default=PRESETS["qwen3-8b" if where == "cuda" else "cpu-small"].workload(),
    )  # fmt: skip

    import torch

    from fsample_cli.hardware import ceilings, find_gpu
    from fsample_cli.measure import cold_cache, environment, inputs
    from fsample_cli.measure.clocks import make_clock_reader
    from fsample_cli.measure.sweep import Progress, Settings, sweep
    from fsample_cli.measure.timing import choose_timer, make_stopwatch

    chosen = choose_timer(timer, where)
    found = environment.collect()
    gpu = find_gpu(found.gpu) if where == "cuda" else None
    settings = Settings(where, chosen, warmup, iterations, temperature, seed, baseline, gpu)
    with progress_bar(iterations * len(batches), quiet) as (stage, tick):
        outcome = sweep(
            names, workload, batches, settings,
            make_stopwatch=lambda: make_stopwatch(chosen),
            flush=cold_cache.make_flush(torch.device(where)) if cold else None,
            clock_reader=make_clock_reader(where),
            progress=Progress(stage, tick),
        )  # fmt: skip
    with_times = {row.sampler for row in outcome.results if row.median_us is not None}
    record = Record(
        "bench", command_line(), found, inputs.describe(workload), outcome.results,
        {
            "timer": chosen,
            "timed": make_stopwatch(chosen).includes,
            "cache": cold_cache.describe(torch.device(where), cold),
            "warmup": warmup,
            "iterations": iterations,
            "order": "interleaved",
            "temperature": temperature,
            "seed": seed,
            "baseline": baseline or ("fi2" if "fi2" in with_times else "multinomial"),
            "roofline": None if gpu is None else [*ceilings(gpu, workload.dtype)],
            "samplers": outcome.descriptions,
            "problems": list(outcome.problems),
        },
    )  # fmt: skip
    write_report(record, target)
    if outcome.problems:
        more = f"{len(outcome.problems)} problems in the record"
        raise FsampleError(f"bench: {outcome.problems[0]}", more)
    if not with_times:
        raise FsampleError("bench: no sampler could be timed", "the notes under the table say why")
