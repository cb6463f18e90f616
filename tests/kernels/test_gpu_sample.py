"""The portable kernels on a GPU: every id against the float64 oracle, at the sizes that users have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from fsample_kernels import sample, testing
from fsample_kernels.ops import lm_head_sample, logits_sample
from fsample_kernels.types import Math, Noise, Problem, SampleResult

pytestmark = pytest.mark.gpu

MakeProblem = Callable[..., Problem]
EVERYTHING = {"want_logprob": True, "want_lse": True, "store_logits": True}
noises = pytest.mark.parametrize("noise", ["grouped", "element"])


def check(problem: Problem, result: SampleResult) -> None:
    """Print how many ids differ from the oracle's and why; fail where rounding is no explanation."""
    print(testing.assert_same_ids(problem, result.ids))
    testing.assert_same_rows(problem, result)


# A head of one id, then every batch class and several row tiles, with a tail in B, V and D.
@noises
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "B, V, D", [(1, 1, 1), (3, 1000, 65), (17, 4097, 100), (33, 5003, 256), (100, 2049, 130), (300, 3001, 72)]
)
def test_ids_are_the_oracles(
    make_problem: MakeProblem, noise: Noise, dtype: torch.dtype, B: int, V: int, D: int
) -> None:
    problem = make_problem(B, V, D, dtype, "cuda", noise=noise, num_samples=3, **EVERYTHING)
    check(problem, lm_head_sample.run(problem))


@noises
@pytest.mark.parametrize("math", ["fast", "exact"])
@pytest.mark.parametrize("B", [1, 16, 64, 128, 256])
def test_a_large_head(make_problem: MakeProblem, noise: Noise, math: Math, B: int) -> None:
    problem = make_problem(B, 151936, 4096, torch.bfloat16, "cuda", noise=noise, math=math)
    check(problem, lm_head_sample.run(problem))


@noises
def test_every_transform_at_once(make_problem: MakeProblem, noise: Noise) -> None:
    generator = torch.Generator().manual_seed(5)
    B, V, bound = 33, 5000, 4990
    rows = torch.randint(0, B, (400,), generator=generator)
    tokens = torch.randint(0, bound, (400,), generator=generator)
    words = torch.randint(-(1 << 31), 1 << 31, (B, 157), generator=generator).to(torch.int32)
    problem = make_problem(
        B, V, 256, torch.bfloat16, "cuda", noise=noise, num_samples=4, vocab_size=bound,
        logit_scale=1.5, softcap=5.0,
        temperature=(torch.arange(B) % 5 * 0.5).cuda(), seed=(torch.arange(B) - 3).cuda(),
        position=torch.arange(B).cuda(),
        head_bias=torch.randn(V, generator=generator).to("cuda", torch.bfloat16),
        logit_bias=torch.randn(V, B, generator=generator).cuda().T,
        sparse_bias=(rows.cuda(), tokens.cuda(), torch.linspace(-2, 2, 400).cuda()),
        mask=(torch.rand(bound, generator=generator) < 0.7).cuda(), bitmask=words.cuda(), **EVERYTHING,
    )  # fmt: skip
    check(problem, lm_head_sample.run(problem))


@noises
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("B, V", [(1, 151936), (7, 1000), (9, 50257), (256, 151936)])
def test_existing_logits(make_problem: MakeProblem, noise: Noise, dtype: torch.dtype, B: int, V: int) -> None:
    head = make_problem(B, V, 1, noise=noise, want_lse=True, want_logprob=True)
    logits = (3 * torch.randn(B, V, generator=torch.Generator().manual_seed(B))).to("cuda", dtype)
    problem = dataclasses.replace(head, hidden=None, weight=None, logits=logits)
    check(problem, logits_sample.run(problem))


@noises
def test_poisoned_rows_disturb_no_other(make_problem: MakeProblem, noise: Noise) -> None:
    temperature = torch.tensor([1.0, 1.0, 0.0, 0.0, math.nan, -1.0, 1.0, math.inf]).cuda()
    problem = make_problem(8, 151936, 64, torch.bfloat16, "cuda", noise=noise, temperature=temperature)
    clean = lm_head_sample.run(problem).ids
    assert problem.hidden is not None
    problem.hidden[1, 3] = math.nan
    problem.hidden[3, 0] = math.inf
    ids = lm_head_sample.run(problem).ids
    assert ids[[1, 3, 4, 5, 7]].eq(-1).all()
    assert torch.equal(ids[[0, 2, 6]], clean[[0, 2, 6]]) and ids[[0, 2, 6]].ge(0).all()


# Row strides that no wide load can use, rows that start between two of 16 bytes, and both turned round.
@pytest.mark.parametrize("D", [16, 20, 63, 65, 300, 2881])
def test_strides_and_misalignment(make_problem: MakeProblem, D: int) -> None:
    problem = make_problem(3, 1000, D, torch.bfloat16, "cuda")
    want = lm_head_sample.run(problem).ids
    hidden, weight = problem.hidden, problem.weight
    assert hidden is not None and weight is not None
    odd = torch.zeros(1000 * (D + 3) + 1, dtype=torch.bfloat16, device="cuda")[1:].view(1000, D + 3)[:, :D]
    turned = torch.zeros(D, 1001, dtype=torch.bfloat16, device="cuda")[:, 1:].T
    wide = torch.zeros(3, 2 * D, dtype=torch.bfloat16, device="cuda")[:, ::2]
    for given in (odd, turned):
        moved = dataclasses.replace(problem, weight=given.copy_(weight), hidden=wide.copy_(hidden))
        assert torch.equal(lm_head_sample.run(moved).ids, want)
    testing.assert_same_ids(problem, want)


def test_offsets_past_32_bits(make_problem: MakeProblem) -> None:
    """V * D and B * V above 2^31: the last ids of a wide head, and the last rows of stored logits."""
    head = make_problem(
        2, 140000, 16384, torch.bfloat16, "cuda", mask=(torch.arange(140000) >= 139900).cuda()
    )
    check(head, lm_head_sample.run(head))
    rows = make_problem(
        16400, 140000, 16, torch.bfloat16, "cuda", seed=torch.arange(16400).cuda(), store_logits=True
    )
    result = lm_head_sample.run(rows)
    assert rows.hidden is not None and isinstance(rows.seed, torch.Tensor) and result.logits is not None
    last = dataclasses.replace(rows, hidden=rows.hidden[-5:], seed=rows.seed[-5:])
    alone = lm_head_sample.run(last)
    assert torch.equal(alone.ids, result.ids[-5:]) and alone.logits is not None
    torch.testing.assert_close(alone.logits, result.logits[-5:])


@noises
@pytest.mark.parametrize("math_mode", ["fast", "exact"])
def test_rare_ids_keep_their_mass(noise: Noise, math_mode: Math) -> None:
    """One id at 0 and 511 at -15 (exact in bf16): of 26.2M draws 4097 fall outside the top id, sd 64."""
    weight = torch.zeros(512, 16, dtype=torch.bfloat16, device="cuda")
    weight[:, 0] = -15.0
    weight[300, 0] = 0.0
    hidden = torch.zeros(1024, 16, dtype=torch.bfloat16, device="cuda")
    hidden[:, 0] = 1.0
    outside = 0
    for seed in range(100):
        ids = sample(
            hidden, weight, seed=seed, num_samples=256, noise=noise, math=math_mode, implementation="triton"
        ).ids
        outside += int((ids != 300).sum())
    draws = 100 * 1024 * 256
    share = 511 * math.exp(-15.0) / (1 + 511 * math.exp(-15.0))
    assert abs(outside - draws * share) < 4 * math.sqrt(draws * share)
