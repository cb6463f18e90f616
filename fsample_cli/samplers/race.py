"""Matmul, softmax, then the exponential race argmax(p / E): what serving engines fall back to, compiled.

p_i / E_i with E_i exponential is largest at i with probability p_i; engines prefer it to torch.multinomial,
which synchronises and spends most of its time on argument checks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsample_cli.samplers.compiled import Body, compile_whole
from fsample_cli.samplers.protocol import IDENTITY, ShapeUnsupported, Transform, whole_product
from fsample_cli.samplers.seeding import seed_default_generator


class Race:
    """`argmax(softmax((hidden @ weight.T) / T) / Exp(1))` under torch.compile."""

    name = "race"
    algorithm: str | None = None
    implementation = "torch.compile"
    description = (
        "torch.compile(argmax(softmax((hidden @ weight.T) / T, dim=-1) / empty.exponential_(), dim=-1), "
        "softmax in fp32; fullgraph=True, dynamic=False)"
    )
    draws = True

    def __init__(self, transform: Transform = IDENTITY) -> None:
        self.logits_dtype: str | None = None
        self._transform = transform
        self.product = whole_product
        self._compiled: Body | None = None
        self._temperature = torch.empty(0)

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None:
        if temperature == 0:
            raise ShapeUnsupported("race: temperature must be above 0 (it divides), got 0")
        if self._compiled is None:
            self._compiled = compile_whole(self.name, self._body, hidden.device)
        self.logits_dtype = str(hidden.dtype).removeprefix("torch.")
        self._temperature = torch.full((hidden.shape[0], 1), temperature, device=hidden.device)
        self.sample(hidden, weight, temperature=temperature, seed=0, position=0)

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        assert self._compiled is not None, "prepare first"
        seed_default_generator(hidden.device, seed, position)
        return self._compiled(hidden, weight, self._temperature)

    def _body(self, hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
        """hidden [B, D], weight [V, D], temperature [B, 1] fp32 -> ids [B]."""
        logits = self._transform.apply(self.product(hidden, weight))  # [B, V]
        probs = torch.softmax(logits / temperature, dim=-1)  # [B, V] fp32
        return torch.argmax(probs / torch.empty_like(probs).exponential_(), dim=-1)
