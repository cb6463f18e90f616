"""Matmul, softmax in fp32, torch.multinomial: what most code does, eager and compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from fsample_cli.samplers.compiled import Body, compile_whole
from fsample_cli.samplers.protocol import IDENTITY, ShapeUnsupported, Transform
from fsample_cli.samplers.seeding import seed_default_generator

# torch.multinomial counts categories in fp32 and refuses more than it can count one by one.
MOST_CATEGORIES = 2**24


def make_draw(transform: Transform) -> Body:
    """(hidden [B, D], weight [V, D], temperature [B, 1] fp32) -> ids [B].

    Dividing by an fp32 tensor also upcasts: the softmax is fp32 whatever the dtype of the logits.
    """

    def draw(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
        logits = transform.apply(hidden @ weight.T)  # [B, V]
        probs = torch.softmax(logits / temperature, dim=-1)  # [B, V] fp32
        return torch.multinomial(probs, 1).squeeze(1)

    return draw


class Multinomial:
    """`torch.multinomial(torch.softmax((hidden @ weight.T) / T, -1), 1)`, default generator."""

    algorithm: str | None = None
    draws = True

    def __init__(self, *, compiled: bool, transform: Transform = IDENTITY) -> None:
        self.name = "multinomial" if compiled else "multinomial-eager"
        self.implementation = "torch.compile" if compiled else "torch"
        call = "torch.multinomial(torch.softmax((hidden @ weight.T) / T, dim=-1), 1), softmax in fp32"
        self.description = f"torch.compile({call}; fullgraph=True, dynamic=False)" if compiled else call
        self.logits_dtype: str | None = None
        self._compiled = compiled
        self._ready = False
        self._body = make_draw(transform)
        self._temperature = torch.empty(0)

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None:
        if weight.shape[0] > MOST_CATEGORIES:
            raise ShapeUnsupported(
                f"{self.name}: torch.multinomial takes at most 2^24 categories, got V = {weight.shape[0]}"
            )
        if temperature == 0:
            raise ShapeUnsupported(f"{self.name}: temperature must be above 0 (it divides), got 0")
        if self._compiled and not self._ready:
            self._body = compile_whole(self.name, self._body, hidden.device)
            self._ready = True
        self.logits_dtype = str(hidden.dtype).removeprefix("torch.")
        self._temperature = torch.full((hidden.shape[0], 1), temperature, device=hidden.device)
        self.sample(hidden, weight, temperature=temperature, seed=0, position=0)

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        seed_default_generator(hidden.device, seed, position)
        return self._body(hidden, weight, self._temperature)
