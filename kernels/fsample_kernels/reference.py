"""The eager PyTorch implementation: every algorithm and every transform, on any device, the vocabulary in chunks.

It is the definition that the kernels are tested against and the implementation on a CPU. Chunks are laid out [C, B],
vocabulary first: on a CPU that product is the faster of the two, and halving a group then adds long contiguous runs.
No `[B, V]` buffer is made unless `store_logits` asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from . import noise
from .noise import BLOCK, LN_2, LOG2_E, ONLINE_BLOCK, RowStreams
from .types import Problem, SampleResult

_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 23}  # C * B; on a CPU 1 MiB, so that a chunk stays in the L2 caches
_NOISE_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 23}  # values of noise made at a time, when there are many samples
_PENDING_DRAWS = 1 << 13  # up to here the winner's 128 logits are kept and the in-group draw is made once, at the end


def run(problem: Problem) -> SampleResult:
    """Draw as `api.sample` documents, fp32 arithmetic; any device that torch supports, no GPU synchronisation."""
    with torch.no_grad(), full_fp32_products(problem):
        return _run(problem)


@dataclass(frozen=True)
class _Rows:
    """What a row brings to every chunk. Greedy rows count as temperature 1 here; their result is replaced later."""

    scale: float | Tensor  # c = log2(e) / T, fp32 number or [B]
    greedy: bool | Tensor  # True or False for the whole batch, or [B] bool
    bad: Tensor  # [B] bool: a parameter on the device is outside its range
    streams: RowStreams


@dataclass(frozen=True)
class _Chunk:
    """Logits of a run of ids. Rows past the vocabulary or the shard are -inf."""

    first: int  # global id of row 0, a multiple of 128
    y: Tensor  # [C, B] fp32, C a multiple of 128; overwritten by x unless something still needs it
    x: Tensor  # [C, B] fp32, y * scale
    m: Tensor  # [n, 4, B], C = 128 n: maximum of x in each group, 0 where all are -inf
    s: Tensor  # [n, 4, B]: sum of 2**(x - m) in each group
    top: Tensor  # [B]: maximum of x, NaN if any is NaN


def _run(problem: Problem) -> SampleResult:
    rows = _row_parameters(problem)
    device, num_rows = rows.bad.device, problem.num_rows
    draws = {"element": _ElementDraws, "grouped": _GroupDraws, "online": _OnlineDraws}[problem.noise](problem, rows)
    mass = _LogMass(num_rows, device) if problem.want_lse or problem.want_logprob else None
    greedy = None if rows.greedy is False else _Greedy(num_rows, device)
    logits = (
        torch.empty(num_rows, problem.num_columns, dtype=torch.float32, device=device) if problem.store_logits else None
    )
    top = torch.full((num_rows,), -torch.inf, device=device)
    for chunk in _chunks(problem, rows, logits):
        top = torch.maximum(top, chunk.top)
        if rows.greedy is not True:
            draws.add(chunk)
        if greedy is not None:
            greedy.add(chunk)
        if mass is not None:
            mass.add(chunk)

    ids, x = draws.result()  # [K, B] each
    bad = rows.bad | top.isnan() | (top == torch.inf)
    nothing = top == -torch.inf
    logprob = lse = None
    if mass is not None:
        total = mass.log2()  # [B] float64
        logprob = ((x - total) * LN_2).clamp(max=0).to(torch.float32)
        lse = (total * LN_2).to(torch.float32)
    if greedy is not None:
        ids = torch.where(torch.as_tensor(rows.greedy, device=device), greedy.ids, ids)
        if mass is not None and logprob is not None and lse is not None:
            logprob = logprob.masked_fill(torch.as_tensor(rows.greedy, device=device), 0.0)
            lse = torch.where(torch.as_tensor(rows.greedy, device=device), greedy.best, lse)
    ids = ids.masked_fill(bad | nothing, -1)
    if logprob is not None and lse is not None:
        logprob = logprob.masked_fill(bad | nothing, torch.nan)
        lse = lse.masked_fill(nothing, -torch.inf).masked_fill(bad, torch.nan)
    return SampleResult(
        ids.t().contiguous(),
        logprob.t().contiguous() if problem.want_logprob and logprob is not None else None,
        lse if problem.want_lse else None,
        logits,
        "reference",
    )


class _GroupDraws:
    """Algorithm I.2: one Gumbel a group, the group with the best score wins, and one draw inside it.

    The draw inside a group only matters where that group wins. So the winner's aligned block of 128 logits is kept and
    drawn from at the end, or with many draws at once, as soon as a chunk has a new winner.
    """

    def __init__(self, problem: Problem, rows: _Rows) -> None:
        self.streams = rows.streams
        device, num_rows, num_samples = rows.bad.device, problem.num_rows, problem.num_samples
        self.samples = torch.arange(num_samples, device=device)[:, None]  # [K, 1]
        shape = (num_samples, num_rows)
        self.rows = torch.arange(num_rows, device=device).expand(shape)  # [K, B]
        self.best = torch.full(shape, -torch.inf, device=device)  # [K, B] score
        self.ids = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.x = torch.full(shape, torch.nan, device=device)  # x of the drawn id
        self.block = torch.zeros(shape, dtype=torch.int64, device=device)  # global number of the winner's block
        pending = self.best.numel() <= _PENDING_DRAWS
        self.logits = torch.full((*shape, BLOCK), -torch.inf, device=device) if pending else None  # [K, B, 128]
        self.limit = _NOISE_ELEMENTS["cuda" if device.type == "cuda" else "cpu"]

    def add(self, chunk: _Chunk) -> None:
        mass = (chunk.m + chunk.s.log2()).flatten(0, 1)[:, None]  # [G, 1, B] log2 mass of each group
        units = chunk.first // BLOCK * 4 + torch.arange(mass.shape[0], device=mass.device)[:, None, None]
        for part in _slices(self.samples.shape[0], self.limit // max(1, mass.shape[0] * mass.shape[2])):
            self._add_samples(chunk, mass, units, part)

    def _add_samples(self, chunk: _Chunk, mass: Tensor, units: Tensor, part: slice) -> None:
        _, _, r2, r3 = self.streams.words(units, self.samples[part], noise.GROUP)  # [G, k, B]
        score = noise.log_mass_score(mass, noise.exponential(noise.uniform64(r2, r3)))
        best, group = score.max(0)  # [k, B]
        replace = self._replace(chunk, best, part)
        block = group // 4
        # A GPU is not asked whether anything changed: the answer would make the host wait.
        if replace.device.type == "cpu" and not replace.any():
            return
        logits = chunk.x.view(-1, BLOCK, chunk.x.shape[1])[block, :, self.rows[part]]  # [k, B, 128]
        block = block + chunk.first // BLOCK
        self.block[part] = torch.where(replace, block, self.block[part])
        if self.logits is not None:
            self.logits[part] = torch.where(replace[..., None], logits, self.logits[part])
            return
        ids, x = draw_in_block(logits, block, self.streams.take(self.rows[part]), self.samples[part])
        self.ids[part] = torch.where(replace, ids, self.ids[part])
        self.x[part] = torch.where(replace, x, self.x[part])

    def _replace(self, chunk: _Chunk, best: Tensor, part: slice) -> Tensor:
        """Whether the chunk's winner, [k, B] score, takes the place of the one so far; equal scores keep the lower id."""
        replace = best > self.best[part]
        self.best[part] = torch.where(replace, best, self.best[part])
        return replace

    def result(self) -> tuple[Tensor, Tensor]:
        if self.logits is not None:
            return draw_in_block(self.logits, self.block, self.streams.take(self.rows), self.samples)
        return self.ids, self.x


