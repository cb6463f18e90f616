"""The machine and the software that a number belongs to: attached to every record."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from fsample_cli import __version__
from fsample_cli.results import Environment

ROOT = Path(__file__).resolve().parents[2]  # of the source tree; site-packages when installed
SECONDS = 20  # a driver that does not answer must not hold up a run for ever
QUERY = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def collect() -> Environment:
    """The environment now, None where a thing does not apply or cannot be known. Needs no GPU, no git."""
    gpu = torch.cuda.is_available()
    card = (
        nvidia_smi(QUERY, _smi_name(torch.cuda.current_device())) if gpu and torch.version.hip is None else {}
    )
    return Environment(
        gpu=torch.cuda.get_device_name() if gpu else None,
        gpu_count=torch.cuda.device_count() if gpu else 0,
        driver=card.get("driver_version"),
        clock_sm_mhz=_whole(card.get("clocks.sm")),
        clock_sm_max_mhz=_whole(card.get("clocks.max.sm")),
        clock_memory_mhz=_whole(card.get("clocks.mem")),
        power_limit_w=_real(card.get("power.limit")),
        cpu=_cpu_name(),
        cpu_count=os.cpu_count(),
        cpu_threads=torch.get_num_threads(),
        numa_nodes=_numa_nodes(),
        torch=torch.__version__,
        cuda=torch.version.cuda or torch.version.hip,
        triton=version_of("triton"),
        flashinfer=version_of("flashinfer-python"),
        cupti=version_of("cupti-python"),
        python=platform.python_version(),
        platform=platform.platform(),
        fsample=__version__,
        commit=_commit(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def version_of(package: str) -> str | None:
    """Version of an installed distribution, without importing it; None when it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def nvidia_smi(fields: tuple[str, ...], card: str) -> dict[str, str]:
    """`nvidia-smi --query-gpu` for one card (index or GPU-uuid); empty when the tool cannot answer."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", card]
    answer = _output(command)
    values = [value.strip() for value in answer.split(",")] if answer else []
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def _smi_name(device: int) -> str:
    """The card as nvidia-smi knows it: CUDA_VISIBLE_DEVICES renumbers torch's devices, a uuid stays."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else str(device)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _whole(text: str | None) -> int | None:
    value = _real(text)
    return None if value is None else round(value)


def _real(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:  # "[N/A]" on cards that do not tell
        return None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None) or (
        platform.machine() or None
    )


def _numa_nodes() -> int | None:
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None


def _commit() -> str | None:
    """Commit of the source tree that runs, "+changes" when files differ; None for an installed package.

    FSAMPLE_COMMIT names it where the tree was copied to another machine without its history.
    """
    named = os.environ.get("FSAMPLE_COMMIT")
    if named:
        return named
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    if not commit:
        return None
    changed = _output(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}+changes" if changed else commit
