"""What the reference keeps as the vocabulary goes by in chunks: draws, a class an algorithm, and masses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from . import noise
from .block_draw import draw_in_block, merge_masses
from .chunks import Chunk, Rows, device_of
from .noise import BLOCK, ONLINE_BLOCK
from .types import Problem

# Values of noise made at a time, when there are many samples.
NOISE_VALUES = {"cpu": 1 << 19, "cuda": 1 << 23}
# Up to here the winner's 128 logits are kept, and the draw inside its group is made once, at the end.
PENDING_DRAWS = 1 << 13


class LogMass:
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


class Draws(ABC):
    """The best draw so far of each sample and row, [K, B]."""

    def __init__(self, problem: Problem, rows: Rows) -> None:
        device, shape = device_of(problem), (problem.num_samples, problem.num_rows)
        self.streams = rows.streams
        self.first_id = problem.first_id
        self.samples = torch.arange(problem.num_samples, device=device)[:, None]  # [K, 1]
        self.best = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)  # score
        self.ids = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.x = torch.full(shape, torch.nan, dtype=torch.float32, device=device)  # x of the drawn id
        self.limit = NOISE_VALUES["cuda" if device.type == "cuda" else "cpu"]

    @abstractmethod
    def add(self, chunk: Chunk) -> None: ...

    def result(self) -> tuple[Tensor, Tensor]:
        return self.ids, self.x

    def _parts(self, values_a_sample: int) -> Iterator[slice]:
        """Samples, as many at a time as the noise buffers may hold."""
        step = max(1, self.limit // max(1, values_a_sample))
        for start in range(0, self.samples.shape[0], step):
            yield slice(start, min(start + step, self.samples.shape[0]))


def best_of(score: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of score [C, ...] over C, a multiple of 128, and where it first is; as `score.max(0)`.

    torch looks for places many times slower than for values: values of runs of 128 first, then places in the
    one run that won. A NaN wins, as in torch.
    """
    runs = score.unflatten(0, (-1, BLOCK))  # type: ignore[no-untyped-call]
    best, run = runs.amax(1).max(0)
    inside = runs.gather(0, run[None, None].expand(1, BLOCK, *run.shape))[0]  # [128, ...]
    return best, run * BLOCK + inside.max(0).indices


class ElementDraws(Draws):
    """Algorithm 1: one Gumbel a token, the best score wins."""

    def add(self, chunk: Chunk) -> None:
        units = chunk.first // 4 + torch.arange(chunk.x.shape[0] // 4, device=chunk.x.device)[:, None, None]
        for part in self._parts(chunk.x.numel()):
            words = self.streams.words(units, self.samples[part], noise.ELEMENT)  # four of [C/4, k, B]
            # [C, k, B]; one sample finds room in the chunk: on a CPU fresh memory costs more than a logarithm
            one = len(words[0][0]) == 1
            u = chunk.work[:, None] if one else chunk.x.new_empty(len(chunk.x), *words[0].shape[1:])
            for lane, word in enumerate(words):
                u[lane::4] = noise.uniform32(word)
            best, at = best_of(noise.log_mass_score_(chunk.x[:, None], noise.exponential_(u)))
            replace = best > self.best[part]
            self.best[part] = torch.where(replace, best, self.best[part])
            self.ids[part] = torch.where(replace, at + chunk.first, self.ids[part])
            self.x[part] = torch.where(replace, chunk.x.gather(0, at), self.x[part])


class GroupDraws(Draws):
    """Algorithm I.2: one Gumbel a group, the group with the best score wins, and one draw inside it.

    The draw inside a group only matters where that group wins. So the winner's aligned block of 128 logits
    is kept and drawn from at the end; or, with too many draws to keep, as soon as a chunk has a new winner.
    """

    def __init__(self, problem: Problem, rows: Rows) -> None:
        super().__init__(problem, rows)
        device, shape = self.best.device, self.best.shape
        self.rows = torch.arange(shape[1], device=device).expand(shape)  # [K, B]
        self.block = torch.zeros(shape, dtype=torch.int64, device=device)  # global number of the winner's
        keep = self.best.numel() <= PENDING_DRAWS
        # x, [K, B, 128]
        self.logits = (
            torch.full((*shape, BLOCK), -torch.inf, dtype=torch.float32, device=device) if keep else None
        )

    def add(self, chunk: Chunk) -> None:
        m, s, _ = chunk.groups
        mass = (m + s.log2())[:, None]  # [G, 1, B]
        first = chunk.first // BLOCK
        units = 4 * first + torch.arange(mass.shape[0], device=mass.device)[:, None, None]
        for part in self._parts(max(mass.numel(), BLOCK * mass.shape[2])):
            domain = noise.group_domain(units, self.first_id)
            _, _, r2, r3 = self.streams.words(units, self.samples[part], domain)  # [G, k, B]
            score = noise.log_mass_score_(mass, noise.exponential_(noise.uniform64(r2, r3)))
            best, group = score.max(0)  # [k, B]
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


class OnlineDraws(GroupDraws):
    """Algorithm I.3: blocks of 4096 ids, drawn by groups; one takes over at odds its mass : the total."""

    def __init__(self, problem: Problem, rows: Rows) -> None:
        super().__init__(problem, rows)
        # log2
        self.total = torch.full(self.best.shape, -torch.inf, dtype=torch.float64, device=self.best.device)

    def _replace(self, chunk: Chunk, best: Tensor, part: slice) -> Tensor:
        mass = LogMass(best.shape[1], best.device)
        mass.add(chunk)
        unit = torch.full((), chunk.first // ONLINE_BLOCK, device=best.device)
        r0, r1, _, _ = self.streams.words(unit, self.samples[part], noise.ONLINE)
        total, replace = merge_masses(self.total[part], mass.log2(), noise.uniform64(r0, r1, torch.float64))
        self.total[part] = total
        return replace


DRAWS: dict[str, type[Draws]] = {"element": ElementDraws, "grouped": GroupDraws, "online": OnlineDraws}
