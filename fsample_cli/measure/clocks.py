"""SM clock and throttling, read beside the timed iterations. Readings flag rows, they never remove a sample.

Throttling is common and harmless to a comparison inside one run; dropping throttled samples could drop them
all.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

# nvmlClocksEventReasons that mean the GPU ran slower than asked: power cap, hardware slowdown, thermal, power
# brake. Idle (0x1), application clocks (0x2), sync boost (0x10) and display (0x100) are not among them.
THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True)
class ClockReading:
    sm_mhz: int
    reasons: tuple[str, ...]  # why the clock was held down; empty when it was not


class ClockReader(Protocol):
    def read(self) -> list[ClockReading]:
        """One reading, or none where clocks cannot be read."""
        ...


class NoClocks:
    """For the CPU, and for machines without nvidia-ml-py."""

    def read(self) -> list[ClockReading]:
        return []


class NvmlClocks:
    """Through nvidia-ml-py; only reads, never sets."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def read(self) -> list[ClockReading]:
        try:
            mhz = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
            mask = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        except self._nvml.NVMLError:  # not permitted or not supported on this host: no reading
            return []
        return [ClockReading(int(mhz), tuple(name for bit, name in THROTTLE_REASONS.items() if mask & bit))]


def make_clock_reader(device: str) -> ClockReader:
    """NVML for the current CUDA device when nvidia-ml-py is there, else no readings."""
    if device != "cuda":
        return NoClocks()
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return NoClocks()
    import torch

    try:
        nvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        return NvmlClocks(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except nvml.NVMLError:
        return NoClocks()
