"""Distributions known to the last bit: logits that every dtype holds exactly, one column of the weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fsample_cli.exactness.goodness_of_fit import softmax64

Floats = NDArray[np.float64]
REAL = "real "  # begins the names of rows of a model's logits
HIDDEN = 16  # D: a row of 16-bit values then has the 32 bytes that tensor-map loads ask for


@dataclass(frozen=True)
class Target:
    """softmax(logits / temperature) over [V].

    Logits are bf16 values (or -inf), so a matmul reproduces them exactly.
    """

    name: str
    logits: Floats  # [V] float64
    temperature: float = 1.0

    @property
    def vocab(self) -> int:
        return len(self.logits)

    @cached_property
    def probabilities(self) -> Floats:
        """[V] float64, from the rounded logits."""
        return softmax64(self.logits, self.temperature)

    @cached_property
    def entropy(self) -> float:
        """-sum p ln p, in nats."""
        p = self.probabilities[self.probabilities > 0]
        return float(-(p * np.log(p)).sum())

    def tensors(self, rows: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """hidden [rows, 16] = (1, 0, ...) in each row, weight [V, 16] with the logits in column 0."""
        hidden = torch.zeros(rows, HIDDEN, dtype=dtype, device=device)
        hidden[:, 0] = 1
        weight = torch.zeros(self.vocab, HIDDEN, dtype=dtype, device=device)
        weight[:, 0] = torch.from_numpy(self.logits).to(device=device, dtype=dtype)
        return hidden, weight


def together(kinds: Sequence[Target], rows: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """hidden [rows, 16] of which row b has the logits of kinds[b mod len(kinds)], weight [V, 16]."""
    hidden = torch.zeros(rows, HIDDEN, dtype=dtype, device=device)
    row = torch.arange(rows, device=device)
    hidden[row, row % len(kinds)] = 1
    weight = torch.zeros(kinds[0].vocab, HIDDEN, dtype=dtype, device=device)
    for column, kind in enumerate(kinds):
        weight[:, column] = torch.from_numpy(kind.logits).to(device=device, dtype=dtype)
    return hidden, weight


def to_bf16(logits: ArrayLike) -> Floats:
    """The nearest bf16 values, as float64."""
    values = torch.from_numpy(np.ascontiguousarray(logits, dtype=np.float64))
    return np.asarray(values.to(torch.bfloat16).to(torch.float64).numpy())


def flat(vocab: int) -> Target:
    """Every token alike: sees whatever favours an id, a lane or a tile."""
    return Target("flat", np.zeros(vocab))


def skewed(vocab: int, seed: int) -> Target:
    """Zipf's law with exponent 1.1 over shuffled ids, near a language model's tail."""
    ranks = np.random.default_rng(seed).permutation(vocab) + 1
    return Target("skewed", to_bf16(-1.1 * np.log(ranks)))


def shifted(vocab: int, seed: int, by: float) -> Target:
    """A skewed target with all logits moved: the distribution of the moved ones, which bf16 rounds more."""
    return Target(f"skewed{by:+g}", to_bf16(skewed(vocab, seed).logits + by))


def peaked(vocab: int, at: int | None = None) -> Target:
    """One token with about 0.9, in the middle of the ids unless told, the rest alike."""
    logits = np.full(vocab, -math.log(9.0 * (vocab - 1)) if vocab > 1 else 0.0)
    logits[vocab // 2 if at is None else at] = 0.0
    return Target("peaked", to_bf16(logits))


def two_scale(vocab: int) -> Target:
    """Half the mass on one token, half on all others: the widest spread of logits, so temperature shows
    best.
    """
    logits = np.full(vocab, -math.log(max(vocab - 1, 1)))
    logits[vocab // 3] = 0.0
    return Target("two-scale", to_bf16(logits))


def masked(vocab: int, seed: int) -> Target:
    """A skewed target with a random half of the tokens, the likeliest among them, at -inf."""
    logits = skewed(vocab, seed).logits.copy()
    forbidden = np.random.default_rng(seed + 1).random(vocab) < 0.5
    forbidden[int(np.argmax(logits))] = True
    if forbidden.all():
        forbidden[0] = False
    logits[forbidden] = -np.inf
    return Target("masked", logits)


def three_tokens(temperature: float, vocab: int = 128) -> Target:
    """0.6, 0.3, 0.1 at temperature 1, the other tokens at -30: the wrong sign or scale of anything shows."""
    logits = np.full(vocab, -30.0)
    logits[:3] = np.log([0.6, 0.3, 0.1])
    return Target(f"three T={temperature:g}", to_bf16(logits), temperature)


def one_against_many(vocab: int, gap: float) -> Target:
    """The last token at 0, all others at -gap: what is drawn of them is noise at its extreme."""
    logits = np.full(vocab, -gap)
    logits[-1] = 0.0
    return Target(f"gap {gap:g}", to_bf16(logits))


def real(logits: ArrayLike, number: int = 0) -> Target:
    """One row of a model's logits [V], rounded to bf16."""
    return Target(f"{REAL}{number}", to_bf16(logits))
