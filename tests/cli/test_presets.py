"""`fsample presets`, and the hardware table behind the roofline."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from fsample_cli.hardware import GPUS, find_gpu, roofline_us
from fsample_cli.records import Record
from fsample_cli.workloads import PRESETS


def test_presets_in_every_format(fsample: Callable[..., Any]) -> None:
    record = Record.from_dict(json.loads(fsample("presets", "--format", "json").out))
    assert [row.preset for row in record.results] == list(PRESETS)
    assert record.command == "fsample presets --format json"
    for format in ("table", "csv", "markdown"):
        text = fsample("presets", "--format", format).out
        for name in PRESETS:
            assert name in text


def test_hardware_names_its_sources(fsample: Callable[..., Any]) -> None:
    text = fsample("presets", "--hardware").out
    for gpu in GPUS:
        assert gpu.name in text and gpu.source and gpu.source.split(",")[0] in text


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA GH200 480GB", None),  # not the H200 board
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300A", None),
        ("Tesla T4", None),
        (None, None),
    ],
)
def test_device_names(device: str | None, name: str | None) -> None:
    gpu = find_gpu(device)
    assert (gpu and gpu.name) == name


def test_roofline_is_the_measured_floor_of_the_h200() -> None:
    gpu = find_gpu("NVIDIA H200")
    weight = 151_936 * 4_096
    # the floor column of the published table: 283 us of weight traffic, 403 us of matmul at 256 rows
    assert roofline_us(2 * weight, 2 * weight, gpu) == pytest.approx(283, abs=0.5)
    assert roofline_us(2 * weight, 2 * weight * 256, gpu) == pytest.approx(403, abs=0.5)
    assert roofline_us(4 * weight, 2 * weight * 256, gpu, "fp32") == pytest.approx(4755, abs=1)  # 67 TFLOP/s
    assert roofline_us(1, 1, None) is None
    assert roofline_us(8e12, 0, find_gpu("NVIDIA B200")) == pytest.approx(
        1e6
    )  # peak where nothing is measured
