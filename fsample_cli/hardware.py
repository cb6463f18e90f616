"""What each GPU can do at most, and the roofline that follows. Plain data; every row names its source.

Bandwidth and rates are the vendors' dense figures for the named form factor. `achievable` figures are measured, and
take the place of the peak in a roofline, because a ceiling that no kernel reaches flatters nobody.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MEASURED_H200 = "measured: read 4.40-4.47 TB/s, matmul 8192^3 808 TFLOP/s"


@dataclass(frozen=True)
class Gpu:
    """One GPU model. Bytes, bytes/s and flop/s throughout; rates are dense, without sparsity."""

    name: str
    pattern: str  # regular expression looked for in the driver's device name, without case
    memory: float  # bytes
    bandwidth: float  # peak, bytes/s
    flops: float  # peak of bf16 and fp16 matmul, flop/s
    flops_fp32: float  # peak of full fp32, without TF32, flop/s
    l2: float | None  # bytes; None where the vendor does not say
    source: str
    achievable_bandwidth: float | None = None
    achievable_flops: float | None = None
    achievable_source: str = ""


def _gpu(
    name: str,
    pattern: str,
    gb: float,
    tb_s: float,
    tflops: float,
    fp32: float,
    l2_mb: float | None,
    source: str,
) -> Gpu:
    l2 = None if l2_mb is None else l2_mb * 2**20
    return Gpu(name, pattern, gb * 1e9, tb_s * 1e12, tflops * 1e12, fp32 * 1e12, l2, source)


GPUS: tuple[Gpu, ...] = (
    Gpu(
        "H200", r"\bH200\b", 141e9, 4.8e12, 989e12, 67e12, 50 * 2**20, "NVIDIA H200 data sheet",
        achievable_bandwidth=4.4e12, achievable_flops=790e12, achievable_source=MEASURED_H200,
    ),
)  # fmt: skip


def find_gpu(device_name: str | None) -> Gpu | None:
    """The row for a driver's device name such as "NVIDIA H200", or None for a GPU that is not listed."""
    if device_name is None:
        return None
    return next((gpu for gpu in GPUS if re.search(gpu.pattern, device_name, re.IGNORECASE)), None)


def ceilings(gpu: Gpu, dtype: str = "bf16") -> tuple[float, float]:
    """(bytes/s, flop/s) that a roofline uses: measured where known, else the vendor's peak.

    The measured matmul rate is of 16-bit inputs; fp32 means full fp32 products, so it keeps its own peak.
    """
    bandwidth = gpu.achievable_bandwidth or gpu.bandwidth
    if dtype == "fp32":
        return bandwidth, gpu.flops_fp32
    return bandwidth, gpu.achievable_flops or gpu.flops


def roofline_us(bytes: float, flops: float, gpu: Gpu | None, dtype: str = "bf16") -> float | None:
    """Least possible time in microseconds: max(bytes / bandwidth, flops / rate). None where the GPU is not known."""
    if gpu is None:
        return None
    bandwidth, rate = ceilings(gpu, dtype)
    return max(bytes / bandwidth, flops / rate) * 1e6
