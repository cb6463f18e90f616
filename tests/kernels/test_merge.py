"""Merging ranks by log-mass: exact in distribution for any split, the same answer on every rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats

from fsample_kernels import reference
from fsample_kernels.distributed.merge import merge_log_mass
from fsample_kernels.types import Problem

MakeProblem = Callable[..., Problem]


def shards(problem: Problem, bounds: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [R, B, K] and lse [R, B] of the vocabulary cut at `bounds`."""
    assert problem.weight is not None
    results = []
    for first, stop in zip(bounds, bounds[1:], strict=False):
        part = dataclasses.replace(problem, weight=problem.weight[first:stop], first_id=first, want_lse=True)
        results.append(reference.run(part))
    return torch.stack([r.ids for r in results]), torch.stack([r.lse for r in results if r.lse is not None])


# Cuts: aligned to groups; through groups (two ranks then share a group's noise); one id alone.
@pytest.mark.parametrize("bounds", [[0, 128, 256], [0, 3, 64, 70, 256], [0, 255, 256], [0, 256]], ids=str)
def test_distribution_over_shards(make_problem: MakeProblem, bounds: list[int]) -> None:
    problem = make_problem(2, 256, 16, num_samples=20_000)
    ids, lse = shards(problem, bounds)
    merged = merge_log_mass(ids, lse, seed=problem.seed, position=problem.position)
    assert problem.hidden is not None and problem.weight is not None
    p = torch.softmax(problem.hidden.double() @ problem.weight.double().t(), 1)
    torch.testing.assert_close(merged.lse, torch.logsumexp(problem.hidden @ problem.weight.t(), 1))
    for row in range(2):
        expected = p[row] * 20_000
        big = expected > 5
        count = torch.bincount(merged.ids[row], minlength=256).double()
        observed = torch.cat([count[big], count[~big].sum()[None]])
        wanted = torch.cat([expected[big], expected[~big].sum()[None]])
        assert stats.chi2.sf(float(((observed - wanted) ** 2 / wanted).sum()), big.sum()) > 1e-4
    # The winner's rank is the one that holds the id.
    holder = torch.bucketize(merged.ids, torch.tensor(bounds[1:-1], dtype=torch.int64), right=True)
    assert torch.equal(holder, merged.rank)


def test_greedy_rows_compare_without_noise() -> None:
    """The highest y wins for every seed, the lower rank on a tie; sampled rows beside them are drawn."""
    ids = torch.tensor([[[5], [6]], [[105], [106]], [[205], [206]]])
    lse = torch.tensor([[1.0, 0.0], [3.0, 0.0], [3.0, 0.0]])
    ranks = set()
    for seed in range(30):
        merged = merge_log_mass(ids, lse, seed=seed, greedy=torch.tensor([True, False]))
        assert int(merged.ids[0]) == 105 and float(merged.lse[0]) == 3.0
        ranks.add(int(merged.rank[1]))
    assert ranks == {0, 1, 2}
    assert merge_log_mass(ids, lse, seed=1, greedy=True).ids[:, 0].tolist() == [105, 6]


def test_ranks_without_mass_never_win_and_bad_rows_are_minus_one() -> None:
    ids = torch.tensor([[[-1]] * 4, [[7]] * 4])
    lse = torch.tensor([[-math.inf] * 2 + [math.nan, 0.0], [-200.0, -math.inf, 0.0, math.nan]])
    for seed in range(50):
        merged = merge_log_mass(ids, lse, seed=seed)
        assert merged.ids[:, 0].tolist() == [7, -1, -1, -1] and merged.rank[:, 0].tolist() == [1, -1, -1, -1]
    assert merged.lse.tolist()[:2] == [-200.0, -math.inf] and merged.lse[2:].isnan().all()


def test_a_light_rank_keeps_its_probability() -> None:
    """Mass 2**-12 beside 1: 1M draws, 244 expected (sd 16)."""
    ids = torch.tensor([0, 1])[:, None, None].expand(2, 1000, 1000)
    lse = torch.tensor([0.0, -12 * math.log(2)])[:, None].expand(2, 1000).contiguous()
    wins = int(merge_log_mass(ids, lse, seed=5).ids.sum())
    assert abs(wins - 1e6 / 4097) < 4 * 15.6


def test_draws_follow_seed_position_and_row() -> None:
    ids = torch.arange(8)[:, None, None].expand(8, 4, 50)
    lse = torch.zeros(8, 4)
    base = merge_log_mass(ids, lse, seed=5).ids
    assert torch.equal(
        base, merge_log_mass(ids, lse, seed=torch.tensor(5), position=torch.zeros(4).long()).ids
    )
    for other in (merge_log_mass(ids, lse, seed=6), merge_log_mass(ids, lse, seed=5, position=1)):
        assert (other.ids == base).double().mean() < 0.3  # 1 in 8 by chance
    assert not torch.equal(base[0], base[1])
    own = merge_log_mass(ids, lse, seed=torch.tensor([9, 9, 8, 9])).ids
    assert torch.equal(own[0], own[1]) and not torch.equal(own[0], own[2])


def test_ids_are_kept_whole() -> None:
    ids = torch.tensor([[[16_777_217]], [[2**40 + 1]]])
    lse = torch.tensor([[-50.0], [50.0]])
    assert merge_log_mass(ids, lse, seed=1).ids.tolist() == [[2**40 + 1]]
    assert merge_log_mass(ids, -lse, seed=1).ids.tolist() == [[16_777_217]]


@pytest.mark.parametrize("greedy", [False, True])
def test_gradients_stay_out(greedy: bool) -> None:
    """As of `sample`: a draw has none, and the lse of a row is no path to the shards' own."""
    lse = torch.zeros(2, 3, requires_grad=True)
    merged = merge_log_mass(torch.zeros(2, 3, 1, dtype=torch.int64), lse, seed=1, greedy=greedy)
    assert not merged.lse.requires_grad and merged.lse.grad_fn is None and lse.requires_grad


@pytest.mark.parametrize(
    "ids, lse, options, message",
    [
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3), {}, r"ids must be int64 \[R, B, K\]"),
        (torch.zeros(2, 3, 1), torch.zeros(2, 3), {}, "ids must be int64"),
        (torch.zeros(0, 3, 1, dtype=torch.int64), torch.zeros(0, 3), {}, "R = 0"),
        (torch.zeros(2, 3, 1, dtype=torch.int64), torch.zeros(3, 2), {}, r"\[2, 3\].*\[3, 2\]"),
        (torch.zeros(2, 3, 1, dtype=torch.int64), torch.zeros(2, 3).half(), {}, "float32.*float16"),
        (
            torch.zeros(1, 1, 1).long().expand(1, 2**24 + 1, 1),
            torch.zeros(1, 1).expand(1, 2**24 + 1),
            {},
            "2\\*\\*24 rows",
        ),
        (torch.zeros(1, 0, 1).long().expand(1, 0, 2**32 + 1), torch.zeros(1, 0), {}, "num_samples"),
        (
            torch.zeros(2, 3, 1, device="meta").long(),
            torch.zeros(2, 3, device="meta"),
            {},
            "ids .* with data",
        ),
        (
            torch.zeros(2, 3, 1, dtype=torch.int64),
            torch.zeros(2, 3),
            {"greedy": torch.ones(2).bool()},
            "greedy.*B = 3",
        ),
    ],
)
def test_shapes_that_do_not_fit(
    ids: torch.Tensor, lse: torch.Tensor, options: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        merge_log_mass(ids, lse, seed=1, **options)
