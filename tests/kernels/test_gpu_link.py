"""The exchange between ranks, all on one GPU: no lost word in back-to-back steps, and no wait for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsample_kernels import sample
from fsample_kernels.ops import hopper_configs, hopper_sample
from fsample_kernels.ops.link import LIMIT, missed
from fsample_kernels.types import Problem
from tests.kernels.one_gpu_ranks import STEPS_A_GRAPH, UNWRITTEN, Ranks
from tests.kernels.rank_jobs import exact_head

pytestmark = pytest.mark.gpu

MakeProblem = Callable[..., Problem]
STEPS = int(os.environ.get("FSAMPLE_STEPS", "4_000"))  # a multiple of STEPS_A_GRAPH
LIMIT_S = 2.0
POSITIONS = 64
TEMPERATURE = 8.0  # flat enough that every shard wins rows
SEED = 0x9E3779B97F4A7C15
CUTS = {2: [0, 4096, 8192], 3: [0, 2048, 4096, 6144], 4: [0, 2048, 4096, 6144, 8192]}
UNEVEN = [0, 128, 5000]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def an_order(steps: int) -> Tensor:
    generator = torch.Generator().manual_seed(steps)
    return torch.randint(POSITIONS, (steps + 1,), generator=generator).cuda()


def unsplit(hidden: Tensor, weight: Tensor, position: int) -> Tensor:
    """ids [B] of the whole head."""
    return sample(
        hidden, weight, temperature=TEMPERATURE, seed=SEED, position=position, implementation="hopper"
    ).ids[:, 0]


def open_ranks(
    make_problem: MakeProblem, cuts: list[int], B: int, D: int, steps: int, kinds: str
) -> tuple[Ranks, Tensor]:
    """Ranks of a head that is exact in bf16, and its ids [POSITIONS, B] when it is not split.

    kinds: a letter a rank: k, its kernel exchanges; a, a kernel after it.
    """
    hidden, weight = (x.bfloat16().cuda() for x in exact_head(B, cuts[-1], D))
    want = [unsplit(hidden, weight, position) for position in range(POSITIONS)]
    ranks = Ranks(len(kinds), an_order(steps), B)
    for rank, kind, first, end in zip(ranks.each, kinds, cuts[:-1], cuts[1:], strict=True):
        problem = make_problem(
            B, end - first, D, torch.bfloat16, "cuda", hidden=hidden, weight=weight[first:end],
            first_id=first, vocab_size=cuts[-1], temperature=TEMPERATURE, seed=SEED, position=rank.position,
        )  # fmt: skip
        assert hopper_sample.why_not(problem) is None
        rank.draw = rank.by_kernel(problem) if kind == "k" else rank.after_kernel(problem)
    table = torch.stack(want)
    shards = torch.bucketize(table, torch.tensor(cuts[1:], device="cuda"), right=True)
    assert set(shards.flatten().tolist()) == set(range(len(kinds)))
    return ranks, table


# Both tiles of up to 64 rows (D), a full block and one row more, two blocks, one of up to 192; ranks that
# exchange in and after their kernels, three and four of them, one with a single tile.
CASES = [
    ("kk", 1, 128, CUTS[2]),
    ("kk", 16, 128, CUTS[2]),
    ("kk", 64, 128, CUTS[2]),
    ("kk", 64, 64, CUTS[2]),
    ("kk", 64, 128, UNEVEN),
    ("kk", 65, 128, CUTS[2]),
    ("kk", 128, 128, CUTS[2]),
    ("kk", 150, 128, CUTS[2]),
    ("kk", 200, 128, CUTS[2]),
    ("kk", 256, 128, CUTS[2]),
    ("kkk", 64, 128, CUTS[3]),
    ("kkk", 200, 128, CUTS[3]),
    ("kkkk", 64, 128, CUTS[4]),
    ("aa", 1, 128, CUTS[2]),
    ("aa", 64, 128, CUTS[2]),
    ("aa", 200, 128, CUTS[2]),
    ("aaa", 256, 128, CUTS[3]),
    ("ka", 64, 128, CUTS[2]),
    ("ka", 200, 128, CUTS[2]),
    ("aka", 64, 128, CUTS[3]),
]


@pytest.mark.parametrize("kinds, B, D, cuts", CASES, ids=lambda value: str(value).replace(" ", ""))
def test_no_wrong_token_in_back_to_back_steps_with_delays(
    make_problem: MakeProblem, kinds: str, B: int, D: int, cuts: list[int]
) -> None:
    steps = STEPS // STEPS_A_GRAPH * STEPS_A_GRAPH
    ranks, want = open_ranks(make_problem, cuts, B, D, steps, kinds)
    ranks.start(LIMIT_S)
    ranks.replay(steps)
    assert not (told := ranks.complaint(steps, want)), told
    assert [rank.link[:2].tolist() for rank in ranks.each] == [[steps + 1, 0]] * len(kinds)


@pytest.mark.parametrize("kinds", ["kk", "ka"])
@pytest.mark.parametrize("B", [64, 200])
def test_steps_launched_one_by_one_leave_the_workspace_as_they_found_it(
    make_problem: MakeProblem, B: int, kinds: str
) -> None:
    steps = 300
    ranks, want = open_ranks(make_problem, CUTS[2], B, 128, steps, kinds)
    ranks.start(LIMIT_S)
    ranks.launch(steps)
    assert not (told := ranks.complaint(steps, want)), told


def test_ranks_with_other_blocks_of_rows(make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of 128 rows on one rank, 192 and 8 on the other: what one block sends, two take."""
    configs = {0: hopper_configs.LARGE, CUTS[2][1]: hopper_configs.UP_TO_192}
    steps = STEPS // STEPS_A_GRAPH * STEPS_A_GRAPH
    ranks, want = open_ranks(make_problem, CUTS[2], 200, 128, steps, "kk")
    monkeypatch.setattr(hopper_sample, "variant", lambda problem: configs[problem.first_id])
    ranks.start(LIMIT_S)
    ranks.replay(steps)
    assert not (told := ranks.complaint(steps, want)), told


