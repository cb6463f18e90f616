"""`fsample tune`: measure the kernels' shapes on this GPU and write a table that the library can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fsample_cli.errors import InputError, MissingError, UsageError
from fsample_cli.options import (
    BatchOption,
    DType,
    DTypeOption,
    ForceOption,
    FormatOption,
    HiddenOption,
    OutputOption,
    QuietOption,
    SeedOption,
    VocabOption,
    check_output,
    command_line,
    note,
    parse_batches,
    preset_option,
)
from fsample_cli.progress import progress_bar
from fsample_cli.records import Record
from fsample_cli.reporters import check_distinct, check_file, write_report
from fsample_cli.request import build_workload, resolve_device
from fsample_cli.timing_options import ColdOption, IterationsOption, TimerOption, WarmupOption
from fsample_cli.workloads import PRESETS


def tune(
    emit_table: Annotated[
        Path, typer.Option("--emit-table", help="Table to write, for load_table or FSAMPLE_TABLE.")
    ] = Path("fsample-table.json"),
    from_record: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Write the table of a run's JSON record; needs no GPU.", show_default=False
        ),
    ] = None,
    batch: BatchOption = "16,64,128,256",
    preset: Annotated[str | None, preset_option("qwen3-8b")] = None,
    vocab: VocabOption = None,
    hidden: HiddenOption = None,
    timer: TimerOption = "auto",
    warmup: WarmupOption = 10,
    iterations: IterationsOption = 50,
    cold: ColdOption = True,
    dtype: DTypeOption = DType.auto,
    seed: SeedOption = 0,
    format: FormatOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure the kernels' shapes on this GPU for one head, and write the choice as a table.

    Each batch size stands for a class, from the one before it up. Every candidate (Hopper shapes, the
    portable kernel, a matmul into fp32 logits with a pass over them) is gated as in bench and timed beside
    the built-in choice, which stays unless something beats it by more than 1 %. The table rules calls with
    this head's V (of a shard its own) and D. Nothing is tuned while drawing: the library reads the table by
    fsample_kernels.load_table(FILE), or at its first call from the file that FSAMPLE_TABLE names.
    """
    check_file(emit_table, force, "--emit-table")
    if from_record is not None:
        measured = {
            "--preset": preset, "--vocab": vocab, "--hidden": hidden, "--format": format, "--output": output
        }  # fmt: skip
        clash = [name for name, value in measured.items() if value is not None]
        if clash:
            raise UsageError(
                f"--from and {clash[0]} exclude each other: nothing is measured, only the table is written",
                f"leave out {clash[0]}; --emit-table FILE names the table",
            )

        from fsample_cli.measure import tuning

        note(f"{tuning.write(_read(from_record), emit_table)} entries in {emit_table}", quiet)
        return
    target = check_output(format, output, force)
    check_distinct(target, emit_table, "--emit-table")
    batches = parse_batches(batch)
    if resolve_device("auto") != "cuda":
        raise MissingError(
            "tune measures kernels of a GPU, and torch finds none here",
            "run it on the GPU host; tune --from RECORD.json writes the table of a run elsewhere",
        )
    workload = build_workload(
        preset=preset, vocab=vocab, hidden=hidden, checkpoint=None, states=None, device="cuda", dtype=dtype,
        default=PRESETS["qwen3-8b"].workload(),
    )  # fmt: skip

    from fsample_cli.measure import tuning

    with progress_bar(iterations * len(batches), quiet) as (stage, tick):
        record = tuning.measure(
            workload, batches, timer=timer, warmup=warmup, iterations=iterations, cold=cold, seed=seed,
            command=command_line(), stage=stage, tick=tick,
        )  # fmt: skip
    write_report(record, target)
    note(f"{tuning.write(record, emit_table)} entries in {emit_table}", quiet)


def _read(file: Path) -> Record:
    try:
        return Record.from_dict(json.loads(file.read_text(encoding="utf-8")), f"record {file}")
    except OSError as error:
        raise InputError(f"--from {file} cannot be read: {error.strerror}", "give a record of tune") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"--from {file} is not JSON: {error}", "give a record of tune") from None
