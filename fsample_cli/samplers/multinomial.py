"""Matmul, softmax in fp32, torch.multinomial: what most code does, eager and compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from fsample_cli.samplers.compiled import Body, compile_whole
from fsample_cli.samplers.protocol import IDENTITY, ShapeUnsupported, Transform, whole_product
from fsample_cli.samplers.seeding import seed_default_generator

# torch.multinomial counts categories in fp32 and refuses more than it can count one by one.
MOST_CATEGORIES = 2**24


_CALL = "torch.multinomial(torch.softmax((hidden @ weight.T) / T, dim=-1), 1), softmax in fp32"


def _draw(logits: Tensor, temperature: Tensor, transform: Transform) -> Tensor:
    """logits [B, V], temperature [B, 1] fp32 -> ids [B].

    Dividing by an fp32 tensor also upcasts: the softmax is fp32 whatever the dtype of the logits.
    """
    probs = torch.softmax(transform.apply(logits) / temperature, dim=-1)  # [B, V] fp32
    return torch.multinomial(probs, 1).squeeze(1)


def _check(name: str, vocab: int, temperature: float) -> None:
    if vocab > MOST_CATEGORIES:
        raise ShapeUnsupported(f"{name}: torch.multinomial takes at most 2^24 categories, got V = {vocab}")
    if temperature == 0:
        raise ShapeUnsupported(f"{name}: temperature must be above 0 (it divides), got 0")


class MultinomialEager:
    """`torch.multinomial(torch.softmax((hidden @ weight.T) / T, -1), 1)`, default generator."""

    name = "multinomial-eager"
    algorithm: str | None = None
    implementation = "torch"
    description = _CALL
    draws = True

    def __init__(self, transform: Transform = IDENTITY) -> None:
        self.logits_dtype: str | None = None
        self._transform = transform
        self.product = whole_product
        self._temperature = torch.empty(0)

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None:
        _check(self.name, weight.shape[0], temperature)
        self.logits_dtype = str(hidden.dtype).removeprefix("torch.")
        self._temperature = torch.full((hidden.shape[0], 1), temperature, device=hidden.device)
        self.sample(hidden, weight, temperature=temperature, seed=0, position=0)

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        return self.draw(self.product(hidden, weight), temperature=temperature, seed=seed, position=position)

    def draw(self, logits: Tensor, *, temperature: float, seed: int, position: int) -> Tensor:
        seed_default_generator(logits.device, seed, position)
        return _draw(logits, self._temperature, self._transform)


class Multinomial:
    """The same as one graph under torch.compile."""

    name = "multinomial"
    algorithm: str | None = None
    implementation = "torch.compile"
    description = f"torch.compile({_CALL}; fullgraph=True, dynamic=False)"
    draws = True

    def __init__(self, transform: Transform = IDENTITY) -> None:
        self.logits_dtype: str | None = None
        self._transform = transform
        self.product = whole_product
        self._temperature = torch.empty(0)
        self._compiled: Body | None = None

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None:
        _check(self.name, weight.shape[0], temperature)
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
        return _draw(self.product(hidden, weight), temperature, self._transform)
