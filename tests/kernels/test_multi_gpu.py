"""A head over two GPUs: every exchange gives one rank's tokens, under delays and in replayed graphs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from fsample_kernels import SampleResult, sample
from tests.kernels import gpu_rank_jobs
from tests.kernels.rank_jobs import exact_head
from tests.kernels.ranks import run_ranks

pytestmark = pytest.mark.multi_gpu
STEPS = int(os.environ.get("FSAMPLE_STEPS", "20_000"))  # a multiple of gpu_rank_jobs.STEPS_A_GRAPH
EVERYTHING = {"want_logprob": True, "want_lse": True}
exchanges = pytest.mark.parametrize("exchange", ["candidates", "log_mass", "p2p", "p2p_after"])


# One row and rows beyond a block of 256 words; even shards, uneven ones, a rank without ids.
@pytest.mark.parametrize("exchange", ["candidates", "p2p", "p2p_after", "auto"])
@pytest.mark.parametrize("cuts, batch", [([0, 4096, 8192], 1), ([0, 128, 5000], 64), ([0, 0, 700], 300)])
def test_two_ranks_draw_what_one_draws(cuts: list[int], batch: int, exchange: str) -> None:
    calls: list[dict[str, Any]] = [
        {"seed": 7, "exchange": exchange},
        {"seed": 7, "position": 1, "num_samples": 3, "temperature": 2.0, "exchange": exchange, **EVERYTHING},
        {"seed": 9, "temperature": torch.linspace(0, 2, batch), "exchange": exchange, **EVERYTHING},
        {"seed": 9, "noise": "element", "exchange": exchange, **EVERYTHING},
    ]
    first, second = run_ranks(2, gpu_rank_jobs.draw, cuts, batch, calls, backend="nccl")
    assert not isinstance(first, Exception), first
    hidden, weight = (x.bfloat16().cuda() for x in exact_head(batch, cuts[-1], 64))
    for call, one, other in zip(calls, first, second, strict=True):
        got, again = SampleResult(*one), SampleResult(*other)
        assert torch.equal(got.ids, again.ids)
        assert got.implementation.endswith("+p2p" if exchange == "auto" else f"+{exchange}")
        own = {name: value for name, value in call.items() if name != "exchange"}
        if isinstance(own.get("temperature"), torch.Tensor):
            own["temperature"] = own["temperature"].cuda()
        want = sample(hidden, weight, **own)
        assert torch.equal(got.ids, want.ids.cpu())
        for a, b in ((got.logprob, want.logprob), (got.lse, want.lse)):
            if a is not None and b is not None:
                torch.testing.assert_close(a, b.cpu(), rtol=1e-5, atol=1e-4)


def test_shards_that_start_anywhere() -> None:
    """Not at a multiple of 128: the portable kernel on rank 1, the one for Hopper on rank 0."""
    cuts, batch = [0, 77, 5000], 64
    calls: list[dict[str, Any]] = [
        {"seed": 7, "noise": noise, "exchange": "p2p", **more}
        for noise, more in (("element", {}), ("element", EVERYTHING), ("grouped", {}))
    ]
    first, second = run_ranks(2, gpu_rank_jobs.draw, cuts, batch, calls, backend="nccl")
    assert not isinstance(first, Exception), first
    hidden, weight = (x.bfloat16().cuda() for x in exact_head(batch, cuts[-1], 64))
    whole = sample(hidden, weight, seed=7, noise="element").ids.cpu()
    for call, one, other in zip(calls, first, second, strict=True):
        assert torch.equal(SampleResult(*one).ids, SampleResult(*other).ids)
        assert SampleResult(*other).implementation.endswith("+p2p")
        if call["noise"] == "element":  # the same tokens for any cut
            assert torch.equal(SampleResult(*one).ids, whole)


@pytest.mark.parametrize("exchange", ["candidates", "p2p"])
def test_unseeded_ranks_stay_together(exchange: str) -> None:
    first, second = run_ranks(2, gpu_rank_jobs.unseeded, 20, exchange, backend="nccl")
    assert not isinstance(first, Exception), first
    assert torch.equal(first, second)
    assert len(set(map(tuple, first.tolist()))) == 40  # every step draws afresh


def test_a_captured_graph_keeps_its_link_when_a_larger_one_is_opened() -> None:
    assert run_ranks(2, gpu_rank_jobs.grow, backend="nccl") == [(0, [4096, 8192])] * 2


@exchanges
def test_no_wrong_token_in_back_to_back_steps_with_delays(exchange: str) -> None:
    ranks = run_ranks(2, gpu_rank_jobs.alternate, 151_936, STEPS, exchange, backend="nccl", wait_s=300)
    assert ranks == [(STEPS, 0)] * 2


@exchanges
def test_replayed_graphs_stay_in_step(exchange: str) -> None:
    first, second = run_ranks(2, gpu_rank_jobs.replay, 32_768, 100, exchange, backend="nccl")
    assert first == second and first[:2] == [0, 100]


def test_a_rank_that_stays_away_is_named_and_no_token_is_made_up() -> None:
    first, second = run_ranks(2, gpu_rank_jobs.stay_away, 2.0, backend="nccl")
    assert second == "woke up"
    message, seconds, ids = first
    assert message.startswith("rank 1 did not send its words of exchange 4 within 2 s")
    assert 1.5 < seconds < 6 and ids == [-1]


@pytest.mark.parametrize("exchange", ["candidates", "p2p"])
@pytest.mark.parametrize("batch", [16, 200])
def test_ranks_with_other_kernels_and_tiles_draw_what_one_draws(exchange: str, batch: int) -> None:
    """One rank sends from inside its kernel, the other from one after it; tiles of 256 and of 128 ids."""
    cuts, options = [0, 4096, 8192], {"seed": 3, "exchange": exchange}
    first, second = run_ranks(2, gpu_rank_jobs.draw_apart, cuts, batch, options, backend="nccl")
    assert not isinstance(first, Exception), first
    hidden, weight = (x.bfloat16().cuda() for x in exact_head(batch, cuts[-1], 64))
    for position, (one, other) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(one, other)
        assert torch.equal(one, sample(hidden, weight, seed=3, position=position).ids.cpu())


def test_two_groups_do_not_hear_each_other() -> None:
    assert run_ranks(2, gpu_rank_jobs.in_two_groups, 2000, backend="nccl") == [0, 0]


def test_a_rank_that_still_compiles_is_waited_for() -> None:
    ranks = run_ranks(2, gpu_rank_jobs.start_cold, 1.0, backend="nccl")
    assert ranks == [[7, 4093]] * 2
