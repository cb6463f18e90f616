"""What is tested: a function that draws, and for our own library the whole call with its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fsample_kernels.types import SampleResult


class Draw(Protocol):
    """ids [B] from softmax(hidden @ weight.T / temperature): hidden [B, D], weight [V, D], same dtype and
    device.
    """

    def __call__(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor: ...


class Prepare(Protocol):
    def __call__(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None: ...


Library = Callable[
    ..., SampleResult
]  # `fsample_kernels.sample` with algorithm, math and implementation filled in


@dataclass(frozen=True)
class Subject:
    """One sampler under test.

    `library` is None for samplers that are not ours: tests that need it skip them.
    """

    name: str
    draw: Draw
    prepare: Prepare | None = None
    library: Library | None = None
    noise: str | None = None  # "grouped", "element", "online" with `library`
    reference: Library | None = None  # the same algorithm in plain torch, where `library` may be a GPU kernel
    compiles_shapes: bool = False  # each new shape costs it seconds
    repeats: bool = True  # the same seed and position on the same inputs must give the same ids


class BadIds(ValueError):
    """A sampler returned something that is no vector of ids."""


def checked_ids(subject: Subject, ids: object, hidden: Tensor) -> Tensor:
    """A copy of ids as int64 [B] for hidden [B, D]: a sampler may fill the same buffer in every call.

    Raises BadIds when the sampler returned anything else than integers of that shape on that device.
    """
    rows = hidden.shape[0]
    if not isinstance(ids, Tensor):
        raise BadIds(f"{subject.name} must return a tensor of ids, got {type(ids).__name__}")
    if ids.shape != (rows,) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise BadIds(f"{subject.name} must return integer ids [{rows}], got {ids.dtype} {list(ids.shape)}")
    if ids.device != hidden.device:
        raise BadIds(f"{subject.name} must return ids on {hidden.device}, where hidden is, got {ids.device}")
    return ids.to(torch.int64, copy=True)