@pytest.mark.parametrize("count, size", [(2, 1), (2, 300), (3, 64)])
def test_every_rank_gathers_every_word(count: int, size: int) -> None:
    steps = STEPS // STEPS_A_GRAPH * STEPS_A_GRAPH
    generator = torch.Generator().manual_seed(size)
    words = torch.randint(-(2**63), 2**63 - 1, (count, POSITIONS, size), generator=generator).cuda()
    ranks = Ranks(count, an_order(steps), count * size)
    for rank in ranks.each:
        rank.draw = rank.gather(words[rank.number])
    ranks.start(LIMIT_S)
    ranks.replay(steps)
    told = ranks.complaint(steps, words.transpose(0, 1).flatten(1))
    assert not told, told


@pytest.mark.parametrize("kinds, B", [("kk", 1), ("kk", 64), ("kk", 200), ("kkk", 64), ("aa", 64)])
def test_a_rank_that_stays_away_is_named_and_no_token_is_made_up(
    make_problem: MakeProblem, kinds: str, B: int
) -> None:
    """After a step of all, the last rank makes no other. Its peers' next three wait as long as one, and leave
    the workspaces as they should be."""
    ranks, want = open_ranks(make_problem, CUTS[len(kinds)], B, 128, 4, kinds)
    ranks.start(LIMIT_S)
    ranks.launch(1)
    assert not (told := ranks.complaint(1, want)), told
    there = ranks.each[:-1]
    start = time.monotonic()
    for rank in there * 3:
        with torch.cuda.stream(rank.stream):
            rank.step()
    torch.cuda.synchronize()
    took = time.monotonic() - start
    assert 0.9 * LIMIT_S < took < 2 * LIMIT_S, f"{took:.2f} s"
    hidden, weight = (x.bfloat16().cuda() for x in exact_head(B, CUTS[len(kinds)][-1], 128))
    torch.cuda.synchronize()
    for rank in there:
        assert missed(int(rank.status)) == (len(kinds) - 1, 2)
        assert set(rank.history[1:].flatten().tolist()) == {-1}
        assert rank.link[:2].tolist() == [5, 0] and rank.link[LIMIT.value] == 0
        with torch.cuda.stream(rank.stream):
            again = unsplit(hidden, weight, 0)
        torch.cuda.synchronize()
        assert torch.equal(again, want[0])
    assert ranks.each[-1].status == 0 and ranks.each[-1].history[1, 0] == UNWRITTEN
