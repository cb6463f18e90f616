"""`fsample trace`: a short annotated run, for Nsight Systems and for Chrome or Perfetto."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsample_cli import launch, samplers
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
from fsample_cli.records import Json, Record
from fsample_cli.reporters import check_distinct, check_file, write_report
from fsample_cli.request import build_workload, parse_samplers, resolve_device
from fsample_cli.workloads import PRESETS

if TYPE_CHECKING:
    from fsample_cli.measure.nsys import Nsys
    from fsample_cli.measure.traced_run import Traced

DEFAULT_SAMPLERS = ("fused", "gemm", "multinomial-eager", "fi2")
TP_DEFAULT_SAMPLERS = DEFAULT_SAMPLERS[:-1]  # all ranks would wait for FlashInfer's build, twice with nsys


def _check_folder(path: Path | None) -> Path | None:
    if path is not None and not path.is_dir():
        raise UsageError(
            f"--nsys-libraries must be a folder, got {path}", "unpack libdw1 and what it needs there"
        )
    return path


def trace(
    batch: BatchOption = "64",
    sampler: SamplerOption = None,
    chrome: Annotated[
        Path, typer.Option("--chrome", help="Chrome/Perfetto trace to write; the nsys report lies beside it.")
    ] = Path("fsample-trace.json"),
    nsys: Annotated[
        bool | None,
        typer.Option(
            "--nsys/--no-nsys",
            help="Run again under Nsight Systems. Default: on a GPU when it is installed.",
            show_default=False,
        ),
    ] = None,
    nsys_libraries: Annotated[
        Path | None,
        typer.Option(
            "--nsys-libraries",
            help="Folder with libdw.so.1 for QdstrmImporter.",
            callback=_check_folder,
            show_default=False,
        ),
    ] = None,
    preset: Annotated[str | None, preset_option("qwen3-8b, on a CPU cpu-small")] = None,
    vocab: VocabOption = None,
    hidden: HiddenOption = None,
    checkpoint: CheckpointOption = None,
    states: StatesOption = None,
    tp: TpOption = 1,
    temperature: TemperatureOption = 1.0,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Calls of each sampler first.")] = 3,
    iterations: Annotated[
        int, typer.Option("--iterations", min=1, help="Traced calls of each sampler.")
    ] = 10,
    device: DeviceOption = Device.auto,
    dtype: DTypeOption = DType.auto,
    seed: SeedOption = 0,
    format: FormatOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Trace one workload in depth: ranges per stage, time per kernel.

    NVTX domain fsample with one range a stage (prepare, warm-up, fused kernel, reduction, GEMM, sampler) and
    payload B, V, D. Writes a Chrome/Perfetto trace always, and a .nsys-rep by running itself under nsys where
    it is installed.

    With --tp every rank runs and names itself in its ranges' category; the Chrome trace and the table are
    rank 0's, the .nsys-rep holds all.

    Samplers: fused, gemm, multinomial-eager and, on one rank, fi2, unless --sampler names others.
    """
    if not launch.runs_here(tp):
        raise typer.Exit(launch.supervise(tp, quiet=quiet))
    target = check_output(format, output, force)
    check_distinct(target, chrome, "--chrome")
    known = samplers.NAMES if tp == 1 else samplers.TP_NAMES
    names = parse_samplers(sampler, known, DEFAULT_SAMPLERS if tp == 1 else TP_DEFAULT_SAMPLERS)
    where = resolve_device(device)
    workload = build_workload(
        preset=preset, vocab=vocab, hidden=hidden, checkpoint=checkpoint, states=states, device=where,
        dtype=dtype, default=PRESETS["qwen3-8b" if where == "cuda" else "cpu-small"].workload(),
    )  # fmt: skip

    from fsample_cli.measure import cupti, environment, inputs
    from fsample_cli.measure.kernel_times import kernel_times
    from fsample_cli.measure.nsys import INSTALL, find_nsys
    from fsample_cli.measure.team import team_of
    from fsample_cli.measure.traced_run import Run, traced_run

    workload = replace(workload, tp=tp)
    place = launch.place(tp) if tp > 1 else None
    run = Run(names, workload, parse_batches(batch), where, temperature, seed, warmup, iterations)
    around = cupti.inside_profiler()
    if around is not None:
        if nsys:
            raise UsageError(f"--nsys: {around} is around this run already", "drop one of the two")
        note(f"{around} is around this run: ranges only, it writes the report", quiet)
        with team_of(place, where) as team:
            traced = traced_run(run, None, lambda text: None, team)
        _check(traced)
        return
    found = find_nsys() if nsys or (nsys is None and where == "cuda") else None
    if nsys and where != "cuda":
        raise UsageError("--nsys needs a GPU: a report without a kernel is worth nothing", "use --no-nsys")
    if nsys and found is None:
        raise MissingError("--nsys: no nsys on the PATH, under /opt/nvidia or /usr/local", INSTALL)
    check_file(chrome, force, "--chrome")

    with (
        team_of(place, where) as team,
        progress_bar(len(run.batches) * len(names), quiet or team.rank > 0) as (stage, tick),
    ):
        own = chrome if team.rank == 0 else None
        traced = traced_run(run, own, lambda text: (stage(text), tick())[0], team)
    if team.rank > 0:
        return
    _check(traced)
    settings: dict[str, Json] = {
        "chrome": chrome.name,
        "warmup": warmup,
        "iterations": iterations,
        "temperature": temperature,
        "seed": seed,
        "notes": list(traced.notes),
    }
    for text in filter(None, (traced.compiled, *traced.notes)):
        note(text, quiet)
    failure: FsampleError | None = None
    if found is not None and place is not None and place.store is None:
        note("torchrun has started these ranks: nsys must be around it; only the Chrome trace", quiet)
    elif found is not None:
        report, failure = _try_nsys(found, chrome, nsys_libraries, quiet)
        settings.update(report)
    elif where == "cuda" and nsys is None:
        note(f"no nsys found: only {chrome}; {INSTALL}", quiet)
    with chrome.open(encoding="utf-8") as file:
        rows = kernel_times(json.load(file), traced.ran)
    record = Record("trace", command_line(), environment.collect(), inputs.describe(workload), rows, settings)
    write_report(record, target)
    if failure is not None:
        raise failure


