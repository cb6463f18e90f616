"""Memory that a call allocates for its kernels to fill; poisoned beforehand where the call is watched.

What no program wrote then holds what no program writes. Without a watcher this is `torch.empty`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

NO_NUMBER = 0x7FC0DEAD  # the bits of a NaN; arithmetic makes it of others
NO_INTEGER = -99_999  # no id and no count; as a key it would be of the score -0.0, which `words` makes 0.0
NO_FLAG = 0xEE


_watched: ContextVar[list[Tensor] | None] = ContextVar("fsample_watched", default=None)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of which the call's kernels write every entry: fp32, an integer type or bool."""
    made = torch.empty(shape, dtype=dtype, device=device)
    watched = _watched.get()
    if watched is not None:
        _poison(made)
        watched.append(made)
    return made


def spoil(scratch: Tensor) -> None:
    """Poison fp32 memory that the call's kernels write before they read it, some of it or all."""
    if _watched.get() is not None:
        _poison(scratch)


@contextlib.contextmanager
def watched(found: list[Tensor] | None) -> Iterator[None]:
    """Within it, the buffers that calls allocate go into `found`; with None nothing is watched."""
    token = _watched.set(found)
    try:
        yield
    finally:
        _watched.reset(token)


def unwritten(buffer: Tensor) -> list[int] | None:
    """Where the first entry lies that still is what `empty` put there, or None. Waits for the device."""
    words, poison = _words(buffer)
    left = (words == poison).nonzero()
    at: list[int] | None = left[0].tolist() if len(left) else None
    return at


def _poison(tensor: Tensor) -> None:
    words, poison = _words(tensor)
    words.fill_(poison)


def _words(tensor: Tensor) -> tuple[Tensor, int]:
    """The entries as integers, and the one that stands for an entry that was not written."""
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8), NO_FLAG
    if tensor.dtype == torch.float32:
        return tensor.view(torch.int32), NO_NUMBER
    return tensor, NO_INTEGER
