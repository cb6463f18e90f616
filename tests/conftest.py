"""Tests marked `gpu` or `multi_gpu` are skipped where there is none; the rest must pass on a CPU alone."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and count < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {count}"))
