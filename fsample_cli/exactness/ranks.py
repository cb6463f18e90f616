"""Test `ranks`: a vocabulary split over ranks and merged by log-mass draws from the whole distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from fsample_cli.exactness import forms, independence, targets
from fsample_cli.exactness.draws import Histogram
from fsample_cli.exactness.goodness_of_fit import chi_squared
from fsample_cli.exactness.outcomes import Case
from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.result import TestResult
from fsample_cli.exactness.subject import Library, Subject
from fsample_kernels.distributed import merge

TEST = "ranks"
VOCAB = 512
SHARE = 8  # of the draws of the pair tests, for each of 14 shards costs a draw
# shard starts: even; inside groups of 32; a shard of one token; with an empty rank
SPLITS = ((0, 256, VOCAB), (0, 100, 400, VOCAB), (0, 511, VOCAB), (0, 128, 128, 384, VOCAB))
PAIRED = {"ranks": 256, "tiles": 128}  # ids of each of two neighbours


def run(subject: Subject, plan: Plan) -> list[TestResult]:
    """Each rank draws from its shard (the head with the other shards masked, so ids and noise are global)."""
    assert subject.library is not None
    results = [_split(subject, subject.library, starts, plan) for starts in SPLITS]
    for what, width in PAIRED.items():
        results += _independent(subject, subject.library, what, width, plan)
    return results


def _split(subject: Subject, library: Library, starts: tuple[int, ...], plan: Plan) -> TestResult:
    target = targets.skewed(VOCAB, plan.seed)
    case = Case(TEST, subject, f"{len(starts) - 1} ranks at {'/'.join(map(str, starts[1:-1]))}")
    draws = plan.pair_draws // SHARE
    rows = plan.rows(VOCAB, draws)
    hidden, weight = target.tensors(rows, plan.device, plan.dtype)
    shards = [shard_mask(a, b, rows, plan.device) for a, b in zip(starts, starts[1:], strict=False)]
    histogram = Histogram(VOCAB, 1, plan.device)
    seed = plan.case_seed(case.name)
    for position in range(-(-draws // rows)):
        drawn = [_rank(library, hidden, weight, shard, seed, position) for shard in shards]
        ids, masses = torch.stack([pair[0] for pair in drawn]), torch.stack([pair[1] for pair in drawn])
        histogram.add(merge.merge_log_mass(ids, masses, seed=seed, position=position).ids[:, 0])
    found = histogram.result()
    if found.out_of_range:
        return case.rule("range", True, found.draws, found.complaint)
    return case.fit("", chi_squared(found.counts[0], target.probabilities), found.draws)


def shard_mask(first: int, end: int, rows: int, device: str) -> Tensor:
    """The packed mask [rows, V / 32] that leaves a rank its tokens first .. end - 1."""
    ids = torch.arange(VOCAB)
    return forms.pack(((ids >= first) & (ids < end))[None]).to(device).expand(rows, -1)


def _rank(
    library: Library, hidden: Tensor, weight: Tensor, shard: Tensor, seed: int, position: int
) -> tuple[Tensor, Tensor]:
    """One rank's candidates [B, 1] and its log-mass [B]; a rank without tokens has id -1 and mass -inf."""
    result = forms.with_mass(library, hidden, weight, seed=seed, position=position, allowed=shard)
    assert result.lse is not None
    return result.ids, result.lse


def _independent(subject: Subject, library: Library, what: str, width: int, plan: Plan) -> list[TestResult]:
    """Neighbours [0, width) and [width, 2 width), flat: the places of their draws agree with probability
    1 / width, and pair up as independent ones do.
    """
    case = Case(TEST, subject, "")
    rows = plan.rows(VOCAB, plan.pair_draws // SHARE)
    hidden, weight = targets.flat(VOCAB).tensors(rows, plan.device, plan.dtype)
    shards = [shard_mask(first, first + width, rows, plan.device) for first in (0, width)]
    seed, calls = plan.case_seed(f"{TEST} {what}"), -(-plan.pair_draws // SHARE // rows)
    left, right = (
        torch.cat([_rank(library, hidden, weight, shard, seed, position)[0] for position in range(calls)])
        for shard in shards
    )
    same = int((left + width == right).sum())
    return [
        case.events(f"equal: {what}", same, left.numel(), 1 / width, "share of equal draws"),
        independence.pairs(case, f"pairs: {what}", left, right - width, width),
    ]
