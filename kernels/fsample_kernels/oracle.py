"""The float64 oracle: the same draw from the same words, dense, sharing no arithmetic with the fp32 paths.

It exists to be compared with: `reference.py` and the kernels must return its ids, except where rounding of
their logits decides (`testing.compare_ids`). It holds [B, V] float64 buffers:
for tests and small checks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import noise
from .types import MIN_TEMPERATURE, Problem, SampleResult

_TOP = 1.0 - 2.0**-53  # the largest float64 below 1


def oracle(problem: Problem) -> SampleResult:
    """Draw as `api.sample` documents, in float64; logprob, lse and logits are float64 and always there."""
    return Oracle(problem).result()


class Oracle:
    """One problem, worked out. x [B, 128 n] in base 2, column 0 is global id `base`, -inf where forbidden."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.y = dense_logits(problem)  # [B, V]
        rows, columns = self.y.shape
        device = self.y.device
        t = torch.as_tensor(problem.temperature, dtype=torch.float64, device=device).expand(rows)
        self.greedy = (t >= 0) & (t < MIN_TEMPERATURE)
        self.scale = (math.log2(math.e) / t.masked_fill(self.greedy, math.log2(math.e))).masked_fill(
            t != t, 1.0
        )
        self.base = problem.first_id // 128 * 128
        padding = problem.first_id - self.base
        width = -(-(padding + columns) // 128) * 128
        self.x = torch.full((rows, width), -torch.inf, dtype=torch.float64, device=device)
        self.x[:, padding : padding + columns] = self.y * self.scale[:, None]
        self.bad = (
            ~((t >= 0) & (t < torch.inf))
            | self.y.isnan().any(1)
            | (self.y == torch.inf).any(1)
            | _bad_parameters(problem)
        )
        self.empty = (self.y == -torch.inf).all(1)
        self.streams = noise.row_streams(problem.seed, problem.position, rows, device)
        members = torch.arange(32, device=device)
        self.groups = torch.arange(width // 32, device=device) + self.base // 32  # global group numbers, [G]
        columns_of = noise.id_of(self.groups[:, None], members) - self.base  # [G, 32]
        self.members = self.x[:, columns_of]  # [B, G, 32]
        self.mass = _log2_sum(self.members)  # [B, G]

    def result(self) -> SampleResult:
        samples = range(self.problem.num_samples)
        drawn = [self.draw(sample) for sample in samples]
        rows = self.y.shape[0]
        ids = (
            torch.stack(drawn, 1) if drawn else torch.empty(rows, 0, dtype=torch.int64, device=self.y.device)
        )
        total = _log2_sum(self.x)
        lse = torch.where(self.greedy, self.y.amax(1), total * math.log(2.0))
        x = self.x.gather(1, (ids - self.base).clamp(min=0))
        logprob = ((x - total[:, None]) * math.log(2.0)).masked_fill(self.greedy[:, None], 0.0)
        nothing = (self.bad | self.empty)[:, None]
        return SampleResult(
            ids,
            logprob.masked_fill(nothing, torch.nan),
            lse.masked_fill(self.bad, torch.nan),
            self.y,
            "oracle",
        )

    def draw(self, sample: int) -> Tensor:
        """Ids [B] of one sample."""
        if self.problem.noise == "element":
            ids = self.element_scores(sample).argmax(1) + self.base
        else:
            group = self.group_choice(sample)
            ids = noise.id_of(group, self.member_choice(sample, group))
        ids = torch.where(self.greedy, self.x.argmax(1) + self.base, ids)
        return ids.masked_fill(self.bad | self.empty, -1)

    def element_scores(self, sample: int) -> Tensor:
        """log2 p + Gumbel of each column, [B, 128 n]."""
        ids = torch.arange(self.x.shape[1], device=self.x.device) + self.base
        words = torch.stack(self.streams.lanes().words(ids // 4, sample, noise.ELEMENT))  # [4, B, 128 n]
        word = words.gather(0, (ids % 4).expand(1, *words.shape[1:]))[0]
        return self.x - _exponential(noise.uniform32(word, torch.float64)).log2()

    def group_scores(self, sample: int) -> Tensor:
        """log2 mass + Gumbel of each group, [B, G]."""
        domain = noise.group_domain(self.groups, self.problem.first_id)
        _, _, r2, r3 = self.streams.lanes().words(self.groups, sample, domain)
        return self.mass - _exponential(noise.uniform64(r2, r3, torch.float64)).log2()

    def group_choice(self, sample: int) -> Tensor:
        """Global number of the winning group, [B]."""
        scores = self.group_scores(sample)
        if self.problem.noise == "online":
            chosen = self.block_choice(sample)
            outside = self.groups // 128 != chosen[:, None]  # a block of 4096 ids is 128 groups
            scores = scores.masked_fill(outside, -torch.inf)
        return self.groups[scores.argmax(1)]

    def block_choice(self, sample: int) -> Tensor:
        """Global number of the block of 4096 ids that the streamed merge ends on, [B]."""
        chosen = torch.zeros(self.x.shape[0], dtype=torch.int64, device=self.x.device)
        for block, replace, _ in self.block_steps(sample):
            chosen = torch.where(replace, block, chosen)
        return chosen

    def block_steps(self, sample: int) -> list[tuple[int, Tensor, Tensor]]:
        """Of each block in turn: number, whether it takes over, how close, in shares of the total [B]."""
        steps = []
        held = torch.full_like(self.mass[:, 0], -torch.inf)
        for block in torch.unique_consecutive(self.groups // 128).tolist():
            mass = _log2_sum(self.mass[:, self.groups // 128 == block])
            unit = torch.tensor(block, device=self.x.device)
            r0, r1, _, _ = self.streams.words(unit, sample, noise.ONLINE)
            u = noise.uniform64(r0, r1, torch.float64).expand(held.shape)
            total = _log2_sum(torch.stack([held, mass], 1))
            share_held, share = torch.exp2(held - total), torch.exp2(mass - total)
            held_is_light = share_held <= share
            light = torch.minimum(share_held, share)
            steps.append((block, (u < light) ^ held_is_light, (u - light).abs()))
            held = total
        return steps

    def member_choice(self, sample: int, group: Tensor) -> Tensor:
        """Member 0..31 drawn in the given group of each row, [B]."""
        e, t = self.member_masses(sample, group)
        place = torch.arange(32, device=e.device)
        member = torch.zeros_like(group)
        for bit in range(5):
            side = (place % (2 << bit))[None]
            left = (e * (side == member[:, None])).sum(1)
            right = (e * (side == member[:, None] + (1 << bit))).sum(1)
            light = torch.minimum(left, right)
            takes_light = t < light
            t = torch.where(takes_light, t, t - light)
            member = member + ((takes_light ^ (left <= right)).long() << bit)
        return member

    def member_masses(self, sample: int, group: Tensor) -> tuple[Tensor, Tensor]:
        """Masses relative to the heaviest member [B, 32], and the point t in (0, total) to fall on [B]."""
        rows = torch.arange(group.shape[0], device=group.device)
        x = self.members[rows, group - self.groups[0]]
        top = x.amax(1, keepdim=True)
        e = torch.exp2(x - top.masked_fill(top == -torch.inf, 0.0))
        domain = noise.group_domain(group, self.problem.first_id)
        r0, r1, _, _ = self.streams.words(group, sample, domain)
        return e, noise.uniform64(r0, r1, torch.float64).clamp(max=_TOP) * e.sum(1)


def dense_logits(problem: Problem) -> Tensor:
    """y [B, V] float64 of the shard: product and every transform of the contract, before temperature."""
    if problem.logits is not None:
        y = problem.logits.double()
    else:
        assert problem.hidden is not None and problem.weight is not None
        hidden = problem.hidden.double()
        y = torch.cat([hidden @ part.double().t() for part in torch.split(problem.weight, 8192)], 1)
    shard = slice(problem.first_id, problem.first_id + y.shape[1])
    ids = torch.arange(y.shape[1], device=y.device) + problem.first_id
    if problem.head_bias is not None:
        y = y + problem.head_bias.double()
    y = y * problem.logit_scale
    if problem.softcap is not None:
        y = problem.softcap * torch.tanh(y / problem.softcap)
    if problem.logit_bias is not None:
        y = y + problem.logit_bias[..., shard].double()
    if problem.sparse_bias is not None:
        for row, token, value in zip(*(part.tolist() for part in problem.sparse_bias), strict=True):
            if 0 <= row < y.shape[0] and token in range(shard.start, shard.stop):
                y[row, token - problem.first_id] += value
    forbidden = (ids >= problem.vocab_size).expand(y.shape).clone()
    if problem.mask is not None:
        given = problem.mask[..., shard].expand(y.shape[0], -1)
        forbidden[:, : given.shape[1]] |= ~given
    if problem.bitmask is not None:
        held = ids[ids // 32 < problem.bitmask.shape[1]]
        forbidden[:, : held.shape[0]] |= (problem.bitmask[:, held // 32] >> (held % 32)) & 1 == 0
    return y.masked_fill(forbidden, -torch.inf)


def _bad_parameters(problem: Problem) -> Tensor:
    source = problem.hidden if problem.hidden is not None else problem.logits
    assert source is not None
    bad = torch.zeros(problem.num_rows, dtype=torch.bool, device=source.device)
    if isinstance(problem.position, Tensor):
        bad |= (problem.position < 0) | (problem.position >= 2**32)
    if problem.sparse_bias is not None:
        for row, token, value in zip(*(part.tolist() for part in problem.sparse_bias), strict=True):
            if not 0 <= row < problem.num_rows:
                bad[:] = True
            elif not (0 <= token < problem.vocab_size and math.isfinite(value)):
                bad[row] = True
    return bad


def _log2_sum(x: Tensor) -> Tensor:
    """log2 of the sum of 2**x over the last dimension."""
    return torch.logsumexp(x * math.log(2.0), -1) / math.log(2.0)


def _exponential(u: Tensor) -> Tensor:
    return -torch.log1p(-u.clamp(max=_TOP))
