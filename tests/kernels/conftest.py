"""Fixtures for the kernels, and Triton's interpreter for the tests that are marked `interpreter`.

Triton decides at import whether kernels are compiled or interpreted, so one process cannot hold both. A
marked test that is collected without TRITON_INTERPRET=1 runs in a child process with it, a file at a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fsample_kernels.types import Problem

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class InterpretedFile(pytest.Item):
    """The marked tests of one file, run by a child pytest in the interpreter."""

    tests: list[str]

    def runtest(self) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *self.tests]
        environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command, env=environment, cwd=self.config.rootpath, capture_output=True, text=True
        )
        if done.returncode != 0 or f"{len(self.tests)} passed" not in done.stdout:
            pytest.fail(f"in the interpreter:\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}", pytrace=False)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreter: runs Triton kernels on the CPU, in a child process")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        return
    marked: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("interpreter"):
            marked.setdefault(item.path, []).append(item)
    for tests in marked.values():
        parent = tests[0].parent
        assert parent is not None
        child = InterpretedFile.from_parent(parent, name=f"interpreter ({len(tests)} tests)")
        child.tests = [test.nodeid for test in tests]
        items[items.index(tests[0])] = child
        for test in tests[1:]:
            items.remove(test)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Writes a line of what was found into the log of a run, passed or not."""

    def line(text: str) -> None:
        with capsys.disabled():
            print(f"\nulps: {text}")

    return line


@pytest.fixture
def make_problem() -> Callable[..., Problem]:
    """Build a `Problem` from sizes: make_problem(B, V, D, dtype=..., device=..., **fields of Problem)."""

    def make(
        B: int, V: int, D: int, dtype: torch.dtype = torch.float32, device: str = "cpu", **fields: object
    ) -> Problem:
        generator = torch.Generator(device).manual_seed(1000 * B + V + D)
        hidden = torch.randn(B, D, generator=generator, device=device).to(dtype)
        weight = torch.randn(V, D, generator=generator, device=device).mul_(2.0 / D**0.5)  # logits with std 2
        defaults: dict[str, object] = {
            "hidden": hidden, "weight": weight.to(dtype), "logits": None, "temperature": 1.0,
            "seed": 0x9E3779B97F4A7C15, "position": 7, "num_samples": 1, "head_bias": None,
            "logit_scale": 1.0, "softcap": None, "logit_bias": None, "sparse_bias": None, "mask": None,
            "bitmask": None, "vocab_size": V,
            "first_id": 0, "noise": "grouped", "math": "fast", "want_logprob": False, "want_lse": False,
            "store_logits": False,
        }  # fmt: skip
        return Problem(**(defaults | fields))  # type: ignore[arg-type]

    return make


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN or an impossible id, so that an unwritten slot shows."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made: torch.Tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return made.fill_(torch.nan if made.is_floating_point() else -99999)

    monkeypatch.setattr(torch, "empty", poisoned)
    yield
