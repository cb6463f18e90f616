"""The eager PyTorch implementation: every algorithm and every transform, on any device.

It is what the kernels are tested against, and the implementation on a CPU. The vocabulary comes in chunks; no
`[B, V]` buffer is made unless `store_logits` asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from . import noise, words
from .chunks import Chunk, Rows, chunks, device_of, full_fp32_products, row_parameters
from .noise import BLOCK, LN_2, ONLINE_BLOCK, RowStreams
from .types import Problem, SampleResult

_NOISE_VALUES = {
    "cpu": 1 << 19,
    "cuda": 1 << 23,
}  # values of noise made at a time, when there are many samples
_PENDING_DRAWS = (
    1 << 13
)  # up to here the winner's 128 logits are kept, and the in-group draw is made once, at the end


def run(problem: Problem) -> SampleResult:
    """Draw as `api.sample` documents, in fp32; on any device that torch supports, without waiting for it."""
    return candidates(problem)[0]


def candidates(problem: Problem) -> tuple[SampleResult, Tensor]:
    """The result and the keys of its ids, [B, K] int64, for comparison with other shards of a vocabulary.

    A key is a score with an id (`words.pack_key`): base 2, in greedy rows y; +inf where a row is bad, -inf
    where nothing is allowed. With noise="online" it says nothing: that draw is no comparison of scores.
    """
    with torch.no_grad(), full_fp32_products(device_of(problem)):
        return _run(problem)


def _run(problem: Problem) -> tuple[SampleResult, Tensor]:
    rows = row_parameters(problem)
    device, num_rows = device_of(problem), problem.num_rows
    all_greedy = rows.greedy is True
    draws = None if all_greedy else _DRAWS[problem.noise](problem, rows)
    greedy = None if rows.greedy is False else _Greedy(num_rows, device)
    wants_mass = problem.want_lse or problem.want_logprob
    mass = _LogMass(num_rows, device) if wants_mass and not all_greedy else None
    logits = torch.empty(num_rows, problem.num_columns, device=device) if problem.store_logits else None
    top = torch.full((num_rows,), -torch.inf, device=device)
    for chunk in chunks(problem, rows, logits):
        top = torch.maximum(
            top, chunk.x.amax(0) if all_greedy or problem.noise == "element" else chunk.groups[2]
        )
        for part in (draws, greedy, mass):
            if part is not None:
                part.add(chunk)

    shape = (problem.num_samples, num_rows)
    if draws is not None:
        ids, x = draws.result()  # [K, B] each
        scores = draws.best
    else:
        ids, x = torch.empty(shape, dtype=torch.int64, device=device), top.expand(shape)
        scores = x
    total = top.double() if mass is None else mass.log2()  # [B], base 2
    logprob = ((x - total) * LN_2).clamp(max=0).to(torch.float32)
    lse = (total * LN_2).to(torch.float32)
    if greedy is not None:
        chosen = torch.full((), True, device=device) if isinstance(rows.greedy, bool) else rows.greedy
        ids = torch.where(chosen, greedy.ids, ids)
        scores = torch.where(chosen, greedy.best, scores)
        logprob = logprob.masked_fill(chosen, 0.0)
        lse = torch.where(chosen, greedy.best, lse)
    nothing = top == -torch.inf
    bad = rows.bad | top.isnan() | (top == torch.inf)
    ids = ids.masked_fill(bad | nothing, -1)
    logprob = logprob.masked_fill(bad | nothing, torch.nan)
    lse = lse.masked_fill(nothing, -torch.inf).masked_fill(bad, torch.nan)
    scores = scores.masked_fill(nothing, -torch.inf).masked_fill(bad, torch.inf)
    result = SampleResult(
        ids.t().contiguous(),
        logprob.t().contiguous() if problem.want_logprob else None,
        lse if problem.want_lse else None,
        logits,
        "reference",
    )
    return result, words.pack_key(scores.t().contiguous(), result.ids)


class _Draws(ABC):
    """The best draw so far of each sample and row, [K, B]."""

    def __init__(self, problem: Problem, rows: Rows) -> None:
        device, shape = device_of(problem), (problem.num_samples, problem.num_rows)
        self.streams = rows.streams
        self.first_id = problem.first_id
        self.samples = torch.arange(problem.num_samples, device=device)[:, None]  # [K, 1]
        self.best = torch.full(shape, -torch.inf, device=device)  # score
        self.ids = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.x = torch.full(shape, torch.nan, device=device)  # x of the drawn id
        self.limit = _NOISE_VALUES["cuda" if device.type == "cuda" else "cpu"]

    @abstractmethod
    def add(self, chunk: Chunk) -> None: ...

    def result(self) -> tuple[Tensor, Tensor]:
        return self.ids, self.x

    def _parts(self, values_a_sample: int) -> Iterator[slice]:
        """Samples, as many at a time as the noise buffers may hold."""
        step = max(1, self.limit // max(1, values_a_sample))
        for start in range(0, self.samples.shape[0], step):
            yield slice(start, min(start + step, self.samples.shape[0]))


class _ElementDraws(_Draws):
    """Algorithm 1: one Gumbel a token, the best score wins."""

    def add(self, chunk: Chunk) -> None:
        units = chunk.first // 4 + torch.arange(chunk.x.shape[0] // 4, device=chunk.x.device)[:, None, None]
        for part in self._parts(chunk.x.numel()):
            words = self.streams.words(units, self.samples[part], noise.ELEMENT)  # four of [C/4, k, B]
            u = torch.stack([noise.uniform32(word) for word in words], dim=1).flatten(0, 1)  # [C, k, B]
            best, at = noise.log_mass_score(chunk.x[:, None], noise.exponential(u)).max(
                0
            )  # [k, B], lowest id on a tie
            replace = best > self.best[part]
            self.best[part] = torch.where(replace, best, self.best[part])
            self.ids[part] = torch.where(replace, at + chunk.first, self.ids[part])
            self.x[part] = torch.where(replace, chunk.x.gather(0, at), self.x[part])


class _GroupDraws(_Draws):
    """Algorithm I.2: one Gumbel a group, the group with the best score wins, and one draw inside it.

    The draw inside a group only matters where that group wins. So the winner's aligned block of 128 logits
    is kept and drawn from at the end; or, with too many draws to keep, as soon as a chunk has a new winner.
    """

    def __init__(self, problem: Problem, rows: Rows) -> None:
        super().__init__(problem, rows)
        device, shape = self.best.device, self.best.shape
        self.rows = torch.arange(shape[1], device=device).expand(shape)  # [K, B]
        self.block = torch.zeros(
            shape, dtype=torch.int64, device=device
        )  # global number of the winner's block
        keep = self.best.numel() <= _PENDING_DRAWS
        self.logits = (
            torch.full((*shape, BLOCK), -torch.inf, device=device) if keep else None
        )  # x, [K, B, 128]

    def add(self, chunk: Chunk) -> None:
        m, s, _ = chunk.groups
        mass = (m + s.log2())[:, None]  # [G, 1, B]
        first = chunk.first // BLOCK
        units = 4 * first + torch.arange(mass.shape[0], device=mass.device)[:, None, None]
        for part in self._parts(max(mass.numel(), BLOCK * mass.shape[2])):
            domain = noise.group_domain(units, self.first_id)
            _, _, r2, r3 = self.streams.words(units, self.samples[part], domain)  # [G, k, B]
            best, group = noise.log_mass_score(mass, noise.exponential(noise.uniform64(r2, r3))).max(
                0
            )  # [k, B]
            replace = self._replace(chunk, best, part)
            # A GPU is not asked whether anything changed: the host would wait for the answer.
            if replace.device.type != "cpu" or replace.any():
                self._take(chunk, group // 4, replace, part)

    def _replace(self, chunk: Chunk, best: Tensor, part: slice) -> Tensor:
        """Whether the chunk's best score [k, B] beats the one so far; equal scores keep the lower ids."""
        replace = best > self.best[part]
        self.best[part] = torch.where(replace, best, self.best[part])
        return replace

    def _take(self, chunk: Chunk, block: Tensor, replace: Tensor, part: slice) -> None:
        logits = chunk.x.view(-1, BLOCK, chunk.x.shape[1])[block, :, self.rows[part]]  # [k, B, 128]
        block = block + chunk.first // BLOCK
        if self.logits is not None:
            self.block[part] = torch.where(replace, block, self.block[part])
            self.logits[part] = torch.where(replace[..., None], logits, self.logits[part])
            return
        streams = self.streams.take(self.rows[part])
        ids, x = draw_in_block(logits, block, streams, self.samples[part], self.first_id)
        self.ids[part] = torch.where(replace, ids, self.ids[part])
        self.x[part] = torch.where(replace, x, self.x[part])

    def result(self) -> tuple[Tensor, Tensor]:
        if self.logits is None:
            return self.ids, self.x
        streams = self.streams.take(self.rows)
        return draw_in_block(self.logits, self.block, streams, self.samples, self.first_id)


