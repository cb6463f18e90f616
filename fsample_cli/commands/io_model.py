"""`fsample io-model`: what moving the logits costs, predicted from bytes and measured with the
store-logits flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated

import typer

from fsample_cli.errors import FsampleError, UsageError
from fsample_cli.hardware import find_gpu
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
    SeedOption,
    StatesOption,
    TemperatureOption,
    TpOption,
    VocabOption,
    check_output,
    command_line,
    parse_batches,
    preset_option,
    typed,
)
from fsample_cli.progress import progress_bar
from fsample_cli.published import SOURCE, published
from fsample_cli.records import Json, Record
from fsample_cli.reporters import write_report
from fsample_cli.request import build_workload, resolve_device
from fsample_cli.results import BenchResult, IoModelResult, TpModelResult
from fsample_cli.shards import check_shards
from fsample_cli.timing_options import ColdOption, IterationsOption, TimerOption, WarmupOption
from fsample_cli.workloads import PRESETS, Workload

SAMPLERS = ("fused", "fused+store")
OF_A_MEASUREMENT = ("states", "temperature", "timer", "warmup", "iterations", "cold", "seed")


def io_model(
    context: typer.Context,
    batch: BatchOption = "1..256",
    preset: Annotated[str | None, preset_option("qwen3-8b")] = None,
    vocab: VocabOption = None,
    hidden: HiddenOption = None,
    checkpoint: CheckpointOption = None,
    states: StatesOption = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Time the store-logits flag beside the prediction. Default: on a GPU.",
            show_default=False,
        ),
    ] = None,
    tp: TpOption = 1,
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
    """Predict what never moving the logits saves, and measure what storing them costs.

    Predicted speed-up, in elements: (VD + BD + 2BV + B) / (VD + BD + B), close to 1 + 2B/D. Measured: the
    fused kernel with and without its store-logits flag (fp32 logits written, nothing else changed),
    interleaved. With --tp: bytes that a rank receives when logits are gathered and when candidates are
    exchanged, and the times they allow on the H200, whose link and exchanges were measured; for the shape of
    the paper's runs on several GPUs (llama3-70b) what they published stands beside it.
    """
    if tp > 1 and measure:
        raise UsageError("--tp is predicted only, got --measure as well", "`fsample bench --tp` measures")
    if tp > 1:
        measure = False
    target = check_output(format, output, force)
    batches = parse_batches(batch)
    instead = "" if tp > 1 else ", or add --measure" if measure is None else ", or --no-measure"
    where = "cpu" if measure is False else resolve_device(device)
    if measure is None:
        measure = where == "cuda"
    named = OF_A_MEASUREMENT + (("device",) if device is Device.cuda else ())
    given = ["no-cold" if name == "cold" and not cold else name for name in named if typed(context, name)]
    if given and not measure:
        raise UsageError(
            f"--{given[0]} goes with --measure, and this prediction measures nothing",
            f"leave out --{given[0]}{instead}",
        )
    if not measure and dtype is DType.auto:
        dtype = DType.bf16  # arithmetic needs no device: predict for the dtype that heads are served in
    workload = build_workload(
        preset=preset, vocab=vocab, hidden=hidden, checkpoint=checkpoint, states=states,
        device=where, dtype=dtype, default=PRESETS["qwen3-8b"].workload(),
    )  # fmt: skip
    if tp > 1:
        write_report(_over_ranks(replace(workload, tp=tp), batches), target)
        return
    if not measure:
        rows = [_row(workload, name, b, None) for b in batches for name in SAMPLERS]
        write_report(
            Record("io-model", command_line(), None, workload, tuple(rows), {"measured": "no"}), target
        )
        return

    from fsample_cli.measure import inputs, session
    from fsample_cli.measure.settings import Progress

    with progress_bar(iterations * len(batches), quiet) as (stage, tick):
        done = session.run(
            SAMPLERS, workload, batches, device=where, timer=timer, warmup=warmup, iterations=iterations,
            cold=cold, temperature=temperature, seed=seed, baseline="fused", progress=Progress(stage, tick),
        )  # fmt: skip
    found = {(row.sampler, row.batch): row for row in done.outcome.results}
    rows = [_row(workload, name, b, found) for b in batches for name in SAMPLERS]
    record = Record(
        "io-model", command_line(), done.environment, inputs.describe(workload), tuple(rows), done.settings
    )
    write_report(record, target)
    if done.outcome.problems:
        raise FsampleError(f"io-model: {done.outcome.problems[0]}", "see settings.problems of the record")


def _over_ranks(workload: Workload, batches: Sequence[int]) -> Record:
    from fsample_cli.measure.link_traffic import MEASURED, NCCL_US, P2P_US, link_step, ranks_up_to

    gpu = find_gpu("NVIDIA H200")
    assert gpu is not None
    check_shards(workload.vocab, workload.tp)
    rows = []
    for batch in batches:
        alone = link_step(workload, batch, 1, gpu)
        paper_alone = published(workload, batch, 1)
        for ranks in ranks_up_to(workload.tp):
            step, paper = link_step(workload, batch, ranks, gpu), published(workload, batch, ranks)
            row = TpModelResult(
                batch, ranks, step.shard_bytes, step.gather_bytes, step.candidate_bytes, step.p2p_bytes,
                step.gather_us, step.candidates_us, step.p2p_us, step.gather_us / step.p2p_us,
                alone.p2p_us / step.p2p_us,
            )  # fmt: skip
            if paper is not None and paper_alone is not None:
                row = replace(
                    row,
                    paper_us=paper.fused_us,
                    paper_speedup=paper.fi2_us / paper.fused_us,
                    paper_scaling=paper_alone.fused_us / paper.fused_us,
                )
            rows.append(row)
    settings: dict[str, Json] = {
        "gpu": gpu.name,
        "ceilings": gpu.achievable_source,
        "exchange": f"p2p {P2P_US} us, NCCL {NCCL_US:g} us, measured at two ranks ({MEASURED})",
    }
    if any(row.paper_us is not None for row in rows):
        settings["paper"] = SOURCE
    return Record("tp-model", command_line(), None, workload, tuple(rows), settings)


def _row(
    workload: Workload, name: str, batch: int, found: dict[tuple[str, int], BenchResult] | None
) -> IoModelResult:
    """The bench row with the model's figures; the overhead stands in the row of the sampler that stores."""
    from fsample_cli.measure.traffic import predict, predicted_store_overhead, traffic

    predicted = predict(workload, batch)
    if found is None:
        moved = traffic(name, workload, batch)
        assert moved is not None
        bare = BenchResult(
            sampler=name, algorithm="grouped", implementation="", batch=batch, timer="", iterations=0,
            samples_us=(), median_us=None, p10_us=None, p90_us=None, bytes=moved.bytes, flops=moved.flops,
            roofline_us=None, ratio_to_gemm=None, ratio_to_roofline=None, speedup=None,
        )  # fmt: skip
    else:
        bare = found[name, batch]
    plain = None if found is None else found["fused", batch].median_us
    overhead = None
    if name == "fused+store" and plain is not None and bare.median_us is not None:
        overhead = bare.median_us / plain - 1
    return IoModelResult(
        **asdict(bare),
        predicted_speedup=predicted.exact,
        predicted_speedup_simple=predicted.simple,
        measured_overhead=overhead,
        measured_over_predicted=None
        if overhead is None
        else overhead / predicted_store_overhead(workload, batch),
    )
