"""Matmul, then FlashInfer: fi1 is its top-k/top-p sampler with both switched off, fi2 its Gumbel-max sampler.

The product keeps the inputs' dtype. Dividing by an fp32 [B, 1] temperature makes the fp32 logits that both
functions document as their input, in the one pass that FlashInfer's own upcast would take.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from fsample_cli.interrupts import unwrapped
from fsample_cli.samplers.compiled import Body, compile_whole
from fsample_cli.samplers.protocol import (
    IDENTITY,
    SamplerUnavailable,
    ShapeUnsupported,
    Transform,
    whole_product,
)
from fsample_cli.samplers.seeding import call_seed

INSTALL = "pip install flashinfer-python (it builds its kernels with nvcc and ninja on first use)"


class _OnLogits:
    """`flashinfer.sampling` on fp32 logits over the temperature, with explicit seed and offset."""

    algorithm: str | None = None
    implementation = "flashinfer"
    draws = True

    def __init__(self, name: str, transform: Transform = IDENTITY) -> None:
        self._transform = transform
        self.product = whole_product
        self.name = name
        self.description = (
            "flashinfer.sampling.top_k_top_p_sampling_from_logits("
            "(hidden @ weight.T) / T, top_k=-1, top_p=1.0)"
            if name.startswith("fi1")
            else "flashinfer.sampling.sampling_from_logits((hidden @ weight.T) / T)"
        )
        self.logits_dtype: str | None = None
        # Any: the package is optional and has no stubs; importlib keeps type checkers from reading this very
        # file.
        self._sampling: Any = None
        self._temperature = torch.empty(0)

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None:
        if hidden.device.type != "cuda":
            raise SamplerUnavailable(
                f"{self.name}: FlashInfer needs an NVIDIA GPU", hint="run on a machine with an NVIDIA GPU"
            )
        if temperature == 0:
            raise ShapeUnsupported(f"{self.name}: temperature must be above 0 (it divides), got 0")
        if self._sampling is None:
            try:
                self._sampling = importlib.import_module("flashinfer.sampling")
            except ModuleNotFoundError as error:
                missing = f"module {error.name!r} is missing"
                raise SamplerUnavailable(f"{self.name}: {missing}", hint=INSTALL) from error
        self.logits_dtype = str(hidden.dtype).removeprefix("torch.")
        self._temperature = torch.full((hidden.shape[0], 1), temperature, device=hidden.device)
        try:
            with unwrapped():
                self.sample(hidden, weight, temperature=temperature, seed=0, position=0)
        except (FileNotFoundError, RuntimeError) as error:  # its first use runs ninja and nvcc
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise SamplerUnavailable(
                f"{self.name}: FlashInfer failed to start: {reason}", hint=INSTALL
            ) from error

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        return self._pick(self.scaled(hidden, weight, self._temperature), seed, position)

    def scaled(self, hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
        """hidden [B, D], weight [V, D], temperature [B, 1] fp32 -> [B, V] fp32."""
        return self._transform.apply(self.product(hidden, weight)) / temperature

    def _pick(self, scaled: Tensor, seed: int, position: int) -> Tensor:
        """scaled [B, V] fp32, logits over the temperature -> ids [B] int32: widening would add a launch."""
        word = call_seed(seed, position)
        ids: Tensor
        if self.name.startswith("fi1"):
            ids = self._sampling.top_k_top_p_sampling_from_logits(
                scaled, top_k=-1, top_p=1.0, seed=word, offset=0
            )
        else:
            ids = self._sampling.sampling_from_logits(scaled, seed=word, offset=0)
        return ids


class FlashInfer(_OnLogits):
    """Product and draw as separate calls."""

    def draw(self, logits: Tensor, *, temperature: float, seed: int, position: int) -> Tensor:
        return self._pick(self._transform.apply(logits) / self._temperature, seed, position)


class FlashInferCompiled(_OnLogits):
    """Product, on a split head its all-gather, and division as one compiled graph; then the sampler, which no
    compiler sees into.
    """

    implementation = "torch.compile+flashinfer"

    def __init__(self, name: str, transform: Transform = IDENTITY) -> None:
        super().__init__(name, transform)
        self.description = self.description.replace(
            "(hidden @ weight.T) / T",
            "torch.compile((hidden @ weight.T) / T; fullgraph=True, dynamic=False)",
        )
        self._compiled: Body | None = None

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None:
        if self._compiled is None and hidden.device.type == "cuda":
            self._compiled = compile_whole(self.name, self.scaled, hidden.device)
        super().prepare(hidden, weight, temperature=temperature)

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        assert self._compiled is not None, "prepare first"
        return self._pick(self._compiled(hidden, weight, self._temperature), seed, position)