class _OnlineDraws(_GroupDraws):
    """Algorithm I.3: blocks of 4096 ids, drawn by groups; one takes over at odds its mass : the total."""

    def __init__(self, problem: Problem, rows: Rows) -> None:
        super().__init__(problem, rows)
        self.total = torch.full(
            self.best.shape, -torch.inf, dtype=torch.float64, device=self.best.device
        )  # log2

    def _replace(self, chunk: Chunk, best: Tensor, part: slice) -> Tensor:
        mass = _LogMass(best.shape[1], best.device)
        mass.add(chunk)
        unit = torch.full((), chunk.first // ONLINE_BLOCK, device=best.device)
        r0, r1, _, _ = self.streams.words(unit, self.samples[part], noise.ONLINE)
        total, replace = merge_masses(self.total[part], mass.log2(), noise.uniform64(r0, r1, torch.float64))
        self.total[part] = total
        return replace


_DRAWS: dict[str, type[_Draws]] = {"element": _ElementDraws, "grouped": _GroupDraws, "online": _OnlineDraws}


class _Greedy:
    """argmax of y, the lowest id on a tie."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.best = torch.full((num_rows,), -torch.inf, device=device)
        self.ids = torch.full((num_rows,), -1, dtype=torch.int64, device=device)

    def add(self, chunk: Chunk) -> None:
        best, at = chunk.y.max(0)
        replace = best > self.best
        self.best = torch.where(replace, best, self.best)
        self.ids = torch.where(replace, at + chunk.first, self.ids)


class _LogMass:
    """Running log2 of the sum of 2**x over the chunks of a row."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.top = torch.full((num_rows,), -torch.inf, dtype=torch.float64, device=device)
        self.sum = torch.zeros(num_rows, dtype=torch.float64, device=device)

    def add(self, chunk: Chunk) -> None:
        m, s, top = chunk.groups
        new = torch.maximum(self.top, top.double())
        anchor = new.masked_fill(new == -torch.inf, 0.0)
        # A group without mass has m = 0, above an anchor far below 0: 0 * exp2(inf) would be NaN.
        share = torch.exp2((m - anchor.float()).clamp(max=0.0))
        self.sum = self.sum * torch.exp2(self.top - anchor) + (s * share).sum(0).double()
        self.top = new

    def log2(self) -> Tensor:
        """[B] float64, -inf without mass."""
        return self.top + self.sum.log2()


def merge_masses(old: Tensor, new: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Algorithm I.3, Lemma D.3: log2 of 2**old + 2**new, and whether `u` in (0, 1) picks the new side.

    The new side is picked with probability 2**new / (2**old + 2**new). u * total falls in the lighter side
    first, so that a tiny mass keeps its digits on either side, and a side of mass 0 (-inf) is not picked
    beside another.
    """
    top = torch.maximum(old, new)
    anchor = top.masked_fill(top == -torch.inf, 0.0)
    mass_old, mass_new = torch.exp2(old - anchor), torch.exp2(new - anchor)
    total = mass_old + mass_new
    old_is_light = mass_old <= mass_new
    takes_light = u * total < torch.minimum(mass_old, mass_new)
    return anchor + total.log2(), takes_light ^ old_is_light


def draw_in_block(
    x: Tensor, block: Tensor, streams: RowStreams, sample: Tensor, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    """One grouped draw inside one aligned block of 128 ids for each draw; fp32.

    x: [..., 128] logits in base 2. block: [...] global block number. streams, sample: the words of each draw,
    broadcast to [...]. first_id: where the shard starts. Returns the global ids [...] and their x [...].
    """
    split = x.view(*x.shape[:-1], 16, 4, 2).transpose(-3, -2).flatten(-2)  # [..., 4, 32]: member j of group q
    m = split.amax(-1)
    m = m.masked_fill(m == -torch.inf, 0.0)
    levels = [torch.exp2(split - m[..., None])]
    for half in (16, 8, 4, 2, 1):
        levels.append(levels[-1][..., :half] + levels[-1][..., half:])
    total = levels.pop()[..., 0]  # [..., 4]
    group = block[..., None] * 4 + torch.arange(4, device=x.device)
    r0, r1, r2, r3 = streams.lanes().words(group, sample[..., None], noise.group_domain(group, first_id))
    member = descend(levels, *noise.split_uniform(r0, r1, total))
    score = noise.log_mass_score(m + total.log2(), noise.exponential(noise.uniform64(r2, r3)))
    ids = noise.id_of(group, member)
    tied = score == score.amax(-1, keepdim=True)
    best = torch.where(tied, ids, torch.iinfo(torch.int64).max).amin(-1)  # lowest id of the best score
    best = torch.where(
        tied.any(-1), best, ids[..., 0]
    )  # nothing ties beside a NaN: any id, the caller drops the row
    return best, x.gather(-1, (best & (BLOCK - 1))[..., None])[..., 0]


def descend(levels: list[Tensor], hi: Tensor, lo: Tensor) -> Tensor:
    """Member j in 0..31 that t = hi + lo falls on in a tree of partial sums, the lighter side always first.

    levels[k]: [..., 32 >> k], levels[k + 1][j] = levels[k][j] + levels[k][j + (16 >> k)], k = 0..4. hi, lo:
    [...] with 0 < t < total. A side of mass 0 is never entered: as the lighter one, t < 0 is false.
    """
    member = torch.zeros_like(hi, dtype=torch.int64)
    for bit, sums in enumerate(reversed(levels)):
        left = sums.gather(-1, member[..., None])[..., 0]
        right = sums.gather(-1, member[..., None] + (1 << bit))[..., 0]
        left_is_light = left <= right
        rest_hi = hi - torch.minimum(left, right)
        rest = rest_hi + lo
        takes_light = rest < 0
        member = member + ((takes_light ^ left_is_light).long() << bit)
        lo = torch.where(takes_light, lo, lo - (rest - rest_hi))
        hi = torch.where(takes_light, hi, rest)
    return member
