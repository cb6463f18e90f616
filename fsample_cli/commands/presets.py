"""`fsample presets`: the named model shapes, and the GPUs whose ceilings are known."""

from __future__ import annotations

from typing import Annotated

import typer

from fsample_cli.hardware import GPUS, ceilings
from fsample_cli.options import ForceOption, FormatOption, OutputOption, check_output, command_line
from fsample_cli.records import Record
from fsample_cli.reporters import write_report
from fsample_cli.results import HardwareResult, PresetResult
from fsample_cli.workloads import PRESETS


def presets(
    hardware: Annotated[bool, typer.Option("--hardware", help="The table of GPUs instead.")] = False,
    format: FormatOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
) -> None:
    """List the named model shapes, or the known GPUs.

    V and D are those of the model's published config.json; head GB is the weight in bf16.
    """
    target = check_output(format, output, force)
    if hardware:
        record = Record("hardware", command_line(), None, None, tuple(_gpu_rows()))
    else:
        record = Record("presets", command_line(), None, None, tuple(_preset_rows()))
    write_report(record, target)


def _preset_rows() -> list[PresetResult]:
    return [
        PresetResult(
            p.name,
            p.vocab,
            p.hidden,
            p.workload("bf16").weight_bytes / 1e9,
            p.softcap,
            p.logit_scale,
            p.source,
        )
        for p in PRESETS.values()
    ]


def _gpu_rows() -> list[HardwareResult]:
    rows = []
    for gpu in GPUS:
        bandwidth, rate = ceilings(gpu)
        source = f"{gpu.source}; {gpu.achievable_source}" if gpu.achievable_source else gpu.source
        rows.append(
            HardwareResult(
                gpu.name,
                gpu.memory / 1e9,
                gpu.bandwidth / 1e12,
                gpu.flops / 1e12,
                gpu.flops_fp32 / 1e12,
                gpu.cache / 2**20,
                bandwidth / 1e12,
                rate / 1e12,
                source,
            )  # fmt: skip
        )
    return rows
