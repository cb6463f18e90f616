"""The walk over the vocabulary that `reference` draws from: product, transforms, masses of the groups.

Chunks are laid out [C, B], vocabulary first: on a CPU that product is the faster of the two, and halving a
group then adds long contiguous runs. Buffers are reused, so a chunk is valid until the next one is asked
for.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .noise import BLOCK, LOG2_E, MAX_POSITION, ONLINE_BLOCK, RowStreams, row_streams
from .types import MIN_TEMPERATURE, Problem

# C * B. On a CPU 2 MiB a buffer: it stays in the caches, and a chunk's work outweighs the cost of calling
# torch.
_CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 23}
_COPY_ELEMENTS = {
    "cpu": 1 << 22,
    "cuda": 1 << 25,
}  # C * D, where a product needs a converted copy of the weights
_MIN_BLOCKS = 8


@dataclass(frozen=True)
class Rows:
    """What a row brings to every chunk. Greedy rows have scale 1; their result is replaced at the end."""

    scale: float | Tensor  # c = log2(e) / T: an fp32 number or [B]
    greedy: bool | Tensor  # True or False for the whole batch, or [B] bool
    bad: Tensor  # [B] bool: a parameter on the device is outside its range
    streams: RowStreams


@dataclass(eq=False)
class Chunk:
    """Logits of a run of ids. Rows past the vocabulary or outside the shard are -inf."""

    first: int  # global id of row 0, a multiple of 128 (`online`: of 4096)
    y: Tensor  # [C, B] fp32, C a multiple of 128; the memory of x where no row is greedy
    x: Tensor  # [C, B] fp32, y * scale
    work: Tensor  # [C, B] fp32, scratch

    @cached_property
    def groups(self) -> tuple[Tensor, Tensor, Tensor]:
        """m [G, B], s [G, B], top [B] for the G = C / 32 groups of 32 ids.

        m is the maximum of x in a group, 0 where nothing is allowed; s the sum of 2**(x - m), in the order
        of the tree that a draw descends; top the row's maximum of x. A NaN shows in all three.
        """
        size = self.x.shape[1]
        split = self.x.view(
            -1, 16, 8, size
        )  # [n, 16, 4 * 2, B]: member pair, group and member of the pair, row
        room = self.work.view(-1, 16, 8, size)
        torch.maximum(split[:, :8], split[:, 8:], out=room[:, :8])
        for half in (4, 2, 1):
            torch.maximum(room[:, :half], room[:, half : 2 * half], out=room[:, :half])
        pair = room[:, 0].view(-1, 4, 2, size)
        m = torch.maximum(pair[:, :, 0], pair[:, :, 1])  # [n, 4, B]
        top = m.flatten(0, 1).amax(0)
        m.masked_fill_(m == -torch.inf, 0.0)
        # Spread over the pairs first: a run of 8 B equal offsets then meets 8 B contiguous logits.
        torch.sub(split, m[:, :, None].expand(-1, -1, 2, -1).flatten(1, 2)[:, None], out=room)
        room.exp2_()
        for half in (8, 4, 2, 1):
            room[:, :half] += room[:, half : 2 * half]
        s = pair[:, :, 0] + pair[:, :, 1]
        return m.flatten(0, 1), s.flatten(0, 1), top


def row_parameters(problem: Problem) -> Rows:
    """Scale, greedy rows, rows with a bad parameter, streams. Asks a GPU nothing."""
    device, num_rows = device_of(problem), problem.num_rows
    bad = torch.zeros(num_rows, dtype=torch.bool, device=device)
    scale: float | Tensor
    greedy: bool | Tensor
    if isinstance(problem.temperature, Tensor):
        t = problem.temperature
        bad |= ~((t >= 0) & (t < torch.inf))
        greedy = t < MIN_TEMPERATURE
        scale = (LOG2_E / t.double()).float().masked_fill(bad | greedy, 1.0)
        if device.type == "cpu" and not greedy.any():
            greedy = False
    else:
        greedy = problem.temperature < MIN_TEMPERATURE
        scale = 1.0 if greedy else ctypes.c_float(LOG2_E / problem.temperature).value
    if isinstance(problem.position, Tensor):
        bad |= (problem.position < 0) | (problem.position >= MAX_POSITION)
    if problem.sparse_bias is not None:
        rows, ids, values = problem.sparse_bias
        outside = (rows < 0) | (rows >= num_rows)
        wrong = (ids < 0) | (ids >= problem.vocab_size) | ~values.isfinite()
        count = torch.zeros(num_rows, dtype=torch.int32, device=device)
        bad |= count.index_add(0, rows.masked_fill(outside, 0), wrong.int()) > 0
        bad |= outside.any()
    return Rows(scale, greedy, bad, row_streams(problem.seed, problem.position, num_rows, device))


def chunks(problem: Problem, rows: Rows, logits: Tensor | None) -> Iterator[Chunk]:
    """Yield the shard's ids in runs, and write y to `logits` [B, V] where given."""
    device, num_rows = device_of(problem), problem.num_rows
    align = ONLINE_BLOCK if problem.noise == "online" else BLOCK
    end = problem.first_id + problem.num_columns
    start = problem.first_id // align * align
    size = align if problem.noise == "online" else _chunk_size(problem, end - start)
    y = torch.empty(size, num_rows, dtype=torch.float32, device=device)
    x = torch.empty_like(y) if rows.greedy is not False else y
    work = torch.empty_like(y)
    hidden = None if problem.hidden is None else problem.hidden.float().t().contiguous()  # [D, B]
    for first in range(start, end, size):
        low, high = max(first, problem.first_id), min(first + size, end)
        local = slice(low - problem.first_id, high - problem.first_id)
        used = -(-(high - first) // BLOCK) * BLOCK
        if high - low < used:
            y[:used].fill_(-torch.inf)
        part = y[low - first : high - first]
        if hidden is not None:
            assert problem.weight is not None
            torch.mm(problem.weight[local].float(), hidden, out=part)
        else:
            assert problem.logits is not None
            part.copy_(problem.logits[:, local].t())
        _transform(problem, part, low)
        if logits is not None:
            logits[:, local] = part.t()
        torch.mul(y[:used], rows.scale, out=x[:used])
        yield Chunk(first, y[:used], x[:used], work[:used])


def _chunk_size(problem: Problem, total: int) -> int:
    kind = "cuda" if device_of(problem).type == "cuda" else "cpu"
    size = _CHUNK_ELEMENTS[kind] // max(1, problem.num_rows)
    weight = problem.weight
    if weight is not None and (weight.dtype != torch.float32 or weight.stride(1) != 1):
        size = min(size, _COPY_ELEMENTS[kind] // weight.shape[1])
    return min(max(size // BLOCK, _MIN_BLOCKS), -(-total // BLOCK)) * BLOCK


def _transform(problem: Problem, y: Tensor, first: int) -> None:
    """All between product and temperature, in place on y [C, B], whose row 0 is global id `first`.

    `head_bias` belongs to the rows of the weight; every other tensor is read by global id.
    """
    size, num_rows = y.shape
    ids = slice(first, first + size)
    if problem.head_bias is not None:
        local = slice(first - problem.first_id, first - problem.first_id + size)
        y += problem.head_bias[local, None].float()
    if problem.logit_scale != 1.0:
        y *= problem.logit_scale
    if problem.softcap is not None:
        y.div_(problem.softcap).tanh_().mul_(problem.softcap)
    if problem.logit_bias is not None:
        bias = problem.logit_bias[..., ids].float()
        y += bias.t() if bias.dim() == 2 else bias[:, None]
    if problem.sparse_bias is not None and num_rows:
        rows, tokens, values = problem.sparse_bias
        here = (tokens >= first) & (tokens < first + size) & (rows >= 0) & (rows < num_rows)
        at = (torch.where(here, tokens - first, 0), torch.where(here, rows, 0))
        y.index_put_(at, torch.where(here, values, 0.0), accumulate=True)  # an entry from elsewhere adds 0
    if problem.mask is not None:
        forbidden = ~problem.mask[..., ids]  # the mask may end at vocab_size
        kept = y[: forbidden.shape[-1]]
        kept.masked_fill_(forbidden.t() if forbidden.dim() == 2 else forbidden[:, None], -torch.inf)
    if problem.bitmask is not None:
        mask = problem.bitmask
        packed = mask[:1] if mask.stride(0) == 0 else mask  # one row expanded to all is looked at once
        token = torch.arange(first, first + size, device=y.device)
        last = mask.shape[1] - 1  # the mask may end at vocab_size, before this chunk even
        lowest = min(first // 32, last)
        words = packed[:, lowest : (first + size - 1) // 32 + 1].t().contiguous()  # [<= C / 32 + 1, B or 1]
        bits = (words[(token >> 5).clamp(max=last) - lowest] >> (token & 31)[:, None]) & 1
        y.masked_fill_(bits == 0, -torch.inf)
    if first + size > problem.vocab_size:
        y[max(problem.vocab_size - first, 0) :] = -torch.inf


def device_of(problem: Problem) -> torch.device:
    source = problem.hidden if problem.hidden is not None else problem.logits
    assert source is not None
    return source.device


class _Precision:
    """A setting of torch's for fp32 products, and the calls that hold it at full fp32 now.

    Every thread has the same one. Each call restoring what it found would let a call that ends take the
    setting from one that still runs, and leave ours to the user: so the first in saves, the last out
    restores.
    """

    def __init__(self, full: str, get: Callable[[], str], put: Callable[[str], None]) -> None:
        self._full, self._get, self._put = full, get, put
        self._lock, self._inside, self._before = threading.Lock(), 0, ""

    def enter(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = self._get()
                self._put(self._full)
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._put(self._before)


def _precision_of(backend: Any) -> _Precision:
    """That of a back end's products. torch before 2.9 has no name for it, and one setting for all."""
    if not hasattr(backend, "fp32_precision"):
        return _EVERYWHERE
    return _Precision(
        "ieee", lambda: str(backend.fp32_precision), lambda to: setattr(backend, "fp32_precision", to)
    )


_EVERYWHERE = _Precision("highest", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
_PRECISION = {
    "cuda": _precision_of(torch.backends.cuda.matmul),
    "cpu": _precision_of(getattr(torch.backends.mkldnn, "matmul", None)),
}


@contextmanager
def full_fp32_products(device: torch.device) -> Iterator[None]:
    """fp32 inputs mean full fp32 products, whatever torch.set_float32_matmul_precision was told.

    "medium" means bf16 products on a CPU, "high" TF32 on a GPU. The setting is the process's, as torch has
    it: it is put back when no call is inside any more, on any thread. One made meanwhile is lost.
    """
    precision = _PRECISION["cuda" if device.type == "cuda" else "cpu"]
    precision.enter()
    try:
        yield
    finally:
        precision.leave()
