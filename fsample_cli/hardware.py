"""What each GPU can do at most, and the roofline that follows. Plain data; every row names its source.

Bandwidth and rates are the vendors' dense figures for the named form factor. `achievable` figures are
measured and take the peak's place in a roofline: a ceiling that nothing reaches makes every kernel look slow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU model. Rates are dense, without sparsity, and of fp32 accumulation."""

    name: str
    pattern: str  # regular expression looked for in the driver's device name, without case
    memory: float  # bytes
    bandwidth: float  # peak, bytes/s
    flops: float  # peak of bf16 and fp16 matmul, flop/s
    flops_fp32: float  # peak of full fp32 products, without TF32, flop/s
    cache: float  # bytes of the last cache before memory: L2, on AMD the Infinity Cache
    source: str
    achievable_bandwidth: float | None = None
    achievable_flops: float | None = None
    achievable_source: str = ""
    link_bandwidth: float | None = None  # bytes/s from one GPU to a peer, measured; None where it was not


TERA = 1e12
MIB = 2**20
AMPERE = "NVIDIA A100 data sheet, Ampere tuning guide"
HOPPER = "NVIDIA H100 data sheet, Hopper tuning guide"
H200 = "NVIDIA H200 data sheet, L2 as the driver reports it"
BLACKWELL = "NVIDIA HGX B200/B300 data sheet, Blackwell tuning guide"
GRACE = "NVIDIA GB200 NVL72 data sheet, Blackwell tuning guide"
MEASURED_H200 = "measured there: reads 4.40 TB/s, matmul 790 TFLOP/s (808 at 8192^3), push to a peer 388 GB/s"

# The first pattern that fits wins, so a narrow name stands above the wide one that contains it.
# fmt: off
GPUS: tuple[Gpu, ...] = (
    Gpu("A100 80GB PCIe", r"A100 80GB PCIe", 80e9, 1.935 * TERA, 312 * TERA, 19.5 * TERA, 40 * MIB, AMPERE),
    Gpu("A100 80GB SXM", r"A100.*80GB", 80e9, 2.039 * TERA, 312 * TERA, 19.5 * TERA, 40 * MIB, AMPERE),
    Gpu("A100 40GB", r"A100", 40e9, 1.555 * TERA, 312 * TERA, 19.5 * TERA, 40 * MIB, AMPERE),
    Gpu("H100 NVL", r"H100 NVL", 94e9, 3.9 * TERA, 835 * TERA, 60 * TERA, 50 * MIB, HOPPER),
    Gpu("H100 PCIe", r"H100 PCIe", 80e9, 2.0 * TERA, 756 * TERA, 51 * TERA, 50 * MIB, HOPPER),
    Gpu("H100 SXM", r"H100", 80e9, 3.35 * TERA, 989 * TERA, 67 * TERA, 50 * MIB, HOPPER),
    Gpu("H20", r"H20\b", 96e9, 4.0 * TERA, 148 * TERA, 44 * TERA, 60 * MIB, "NVIDIA H20 data sheet"),
    Gpu("H200 NVL", r"H200 NVL", 141e9, 4.8 * TERA, 836 * TERA, 60 * TERA, 60 * MIB, H200),
    Gpu("H200", r"\bH200", 141e9, 4.8 * TERA, 989 * TERA, 67 * TERA, 60 * MIB, H200,
        achievable_bandwidth=4.4 * TERA, achievable_flops=790 * TERA, achievable_source=MEASURED_H200,
        link_bandwidth=388e9),
    Gpu("GB200", r"GB200", 186e9, 8.0 * TERA, 2500 * TERA, 80 * TERA, 126 * MIB, GRACE),
    Gpu("B200", r"\bB200", 192e9, 8.0 * TERA, 2250 * TERA, 75 * TERA, 126 * MIB, BLACKWELL),
    Gpu("B300", r"\bB300", 288e9, 8.0 * TERA, 2250 * TERA, 75 * TERA, 126 * MIB, BLACKWELL),
    Gpu("L4", r"\bL4\b", 24e9, 0.300 * TERA, 121 * TERA, 30.3 * TERA, 48 * MIB, "NVIDIA L4 data sheet"),
    Gpu("L40S", r"\bL40S", 48e9, 0.864 * TERA, 362 * TERA, 91.6 * TERA, 96 * MIB, "NVIDIA L40S data sheet"),
    Gpu("RTX 3090", r"RTX 3090$", 24e9, 0.936 * TERA, 71 * TERA, 35.6 * TERA, 6 * MIB,
        "NVIDIA GA102 architecture paper"),
    Gpu("RTX 4090", r"RTX 4090$", 24e9, 1.008 * TERA, 165 * TERA, 82.6 * TERA, 72 * MIB,
        "NVIDIA Ada architecture paper"),
    Gpu("RTX 5090", r"RTX 5090$", 32e9, 1.792 * TERA, 209 * TERA, 104.8 * TERA, 96 * MIB,
        "NVIDIA RTX Blackwell architecture paper"),
    Gpu("MI300X", r"MI300X", 192e9, 5.3 * TERA, 1307 * TERA, 163 * TERA, 256 * MIB, "AMD MI300X data sheet"),
    Gpu("MI325X", r"MI325X", 256e9, 6.0 * TERA, 1307 * TERA, 163 * TERA, 256 * MIB, "AMD MI325X data sheet"),
    Gpu("MI355X", r"MI355X", 288e9, 8.0 * TERA, 2516 * TERA, 157 * TERA, 256 * MIB, "AMD MI355X data sheet"),
)
# fmt: on


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
    """Least possible time in microseconds: max(bytes / bandwidth, flops / rate). None for an unknown GPU."""
    if gpu is None:
        return None
    bandwidth, rate = ceilings(gpu, dtype)
    return max(bytes / bandwidth, flops / rate) * 1e6
