"""What a run says of the kernels it compiled before it began."""

from __future__ import annotations

import pytest
import torch

import fsample_kernels
from fsample_cli.measure import compile_ahead
from fsample_cli.measure.compile_ahead import Ahead
from fsample_cli.samplers import load
from fsample_cli.samplers.protocol import Transform
from fsample_kernels import Compiled


def test_the_line_counts_new_kernels_and_is_empty_without_one() -> None:
    new, held = Compiled("a", 9.0, False), Compiled("b", 0.01, True)
    assert Ahead([new] * 12, 21.4, 8).text == "compiled 12 kernels in 21 s, 8 at a time"
    assert Ahead([new, held], 9.2, 8).text == "compiled 1 kernel in 9 s"
    assert Ahead([held], 0.1, 8).text == ""


def test_our_samplers_are_called_at_every_batch_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[tuple[str, int]] = []

    class OnGpu(torch.Tensor):
        is_cuda = True

    def prepare(self: object, hidden: torch.Tensor, weight: torch.Tensor, *, temperature: float) -> None:
        called.append((type(self).__name__, hidden.shape[0]))

    for name in ("fused", "unfused", "gemm", "multinomial-eager"):
        monkeypatch.setattr(type(load(name, Transform())), "prepare", prepare)
    weight = torch.zeros(10, 4).as_subclass(OnGpu)
    names = ("fused:element", "gemm", "unfused", "multinomial-eager")
    found = compile_ahead.compile_ahead([load(name, Transform()) for name in names], [weight], [1, 65], 1.0)
    assert called == [("Fused", 1), ("Fused", 65), ("Unfused", 1), ("Unfused", 65)]
    assert found.text == "" and found.workers == fsample_kernels.compile_workers()


def test_on_a_cpu_nothing_is_called() -> None:
    assert compile_ahead.compile_ahead([load("fused", Transform())], [torch.zeros(4, 2)], [1], 1.0).text == ""
