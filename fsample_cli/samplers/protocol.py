"""What every compared sampler looks like, and the expected ways in which one cannot take part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fsample_cli.errors import InputError, MissingError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Sampler(Protocol):
    """One way to get from hidden states to token ids.

    `hidden` is [B, D], `weight` [V, D], one dtype and device. `sample` returns ids [B] int64 drawn from
    softmax(hidden @ weight.T / temperature); the same (seed, position) on the same inputs gives the same ids.
    A sampler with `draws = False` (the bare GEMM) returns logits [B, V] instead.

    `prepare` does everything that may be slow once per shape: compile, build, allocate. After it, `sample` on
    tensors of those shapes compiles nothing. It raises `SamplerUnavailable` or `ShapeUnsupported`.
    """

    name: str
    algorithm: str | None  # noise algorithm of ours, None elsewhere
    implementation: str  # what ran last: "reference", "triton", "hopper", "torch", "torch.compile", ...
    description: str  # the exact calls
    logits_dtype: str | None  # dtype in which logits reach memory; None where they never do
    draws: bool

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None: ...

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor: ...


@runtime_checkable
class TwoStage(Protocol):
    """A sampler whose product and draw are separate calls, so that a trace can tell them apart:
    `sample(hidden, weight, ...)` is `draw(product(hidden, weight), ...)`.
    """

    product: Callable[[Tensor, Tensor], Tensor]  # logits [B, V]

    def draw(self, logits: Tensor, *, temperature: float, seed: int, position: int) -> Tensor:
        """logits [B, V] in the inputs' dtype -> ids [B]; only after `prepare`."""
        ...


@runtime_checkable
class HoldsColumns(Protocol):
    """A sampler without a draw that makes a part of the logits only."""

    def columns(self, vocab: int) -> slice: ...


@runtime_checkable
class HeldToAnother(Protocol):
    """A sampler that must draw the ids of another one, which has passed the gate of the distribution."""

    def problem(self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int) -> str:
        """Empty, or in words how they differ on these tensors; only after `prepare`."""
        ...


def whole_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits [B, V]: what a sampler's `product` is unless the head is split over ranks."""
    return hidden @ weight.T


@dataclass(frozen=True)
class Transform:
    """What a model does to its logits before the temperature: y = logit_scale (hidden @ weight.T), then
    y = softcap tanh(y / softcap) where there is a soft-cap.
    """

    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def is_identity(self) -> bool:
        return self.logit_scale == 1.0 and self.softcap is None

    def apply(self, logits: Tensor) -> Tensor:
        """The same shape; logits are upcast to fp32 first unless there is nothing to do."""
        if self.is_identity:
            return logits
        y = logits.float() * self.logit_scale  # [B, V]
        return y if self.softcap is None else self.softcap * (y / self.softcap).tanh()


IDENTITY = Transform()


class SamplerUnavailable(MissingError):
    """A package, compiler or device is missing: nothing about this sampler can run here.

    `error.message` is one line; `error.hint` is the command or step that brings what is missing.
    """


class ShapeUnsupported(UsageError):
    """The sampler works here but not on this shape, dtype or temperature; other shapes may run."""


class SamplerRaised(InputError, RuntimeError):
    """A user's function raised. A capture of its call knows what is no error of ours as a RuntimeError."""

    def __init__(self, sampler: str, message: str) -> None:
        super().__init__(f"{sampler} {message}", "mend the function, or leave it out")
        self.sampler = sampler
