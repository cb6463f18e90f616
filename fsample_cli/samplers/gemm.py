"""The bare LM-head product: the time nothing that materialises logits can go below. It draws nothing."""

from __future__ import annotations

from torch import Tensor


class Gemm:
    """`hidden @ weight.T`: cuBLAS on NVIDIA, the inputs' dtype in and out."""

    name = "gemm"
    algorithm: str | None = None
    implementation = "torch"
    description = "hidden @ weight.T (no draw)"
    draws = False

    def __init__(self) -> None:
        self.logits_dtype: str | None = None

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None:
        logits = self.sample(hidden, weight, temperature=temperature, seed=0, position=0)
        self.logits_dtype = str(logits.dtype).removeprefix("torch.")

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        return hidden @ weight.T  # [B, V]
