"""What `fsample doctor` finds of the machine: host, GPUs, what ranks need, table, checked mode, timers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from fsample_cli.hardware import find_gpu
from fsample_cli.measure import cupti
from fsample_cli.results import DoctorResult, Environment
from fsample_kernels import guard, tables


def host(environment: Environment) -> Iterator[DoctorResult]:
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


def gpu(environment: Environment) -> Iterator[DoctorResult]:
    build = f"{environment.torch} for {'CUDA ' + environment.cuda if environment.cuda else 'the CPU alone'}"
    yield DoctorResult("package", "torch", "ok", build)
    if environment.gpu is None:
        remedy = (
            "check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
            if environment.cuda
            else "on a machine with an NVIDIA GPU, install a CUDA build of torch"
        )
        yield DoctorResult(
            "gpu", "gpu", "missing", "no GPU that torch can use; commands run on the CPU", remedy
        )
        return
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    memory = f"{properties.total_memory / 1e9:.0f} GB"
    yield DoctorResult(
        "gpu",
        environment.gpu,
        "ok",
        f"{environment.gpu_count} x {memory}, {architecture()}, driver {environment.driver}",
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


def architecture() -> str:
    """Of the current GPU, as a table names it: "sm_90", "gfx942"."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip is None:
        return f"sm_{properties.major}{properties.minor}"
    return str(properties.gcnArchName).split(":")[0]


def table(environment: Environment) -> Iterator[DoctorResult]:
    """The file that the library's calls on a GPU go by, checked as the first of them will check it."""
    named = os.environ.get(tables.VARIABLE)
    if not named:
        yield DoctorResult("table", tables.VARIABLE, "ok", "not set: calls go by the built-in choices")
        return
    try:
        entries = tables.read(Path(named))
    except (OSError, ValueError) as error:
        reason = f"{named} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        yield DoctorResult(
            "table", tables.VARIABLE, "missing", f"{reason}: calls on a GPU would fail",
            f"correct it, or unset {tables.VARIABLE} for the built-in choices",
        )  # fmt: skip
        return
    count = f"{named}: {len(entries)} {'entry' if len(entries) == 1 else 'entries'}"
    heads: dict[str, list[str]] = {}
    for entry in entries:
        head = f"{entry.architecture} V={entry.vocab} D={entry.hidden} {entry.dtype}"
        heads.setdefault(head, []).append(str(entry.largest_batch))
    detail = "; ".join([count, *(f"{head} up to B={','.join(batches)}" for head, batches in heads.items())])
    here = architecture() if environment.gpu is not None else "no GPU"
    if any(entry.architecture == here for entry in entries):
        yield DoctorResult("table", tables.VARIABLE, "ok", detail)
    else:
        yield DoctorResult(
            "table", tables.VARIABLE, "note", f"{detail}; none is used here ({here})",
            "run `fsample tune` on this GPU" if environment.gpu else "",
        )  # fmt: skip


def check() -> Iterator[DoctorResult]:
    """Whether calls are checked, and so wait for their device."""
    try:
        on = guard.active()
    except ValueError as error:
        yield DoctorResult(
            "check", guard.VARIABLE, "missing", f"{error}: every call would fail", f"unset {guard.VARIABLE}"
        )
        return
    if on:
        yield DoctorResult(
            "check", guard.VARIABLE, "note", "on: every call waits for its device and is checked",
            f"unset {guard.VARIABLE} to measure, or to capture CUDA graphs",
        )  # fmt: skip
    else:
        yield DoctorResult("check", guard.VARIABLE, "ok", "off: calls are not checked; 1 checks every one")


def ranks(environment: Environment) -> Iterator[DoctorResult]:
    """What `--tp` and `fsample_kernels.distributed` go by: back ends, and memory that GPUs share."""
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


def timers() -> Iterator[DoctorResult]:
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