def _check(traced: Traced) -> None:
    if not traced.ran:
        raise MissingError(
            f"trace: no sampler could be traced, so nothing is written: {'; '.join(traced.notes)}",
            "fsample doctor says what works here",
        )


def _try_nsys(
    nsys: Nsys, chrome: Path, libraries: Path | None, quiet: bool
) -> tuple[dict[str, Json], FsampleError | None]:
    """What to record of the run under nsys, and its error if any: the Chrome trace needs no nsys."""
    try:
        return _under_nsys(nsys, chrome, libraries, quiet), None
    except FsampleError as error:
        return {"nsys_problem": error.message}, error


def _under_nsys(nsys: Nsys, chrome: Path, libraries: Path | None, quiet: bool) -> dict[str, Json]:
    """Run this very command again under nsys and say what its report holds."""
    from fsample_cli.measure.nsys import profile_command, read_report, run_profile

    child = [sys.executable, "-m", "fsample_cli", *_without_nsys(sys.argv[1:])]
    os.environ.pop(launch.PLACE, None)  # of several ranks the child starts its own again
    note(shlex.join(profile_command(nsys, chrome.with_suffix(""), child)), quiet)
    report = read_report(nsys, run_profile(nsys, chrome.with_suffix(""), child, libraries))
    if report.ranges is None:
        note(f"{report.path} holds no NVTX data: is the nvtx package installed?", quiet)
    return {
        "nsys_report": report.path.name,
        "nsys_kernels": report.kernels,
        "nsys_ranges": None if report.ranges is None else dict(report.ranges),
        "nsys_domains": list(report.domains),
    }


def _without_nsys(arguments: Sequence[str]) -> list[str]:
    """The child finds nsys around it and must not ask for another one; its own output goes nowhere."""
    kept = [word for word in arguments if word not in ("--nsys", "--no-nsys")]
    return kept if {"-q", "--quiet"} & set(kept) else [*kept, "--quiet"]
