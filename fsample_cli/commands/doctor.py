"""`fsample doctor`: what this machine has, what works on it, and the command that brings what is missing."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from fsample_cli.errors import FsampleError, UsageError
from fsample_cli.hardware import find_gpu
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
from fsample_cli.records import DoctorResult, Record
from fsample_cli.reporters import write_report

if TYPE_CHECKING:
    import torch

    from fsample_cli.records import Environment

GPU_EXTRA = 'pip install "fsample[gpu]"'
PACKAGES = {
    "numpy": "pip install numpy",
    "pandas": "pip install pandas",
    "scipy": "pip install scipy",
    "safetensors": "pip install safetensors",
    "nvtx": "pip install nvtx",
    "triton": "pip install triton",
    "flashinfer-python": GPU_EXTRA,
    "cupti-python": GPU_EXTRA,
    "nvidia-ml-py": GPU_EXTRA,
    "matplotlib": 'pip install "fsample[plot]"',
    "transformers": 'pip install "fsample[real-model]"',
}
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

    Versions, GPU, driver, clocks, peer access between GPUs, what ranks need, samplers, timers and profilers.
    """
    if json and format not in (None, Format.json):
        raise UsageError(f"--json and --format {format.value} exclude each other", "give one of them")
    target = check_output(Format.json if json else format, output, force)
    try:
        from fsample_cli.measure.environment import collect
    except (ImportError, OSError) as error:  # a torch that does not load is just what a doctor is called for
        failed = DoctorResult("package", "torch", "missing", f"does not load: {error}", "pip install torch")
        write_report(Record("doctor", command_line(), None, None, (failed,)), target)
        raise typer.Exit(1) from None
    environment = collect()
    rows = [
        *_host(environment),
        *_gpu(environment),
        *_ranks(environment),
        *_packages(),
        *_samplers(attempt, quiet),
        *_timers(),
        *_tools(),
    ]
    write_report(Record("doctor", command_line(), environment, None, tuple(rows)), target)


def _host(environment: Environment) -> Iterator[DoctorResult]:
    commit = f", commit {environment.short_commit}" if environment.commit else ""
    yield DoctorResult("host", "fsample", "ok", f"{environment.fsample}{commit}")
    yield DoctorResult("host", "python", "ok", str(environment.python))
    yield DoctorResult("host", "platform", "ok", str(environment.platform))
    yield DoctorResult(
        "host",
        "cpu",
        "ok",
        f"{environment.cpu}, {environment.cpu_count} cores, {environment.cpu_threads} threads used",
    )


def _gpu(environment: Environment) -> Iterator[DoctorResult]:
    import torch

    build = f"{environment.torch} for {'CUDA ' + environment.cuda if environment.cuda else 'the CPU alone'}"
    yield DoctorResult("package", "torch", "ok", build)
    if environment.gpu is None:
        remedy = (
            "check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
            if environment.cuda
            else "install a CUDA build of torch"
        )
        yield DoctorResult(
            "gpu", "gpu", "missing", "no GPU that torch can use; commands run on the CPU", remedy
        )
        return
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = (
        f"sm_{properties.major}{properties.minor}" if torch.version.hip is None else properties.gcnArchName
    )
    memory = f"{properties.total_memory / 1e9:.0f} GB"
    yield DoctorResult(
        "gpu",
        environment.gpu,
        "ok",
        f"{environment.gpu_count} x {memory}, {capability}, driver {environment.driver}",
    )
    clocks = f"SM {environment.clock_sm_mhz} of {environment.clock_sm_max_mhz} MHz, memory "
    yield DoctorResult(
        "gpu",
        "clocks",
        "ok",
        f"{clocks}{environment.clock_memory_mhz} MHz, limit {environment.power_limit_w} W",
    )
    known = find_gpu(environment.gpu)
    if known is None:
        yield DoctorResult(
            "gpu", "roofline", "missing", "this GPU's ceilings are not in the table: no roofline column",
            "add a row to fsample_cli/hardware.py",
        )  # fmt: skip
    else:
        yield DoctorResult("gpu", "roofline", "ok", f"ceilings of {known.name}: {known.source}")
    count = environment.gpu_count
    for first, second in ((i, j) for i in range(count) for j in range(i + 1, count)):
        ways = (
            torch.cuda.can_device_access_peer(first, second),
            torch.cuda.can_device_access_peer(second, first),
        )
        if all(ways):
            yield DoctorResult("gpu", f"peer {first}-{second}", "ok", "direct access both ways")
        else:
            yield DoctorResult(
                "gpu", f"peer {first}-{second}", "missing", "no direct access: ranks here would all-gather",
                "`nvidia-smi topo -p2p r` shows why",
            )  # fmt: skip


def _ranks(environment: Environment) -> Iterator[DoctorResult]:
    """What `--tp` and `fsample_kernels.distributed` go by: back ends, and memory that GPUs share."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield DoctorResult(
            "ranks", "gloo", "missing", "this torch has no torch.distributed: --tp cannot run",
            "install another build of torch",
        )  # fmt: skip
        return
    if dist.is_gloo_available():
        yield DoctorResult("ranks", "gloo", "ok", "any number of ranks on the CPU")
    if environment.gpu is None:
        return
    if dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield DoctorResult("ranks", "nccl", "ok", f"{version}, one GPU a rank")
    else:
        yield DoctorResult(
            "ranks", "nccl", "missing", "this torch is built without it: no --tp on GPUs",
            "install a CUDA build of torch",
        )  # fmt: skip
    name = "symmetric memory"
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        yield DoctorResult(
            "ranks", name, "missing", "no exchange p2p: ranks gather candidates", "pip install 'torch>=2.6'"
        )
    elif environment.gpu_count < 2:
        yield DoctorResult("ranks", name, "ok", "there; the exchange p2p needs two GPUs")
    else:
        yield DoctorResult("ranks", name, "ok", "the exchange p2p, between GPUs with peer access")


def _packages() -> Iterator[DoctorResult]:
    from importlib import metadata

    for package, remedy in PACKAGES.items():
        try:
            yield DoctorResult("package", package, "ok", metadata.version(package))
        except metadata.PackageNotFoundError:
            yield DoctorResult("package", package, "missing", "not installed", remedy)


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
            return "package flashinfer-python is not installed", GPU_EXTRA
    return None


def _timers() -> Iterator[DoctorResult]:
    import torch

    from fsample_cli.measure import cupti

    if not torch.cuda.is_available():
        yield DoctorResult("timer", "cupti", "missing", "times GPU kernels", "run on a machine with a GPU")
        yield DoctorResult("timer", "events", "missing", "times GPU work", "run on a machine with a GPU")
        yield DoctorResult("timer", "wall", "ok", "wall clock, what the CPU is timed with")
        return
    problem = cupti.why_not()
    if problem is None:
        yield DoctorResult("timer", "cupti", "ok", "first kernel's start to last kernel's end")
    else:
        yield DoctorResult("timer", "cupti", "missing", problem.reason, problem.remedy)
    yield DoctorResult("timer", "events", "ok", "CUDA events, launches included")


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
