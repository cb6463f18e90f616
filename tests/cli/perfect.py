"""A right sampler, numpy and float64, and wrong ones made from it: what the tests of `verify` test with."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsample_cli.exactness.subject import Subject


class Perfect:
    """Inverse CDF on float64 sums, one generator for the whole life."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def draw(self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int) -> Tensor:
        kinds, kind = hidden[:1], None
        if bool((hidden != kinds).any()):
            kinds, kind = torch.unique(hidden, dim=0, return_inverse=True)
        logits = (kinds.double() @ weight.double().T).numpy() / temperature
        if kind is None:
            return torch.from_numpy(self.ids(logits[0], hidden.shape[0]))
        ids = torch.empty_like(kind)
        for number, y in enumerate(logits):
            here = kind == number
            ids[here] = torch.from_numpy(self.ids(y, int(here.sum())))
        return ids

    def ids(self, y: NDArray[np.float64], rows: int) -> NDArray[np.int64]:
        cumulative = np.exp(y - y.max()).cumsum()
        u = self.rng.random(rows) * cumulative[-1]
        return np.asarray(np.searchsorted(cumulative, u, side="right"), dtype=np.int64)

    def subject(self) -> Subject:
        return Subject("perfect", self.draw, repeats=False)


def _by_row(
    hidden: Tensor, weight: Tensor, temperature: float, seed: int
) -> tuple[Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed % 2**63)
    p = torch.softmax(hidden.double() @ weight.double().T / temperature, dim=1)
    u = torch.rand(len(hidden), 1, generator=generator, dtype=torch.float64)
    return torch.searchsorted(p.cumsum(1), u).clamp(max=p.shape[1] - 1)[:, 0], p, generator


def right(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    return _by_row(hidden, weight, temperature, seed)[0]


def one_percent_bias(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    ids, _, generator = _by_row(hidden, weight, temperature, seed)
    return torch.where(torch.rand(len(ids), generator=generator) < 0.01, 5, ids)


def past_the_end(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    ids, _, generator = _by_row(hidden, weight, temperature, seed)
    return torch.where(torch.rand(len(ids), generator=generator) < 0.001, weight.shape[0], ids)


def never_the_rarest_third(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    ids, p, _ = _by_row(hidden, weight, temperature, seed)
    rare = p.argsort(1)[:, : p.shape[1] // 3]
    return torch.where((rare == ids[:, None]).any(1), p.argmax(1), ids)


def probabilities_as_logits(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    p = torch.softmax(hidden.double() @ weight.double().T / temperature, dim=1)
    u = torch.rand(len(p), 1, generator=torch.Generator().manual_seed(seed % 2**63), dtype=torch.float64)
    return torch.searchsorted(torch.softmax(p, 1).cumsum(1), u).clamp(max=p.shape[1] - 1)[:, 0]


def floats(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    return right(hidden, weight, temperature, seed).float()


def softmax_in_bf16(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    """Probabilities and their running sum in bf16, which has 8 bits."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    p = torch.softmax((hidden @ weight.T).bfloat16() / temperature, dim=1)
    u = torch.rand(len(p), 1, generator=generator)
    return torch.searchsorted(p.cumsum(1).float(), u).clamp(max=p.shape[1] - 1)[:, 0]
