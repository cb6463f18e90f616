"""Peak memory of one call on the CPU, beyond its inputs, a process for each sampler (Linux).

    python profiles/peak_memory.py > profiles/notes/cpu-peak-memory.md

The high-water mark of the process (VmHWM) after the first call at the full shape, minus what was resident
before it; a call at a tiny shape has loaded the libraries by then. glibc gives every buffer above 128 KiB
back at once here, so that nothing freed earlier hides an allocation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from fsample_cli import samplers
from fsample_cli.measure import environment, inputs
from fsample_cli.workloads import PRESETS

PRESET, BATCH = "qwen3-0.6b", 16
NAMES = ("gemm", "fused:grouped", "fused:element", "multinomial-eager")


def main() -> None:
    if len(sys.argv) == 2:
        print(measure(sys.argv[1]))
        return
    fixed = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    work, machine = PRESETS[PRESET].workload("fp32"), environment.collect()
    logits = BATCH * work.vocab * 4
    print("# Peak memory of one call on the CPU\n")
    print(
        f"`python profiles/peak_memory.py`: {PRESET}, V = {work.vocab:,}, D = {work.hidden:,}, B = {BATCH}, "
        f"fp32, so the logits [B, V] are {logits / 1e6:.1f} MB; {machine.cpu}, torch {machine.torch}, "
        f"commit {machine.short_commit}, {(machine.date or '')[:10]}.\n"
    )
    print("| sampler | MB beyond the inputs | of B V 4 bytes |\n| --- | ---: | ---: |")
    for name in NAMES:
        command = [sys.executable, __file__, name]
        peak = int(subprocess.run(command, env=fixed, check=True, capture_output=True, text=True).stdout)
        print(f"| {name} | {peak / 1e6:.1f} | {peak / logits:.2f} |")


def measure(name: str) -> int:
    """Bytes that the first call at the full shape adds to this process at its highest."""
    work = PRESETS[PRESET].workload("fp32")
    sampler = samplers.load(name)
    weight = inputs.load_weight(work, "cpu", seed=0)  # [V, D]
    hidden = inputs.make_hidden(work, BATCH, "cpu", seed=0)  # [B, D]
    small = weight[:2048].clone()
    sampler.prepare(hidden, small, temperature=1.0)
    sampler.sample(hidden, small, temperature=1.0, seed=0, position=0)
    torch.zeros(1)
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # the high-water mark starts again from what is resident now
    before = status("VmRSS")
    sampler.sample(hidden, weight, temperature=1.0, seed=0, position=1)
    return status("VmHWM") - before


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}: this script needs Linux")


if __name__ == "__main__":
    main()
