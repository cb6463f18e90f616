"""`fsample doctor`: what this machine has, what works on it, and the command that brings what is missing."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from fsample_cli.errors import FsampleError, UsageError
from fsample_cli.options import (
    ForceOption,
    Format,
    FormatOption,
    OutputOption,
    QuietOption,
    check_output,
    command_line,
    note,
)
from fsample_cli.records import Record
from fsample_cli.reporters import write_report
from fsample_cli.results import DoctorResult

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "numpy", "pandas", "scipy", "safetensors", "nvtx", "triton", "flashinfer-python", "cupti-python",
    "nvidia-ml-py", "matplotlib", "transformers",
)  # fmt: skip
TOOLS = {
    "nsys": "install NVIDIA Nsight Systems; it is also inside Nsight Compute, under host/",
    "ncu": "install NVIDIA Nsight Compute",
    "nvcc": "install the CUDA toolkit; FlashInfer builds its kernels with it",
    "ninja": "pip install ninja; FlashInfer builds its kernels with it",
    "c++": "apt-get install g++; torch.compile needs it on the CPU",
}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    attempt: Annotated[
        bool,
        typer.Option(
            "--try", help="Also draw with every sampler on a tiny head; compiling may take minutes."
        ),
    ] = False,
    format: FormatOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what works on this machine, and how to get the rest.

    Versions, GPU, driver, clocks, peer access between GPUs, what ranks need, the table that FSAMPLE_TABLE
    names, whether FSAMPLE_CHECK has every call checked, samplers, timers and profilers.
    """
    if json and format not in (None, Format.json):
        raise UsageError(f"--json and --format {format.value} exclude each other", "give one of them")
    target = check_output(Format.json if json else format, output, force)
    try:
        from fsample_cli.measure import findings
        from fsample_cli.measure.environment import collect
    except (ImportError, OSError) as error:  # a torch that does not load is just what a doctor is called for
        failed = DoctorResult("package", "torch", "missing", f"does not load: {error}", "pip install torch")
        write_report(Record("doctor", command_line(), None, None, (failed,)), target)
        raise typer.Exit(1) from None
    environment = collect()
    rows = [
        *findings.host(environment),
        *findings.gpu(environment),
        *findings.ranks(environment),
        *findings.table(environment),
        *findings.check(),
        *_packages(),
        *_samplers(attempt, quiet),
        *findings.timers(),
        *_tools(),
    ]
    write_report(Record("doctor", command_line(), environment, None, tuple(rows)), target)


def _packages() -> Iterator[DoctorResult]:
    from importlib import metadata

    for package in PACKAGES:
        try:
            yield DoctorResult("package", package, "ok", metadata.version(package))
        except metadata.PackageNotFoundError:
            yield DoctorResult("package", package, "missing", "not installed", f"pip install {package}")


def _samplers(attempt: bool, quiet: bool) -> Iterator[DoctorResult]:
    """Whether each sampler runs: by what it needs, or with `attempt` by running it."""
    import torch

    from fsample_cli import samplers

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in samplers.NAMES:
        try:
            sampler = samplers.load(name)
            if attempt:
                note(f"trying {name}", quiet)
                hidden = torch.full((2, 64), 0.125, device=device, dtype=torch.bfloat16)  # [B, D]
                weight = torch.full((256, 64), 0.125, device=device, dtype=torch.bfloat16)  # [V, D]
                sampler.prepare(hidden, weight, temperature=1.0)
                sampler.sample(hidden, weight, temperature=1.0, seed=0, position=0)
                yield DoctorResult("sampler", name, "ok", f"ran on {device.type}: {sampler.implementation}")
                continue
        except FsampleError as error:
            yield DoctorResult(
                "sampler", name, "missing", error.message.removeprefix(f"{name}: "), error.hint
            )
            continue
        problem = _missing_for(name, device)
        if problem is None:
            yield DoctorResult("sampler", name, "ok", sampler.description)
        else:
            yield DoctorResult("sampler", name, "missing", *problem)


def _missing_for(name: str, device: torch.device) -> tuple[str, str] | None:
    """(what a sampler lacks here, how to get it), told without running it."""
    from fsample_cli.samplers.compiled import missing_compiler

    if name in ("multinomial", "race"):
        return missing_compiler(device)
    if name in ("fi1", "fi2"):
        if device.type != "cuda":
            return "FlashInfer needs an NVIDIA GPU", "run on a machine with an NVIDIA GPU"
        if importlib.util.find_spec("flashinfer") is None:
            return "package flashinfer-python is not installed", "pip install flashinfer-python"
    return None


def _tools() -> Iterator[DoctorResult]:
    from fsample_cli.measure.nsys import find_nsys

    for tool, remedy in TOOLS.items():
        path = shutil.which(tool)
        if path is None and tool == "nsys":
            nsys = find_nsys()  # Nsight Compute carries one that is not on the PATH
            path = None if nsys is None else str(nsys.executable)
        if path is None:
            yield DoctorResult("tool", tool, "missing", "not found", remedy)
        else:
            yield DoctorResult("tool", tool, "ok", path)
