"""The eager PyTorch implementation: every algorithm and every transform, on any device.

It is what the kernels are tested against, and the implementation on a CPU. The vocabulary comes in chunks; no
`[B, V]` buffer is made unless `store_logits` asks for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import words
from .chunks import Chunk, chunks, device_of, full_fp32_products, row_parameters
from .noise import LN_2
from .reference_draws import DRAWS, LogMass
from .types import Problem, SampleResult


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
    draws = None if all_greedy else DRAWS[problem.noise](problem, rows)
    greedy = None if rows.greedy is False else _Greedy(num_rows, device)
    wants_mass = problem.want_lse or problem.want_logprob
    mass = LogMass(num_rows, device) if wants_mass and not all_greedy else None
    logits = (
        torch.empty(num_rows, problem.num_columns, dtype=torch.float32, device=device)
        if problem.store_logits
        else None
    )
    top = torch.full((num_rows,), -torch.inf, dtype=torch.float32, device=device)
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


class _Greedy:
    """argmax of y, the lowest id on a tie."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.best = torch.full((num_rows,), -torch.inf, dtype=torch.float32, device=device)
        self.ids = torch.full((num_rows,), -1, dtype=torch.int64, device=device)

    def add(self, chunk: Chunk) -> None:
        best, at = chunk.y.max(0)
        replace = best > self.best
        self.best = torch.where(replace, best, self.best)
        self.ids = torch.where(replace, at + chunk.first, self.ids)
