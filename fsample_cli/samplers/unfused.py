"""Two steps with our own second one: cuBLAS logits, then the one-pass sampler of `fsample_kernels`.

The strongest baseline that still writes logits, in the inputs' dtype as all baselines do. The library's net,
`implementation="unfused"`, keeps them in fp32: that is the sampler `fused:unfused`.
"""

from __future__ import annotations

from torch import Tensor

import fsample_kernels
from fsample_cli.samplers.protocol import IDENTITY, ShapeUnsupported, Transform, whole_product


class Unfused:
    """`fsample_kernels.sample_logits(hidden @ weight.T, ...)`; logits keep the inputs' dtype."""

    name = "unfused"
    algorithm: str | None = "grouped"
    description = (
        "fsample_kernels.sample_logits(hidden @ weight.T, temperature=T, seed=seed, position=position, "
        "noise='grouped')"
    )
    draws = True

    def __init__(self, transform: Transform = IDENTITY) -> None:
        self._transform = transform
        self.product = whole_product
        self.implementation = "auto"
        self.logits_dtype: str | None = None

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None:
        try:
            self.sample(hidden, weight, temperature=temperature, seed=0, position=0)
        except ValueError as error:
            raise ShapeUnsupported(f"unfused: {error}") from error

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        return self.draw(self.product(hidden, weight), temperature=temperature, seed=seed, position=position)

    def draw(self, logits: Tensor, *, temperature: float, seed: int, position: int) -> Tensor:
        self.logits_dtype = str(logits.dtype).removeprefix("torch.")
        result = fsample_kernels.sample_logits(
            logits,
            temperature=temperature,
            seed=seed,
            position=position,
            logit_scale=self._transform.logit_scale,
            softcap=self._transform.softcap,
            noise="grouped",
        )
        self.implementation = result.implementation
        return result.ids[:, 0]  # [B], a view