class _OnlineDraws(_GroupDraws):
    """Algorithm I.3: blocks of 4096 ids, each drawn by groups; a block replaces the sample at odds mass : total."""

    def __init__(self, problem: Problem, rows: _Rows) -> None:
        super().__init__(problem, rows)
        self.total = torch.full(self.best.shape, -torch.inf, dtype=torch.float64, device=self.best.device)  # log2 mass

    def _replace(self, chunk: _Chunk, best: Tensor, part: slice) -> Tensor:
        mass = _LogMass(best.shape[1], best.device)
        mass.add(chunk)
        unit = self.samples.new_tensor(chunk.first // ONLINE_BLOCK)
        r0, r1, _, _ = self.streams.words(unit, self.samples[part], noise.ONLINE)
        total, replace = merge_masses(self.total[part], mass.log2(), noise.uniform64(r0, r1, torch.float64))
        self.total[part] = total
        return replace


class _ElementDraws:
    """Algorithm 1: one Gumbel a token, the best score wins."""

    def __init__(self, problem: Problem, rows: _Rows) -> None:
        self.streams = rows.streams
        device, shape = rows.bad.device, (problem.num_samples, problem.num_rows)
        self.samples = torch.arange(problem.num_samples, device=device)[:, None]  # [K, 1]
        self.best = torch.full(shape, -torch.inf, device=device)  # [K, B] score
        self.ids = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.x = torch.full(shape, torch.nan, device=device)
        self.limit = _NOISE_ELEMENTS["cuda" if device.type == "cuda" else "cpu"]

    def add(self, chunk: _Chunk) -> None:
        size, num_rows = chunk.x.shape
        units = chunk.first // 4 + torch.arange(size // 4, device=chunk.x.device)[:, None, None]
        for part in _slices(self.samples.shape[0], self.limit // max(1, size * num_rows)):
            words = torch.stack(self.streams.words(units, self.samples[part], noise.ELEMENT), dim=1)  # [C/4, 4, k, B]
            exponential = noise.exponential(noise.uniform32(words.flatten(0, 1)))  # [C, k, B]
            best, at = noise.log_mass_score(chunk.x[:, None], exponential).max(0)  # [k, B]
            replace = best > self.best[part]
            self.best[part] = torch.where(replace, best, self.best[part])
            self.ids[part] = torch.where(replace, at + chunk.first, self.ids[part])
            self.x[part] = torch.where(replace, chunk.x.gather(0, at), self.x[part])

    def result(self) -> tuple[Tensor, Tensor]:
        return self.ids, self.x


class _Greedy:
    """argmax of y, the lowest id on a tie."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.best = torch.full((num_rows,), -torch.inf, device=device)
        self.ids = torch.full((num_rows,), -1, dtype=torch.int64, device=device)

    def add(self, chunk: _Chunk) -> None:
        best, at = chunk.y.max(0)
        replace = best > self.best
        self.best = torch.where(replace, best, self.best)
        self.ids = torch.where(replace, at + chunk.first, self.ids)


class _LogMass:
    """Running log2 of the sum of 2**x over the chunks of a row."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.top = torch.full((num_rows,), -torch.inf, dtype=torch.float64, device=device)
        self.sum = torch.zeros(num_rows, dtype=torch.float64, device=device)

    def add(self, chunk: _Chunk) -> None:
        top = chunk.top.double()
        new = torch.maximum(self.top, top)
        anchor = new.masked_fill(new == -torch.inf, 0.0)
        here = (chunk.s * torch.exp2(chunk.m - anchor.float())).flatten(0, 1).sum(0).double()
        self.sum = self.sum * torch.exp2(self.top - anchor) + here
        self.top = new

    def log2(self) -> Tensor:
        """[B] float64, -inf without mass."""
        return self.top + self.sum.log2()


def merge_masses(old: Tensor, new: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Algorithm I.3, Lemma D.3: log2 of 2**old + 2**new, and whether `u` in (0, 1) picks the new side.

    The new side is picked with probability 2**new / (2**old + 2**new). u * total falls in the lighter side first, so
    that a tiny mass on either side keeps its digits. A side of mass 0 (-inf) is never picked unless both are.
    """
    top = torch.maximum(old, new)
    anchor = top.masked_fill(top == -torch.inf, 0.0)
    mass_old, mass_new = torch.exp2(old - anchor), torch.exp2(new - anchor)
    total = mass_old + mass_new
    old_is_light = mass_old <= mass_new
    replace = (u * total < torch.minimum(mass_old, mass_new)) ^ old_is_light
    return anchor + total.log2(), replace


def draw_in_block(x: Tensor, block: Tensor, streams: RowStreams, sample: Tensor) -> tuple[Tensor, Tensor]:
    """Grouped draw inside one aligned block of 128 ids for each draw; fp32.

    x: [..., 128] logits in base 2; block: [...] global block number; streams and sample: words of each draw, broadcast
    to [...]. Returns the drawn global ids [...] and their x.
    """
    grouped = x.unflatten(-1, (16, 4, 2)).transpose(-3, -2).flatten(-2)  # [..., 4, 32]: member j of group q
    m = grouped.amax(-1)
    m = m.masked_fill(m == -torch.inf, 0.0)
    levels = [torch.exp2(grouped - m[..., None])]
    for _ in range(5):
        below = levels[-1]
        half = below.shape[-1] // 2
        levels.append(below[..., :half] + below[..., half:])
    total = levels.pop()[..., 0]  # [..., 4]
    group = block[..., None] * 4 + torch.arange(4, device=x.device)
    lanes = RowStreams(*(_lane(word) for word in (streams.key0, streams.key1, streams.position, streams.row)))
    r0, r1, r2, r3 = lanes.words(group, sample[..., None], noise.GROUP)
    hi, lo = noise.split_uniform(r0, r1, total)
    member = torch.zeros_like(group)
    for bit, sums in enumerate(reversed(levels)):
        left = sums.gather(-1, member[..., None])[..., 0]
        right = sums.gather(-1, member[..., None] + (1 << bit))[..., 0]
        left_is_light = left <= right
        rest = hi - torch.minimum(left, right)
        rest_all = rest + lo
        take_light = rest_all < 0
        member = member + ((take_light ^ left_is_light).long() << bit)
        lo = torch.where(take_light, lo, lo - (rest_all - rest))
        hi = torch.where(take_light, hi, rest_all)
    score = noise.log_mass_score(m + total.log2(), noise.exponential(noise.uniform64(r2, r3)))
    ids = noise.id_of(group, member)
    tied = score == score.amax(-1, keepdim=True)
    best = torch.where(tied, ids, noise.MAX_POSITION).amin(-1)  # the lowest id of the best score
    best = torch.where(tied.any(-1), best, ids[..., 0])  # a row with NaN: any id in range, the caller reports it
    return best, x.gather(-1, (best & (BLOCK - 1))[..., None])[..., 0]


def _lane(word: noise.Word) -> noise.Word:
    return word[..., None] if isinstance(word, Tensor) and word.dim() else word


def _row_parameters(problem: Problem) -> _Rows:
    source = problem.hidden if problem.hidden is not None else problem.logits
    assert source is not None
    device, num_rows = source.device, problem.num_rows
    bad = torch.zeros(num_rows, dtype=torch.bool, device=device)
    scale: float | Tensor
    greedy: bool | Tensor
    if isinstance(problem.temperature, Tensor):
        t = problem.temperature
        bad |= ~((t >= 0) & (t < torch.inf))
        greedy = t == 0
        if device.type == "cpu" and not greedy.any():
            greedy = False
        elif device.type == "cpu" and greedy.all() and num_rows:
            greedy = True
        scale = (LOG2_E / t.double()).float().masked_fill(bad | (t == 0), 1.0)
    else:
        greedy = problem.temperature == 0
        scale = 1.0 if greedy else float(torch.tensor(LOG2_E / problem.temperature, dtype=torch.float32))
    if isinstance(problem.position, Tensor):
        bad |= (problem.position < 0) | (problem.position >= noise.MAX_POSITION)
    if problem.sparse_bias is not None:
        rows, ids, values = problem.sparse_bias
        wrong = (ids < 0) | (ids >= problem.vocab_size) | ~values.isfinite()
        outside = (rows < 0) | (rows >= num_rows)
        bad = bad.index_put((rows.masked_fill(outside, 0),), wrong, accumulate=True) if num_rows else bad
        bad |= outside.any()
    return _Rows(scale, greedy, bad, noise.row_streams(problem.seed, problem.position, num_rows, device))


def _chunks(problem: Problem, rows: _Rows, logits: Tensor | None) -> Iterator[_Chunk]:
    """Walk over the shard in runs of ids that start at multiples of 128 (`online`: of 4096)."""
    device, num_rows = rows.bad.device, problem.num_rows
    align = ONLINE_BLOCK if problem.noise == "online" else BLOCK
    wanted = _CHUNK_ELEMENTS["cuda" if device.type == "cuda" else "cpu"] // max(1, num_rows)
    end = problem.first_id + problem.num_columns
    start = problem.first_id // align * align
    size = ONLINE_BLOCK if problem.noise == "online" else min(max(wanted // BLOCK, 8), -(-(end - start) // BLOCK)) * BLOCK
    y = torch.empty(size, num_rows, dtype=torch.float32, device=device)
    x = torch.empty_like(y) if rows.greedy is not False else y
    work = torch.empty_like(y)
    hidden = None if problem.hidden is None else problem.hidden.float().t().contiguous()  # [D, B]
    for first in range(start, end, size):
        low, high = max(first, problem.first_id), min(first + size, end)
        if high - low < size:
            size = -(-(high - first) // BLOCK) * BLOCK
            y, x, work = y[:size], x[:size], work[:size]
            y.fill_(-torch.inf)
        local = slice(low - problem.first_id, high - problem.first_id)
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
        torch.mul(y, rows.scale, out=x)
        yield _summarise(first, y, x, work)


def _transform(problem: Problem, y: Tensor, first: int) -> None:
    """Everything between the product and the temperature, in place on y [C, B], whose row 0 is global id `first`."""
    size, num_rows = y.shape
    local = slice(first - problem.first_id, first - problem.first_id + size)
    ids = slice(first, first + size)
    if problem.head_bias is not None:
        y += problem.head_bias[local, None].float()
    if problem.logit_scale != 1.0:
        y *= problem.logit_scale
    if problem.softcap is not None:
        y.div_(problem.softcap).tanh_().mul_(problem.softcap)
    if problem.logit_bias is not None:
        y += problem.logit_bias[..., ids].float().t() if problem.logit_bias.dim() == 2 else (
            problem.logit_bias[ids, None].float()
        )
    if problem.sparse_bias is not None and num_rows:
        rows, tokens, values = problem.sparse_bias
        here = (tokens >= first) & (tokens < first + size) & (rows >= 0) & (rows < num_rows) & values.isfinite()
        at = (torch.where(here, tokens - first, 0), torch.where(here, rows, 0))
        y.index_put_(at, torch.where(here, values, 0.0), accumulate=True)
    if problem.mask is not None:
        allowed = problem.mask[..., ids]  # the mask may end at vocab_size
        kept = allowed.shape[-1]
        y[:kept].masked_fill_(~(allowed.t() if allowed.dim() == 2 else allowed[:, None]), -torch.inf)
    if problem.bitmask is not None:
        token = torch.arange(first, first + size, device=y.device)
        word = (token >> 5).clamp(max=problem.bitmask.shape[1] - 1)
        bits = (problem.bitmask[:, word] >> (token & 31)) & 1  # [B, C]
        y.masked_fill_(bits.t() == 0, -torch.inf)
    if first + size > problem.vocab_size:
        y[max(problem.vocab_size - first, 0) :] = -torch.inf


def _summarise(first: int, y: Tensor, x: Tensor, work: Tensor) -> _Chunk:
    """Maximum and mass of each group of 32; the masses are summed in the fixed tree that the draw descends."""
    split, room = x.view(-1, 16, 4, 2, x.shape[1]), work.view(-1, 16, 4, 2, x.shape[1])  # [n, 16, 4, 2, B]
    torch.maximum(split[:, :8], split[:, 8:], out=room[:, :8])
    for half in (4, 2, 1):
        torch.maximum(room[:, :half], room[:, half : 2 * half], out=room[:, :half])
    m = torch.maximum(room[:, 0, :, 0], room[:, 0, :, 1])  # [n, 4, B]
    top = m.flatten(0, 1).amax(0)
    m.masked_fill_(m == -torch.inf, 0.0)
    torch.sub(split, m[:, None, :, None], out=room)
    room.exp2_()
    for half in (8, 4, 2, 1):
        room[:, :half] += room[:, half : 2 * half]
    return _Chunk(first, y, x, m, room[:, 0, :, 0] + room[:, 0, :, 1], top)


def _slices(total: int, at_once: int) -> Iterator[slice]:
    step = max(1, at_once)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


@contextmanager
def full_fp32_products(problem: Problem) -> Iterator[None]:
    """fp32 inputs mean full fp32 products, whatever torch.set_float32_matmul_precision was told; restored afterwards.

    On a CPU "medium" means bf16 products, on a GPU "high" means TF32. The setting is the process's, as torch has it.
    """
    source = problem.hidden if problem.hidden is not None else problem.logits
    assert source is not None
    backend = torch.backends.cuda.matmul if source.device.type == "cuda" else torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        backend.fp32_precision = before
