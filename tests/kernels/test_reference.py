"""The CPU implementation: the ids of the oracle, every transform and shape, streams, parameters of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fsample_kernels import chunks, reference, reference_draws, sample, sample_logits, testing
from fsample_kernels.types import Noise, Problem

MakeProblem = Callable[..., Problem]
ALGORITHMS: tuple[Noise, ...] = ("grouped", "element", "online")
EVERYTHING = {"want_logprob": True, "want_lse": True, "store_logits": True}
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)


# V: one id; around a block of 128; over two blocks of 4096 (`online` merges). D: one; odd. B: one; odd.
@algorithms
@pytest.mark.parametrize(
    "B, V, D", [(1, 1, 1), (3, 127, 7), (2, 128, 16), (5, 129, 33), (3, 1000, 64), (4, 9001, 65)]
)
def test_ids_are_the_oracles(make_problem: MakeProblem, algorithm: Noise, B: int, V: int, D: int) -> None:
    temperature = torch.linspace(0, 2, B)
    problem = make_problem(B, V, D, noise=algorithm, num_samples=40, temperature=temperature, **EVERYTHING)
    result = reference.run(problem)
    testing.assert_same_ids(problem, result.ids)
    testing.assert_same_rows(problem, result)
    testing.assert_ids_in_range(result.ids, V)


@algorithms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_transform_at_once(make_problem: MakeProblem, algorithm: Noise, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    B, V, bound = 6, 1200, 1150
    rows, tokens = (
        torch.randint(0, B, (200,), generator=generator),
        torch.randint(0, bound, (200,), generator=generator),
    )
    problem = make_problem(
        B, V, 40, dtype, noise=algorithm, num_samples=30, temperature=torch.tensor([1, 0.5, 0, 2, 0.1, 1.3]),
        head_bias=torch.randn(V, generator=generator).to(dtype), logit_scale=0.7, softcap=5.0,
        logit_bias=torch.randn(B, V, generator=generator),
        sparse_bias=(rows, tokens, torch.linspace(-2, 2, 200)),
        mask=torch.rand(B, bound, generator=generator) < 0.7, vocab_size=bound, seed=torch.arange(B) - 3,
        position=torch.tensor([0, 1, 2, 2**32 - 1, 7, 7]), **EVERYTHING,
    )  # fmt: skip
    result = reference.run(problem)
    testing.assert_same_ids(problem, result.ids)
    testing.assert_same_rows(problem, result)
    testing.assert_ids_in_range(result.ids, bound)


@algorithms
def test_chunks_shards_and_kept_blocks_do_not_change_ids(
    make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch, algorithm: Noise
) -> None:
    """Noise belongs to global ids: a shard draws what the whole head draws under a mask.

    Save the groups that the shard's start cuts: they have words of their own, which `element` needs not.
    """
    problem = make_problem(3, 9000, 24, noise=algorithm, num_samples=20, **EVERYTHING)
    whole = reference.run(problem)
    monkeypatch.setattr(chunks, "_CHUNK_ELEMENTS", {"cpu": 1})
    monkeypatch.setattr(reference_draws, "PENDING_DRAWS", 0)
    monkeypatch.setattr(reference_draws, "NOISE_VALUES", {"cpu": 300})
    small = reference.run(problem)
    assert torch.equal(small.ids, whole.ids)
    assert small.lse is not None and whole.lse is not None
    torch.testing.assert_close(small.lse, whole.lse)
    for first, stop in ((0, 128), (4096, 9000), (100, 4500), (5000, 5001)):
        assert problem.weight is not None
        shard = dataclasses.replace(problem, weight=problem.weight[first:stop], first_id=first)
        mask = torch.zeros(9000, dtype=torch.bool)
        mask[first:stop] = True
        masked = dataclasses.replace(problem, mask=mask)
        got, want = reference.run(shard), reference.run(masked)
        if first % 128 == 0 or algorithm == "element":
            assert torch.equal(got.ids, want.ids)
        else:
            beyond = (got.ids >= first // 128 * 128 + 128) & (want.ids >= first // 128 * 128 + 128)
            assert torch.equal(got.ids[beyond], want.ids[beyond])
        assert got.lse is not None and want.lse is not None
        torch.testing.assert_close(got.lse, want.lse)
        testing.assert_same_ids(shard, got.ids)


def test_products_are_not_rounded_before_the_draw() -> None:
    """bf16 inputs: greedy ids are those of a float64 product of the same values, save near ties."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(256, 512, generator=generator).bfloat16()
    weight = torch.randn(4096, 512, generator=generator).bfloat16()
    exact = hidden.double() @ weight.double().t()
    ids = sample(hidden, weight, temperature=0).ids
    lost = exact.amax(1) - exact.gather(1, ids)[:, 0]
    assert lost.max() < 1e-3
    assert ((exact.bfloat16().argmax(1)) != exact.argmax(1)).any()  # rounded logits would show


def test_fp32_products_are_full_fp32_and_the_setting_is_put_back() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(1, 4096, generator=generator), torch.randn(64, 4096, generator=generator)
    weight[40] = hidden[0] / hidden.norm() * 64
    weight[41] = weight[40] * (1 + 1e-5)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        ids = sample(hidden, weight, temperature=0).ids
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert ids.tolist() == [[41]]


@pytest.fixture
def bf16_products() -> Iterator[None]:
    """What a user may have asked of fp32 products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("bf16_products")
def test_products_stay_full_fp32_while_another_call_ends() -> None:
    """The setting is the process's: neither the first to end nor the last to begin may decide it alone."""
    backend: Any = getattr(torch.backends.mkldnn, "matmul", None)

    def now() -> str:
        named = hasattr(backend, "fp32_precision")
        return str(backend.fp32_precision) if named else torch.get_float32_matmul_precision()

    theirs, device = now(), torch.device("cpu")
    first, second = chunks.full_fp32_products(device), chunks.full_fp32_products(device)
    first.__enter__()
    ours = now()
    second.__enter__()
    first.__exit__(None, None, None)
    assert now() == ours != theirs
    second.__exit__(None, None, None)
    assert now() == theirs
    with pytest.raises(KeyError), chunks.full_fp32_products(device), chunks.full_fp32_products(device):
        raise KeyError
    assert now() == theirs


@pytest.mark.usefixtures("bf16_products")
def test_threads_draw_from_full_fp32_products() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(1, 512, generator=generator), torch.randn(64, 512, generator=generator)
    want = sample(hidden, weight, temperature=0, store_logits=True).logits
    assert want is not None

    def differing(thread: int) -> int:
        drawn = (sample(hidden, weight, temperature=0, store_logits=True).logits for _ in range(300))
        return sum(logits is None or not torch.equal(logits, want) for logits in drawn)

    with ThreadPoolExecutor(4) as executor:
        assert sum(executor.map(differing, range(4))) == 0
    assert torch.get_float32_matmul_precision() == "medium"


def test_fp16_sums_do_not_overflow() -> None:
    hidden, weight = (
        torch.full((1, 8192), 4.0, dtype=torch.float16),
        torch.zeros(3, 8192, dtype=torch.float16),
    )
    weight[1], weight[2] = 4.0, -4.0
    result = sample(hidden, weight, temperature=0, store_logits=True)
    assert result.ids.tolist() == [[1]]
    assert result.logits is not None and result.logits.tolist() == [[0.0, 131072.0, -131072.0]]


@algorithms
def test_greedy_and_sampled_rows_share_a_batch(algorithm: Noise) -> None:
    """Rows 0 and 2 are the argmax, lowest id first, for every seed; rows 1 and 3 equal their solo runs."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(4, 2000, generator=generator).round(decimals=1)
    logits[:, ::7], logits[:, 5] = 0.0, -torch.inf
    logits[0, [900, 300, 1900]] = logits[2, [77, 1999]] = 9.0
    temperature = torch.tensor([0.0, 1.0, 0.0, 0.7])
    for seed in range(3):
        seeds = torch.arange(4) + 10 * seed
        result = sample_logits(
            logits,
            temperature=temperature,
            seed=seeds,
            noise=algorithm,
            num_samples=8,
            want_logprob=True,
            want_lse=True,
        )
        assert result.ids[0].tolist() == [300] * 8 and result.ids[2].tolist() == [77] * 8
        assert result.logprob is not None and result.lse is not None
        assert (result.logprob[[0, 2]] == 0).all() and result.lse[[0, 2]].tolist() == [9.0, 9.0]
        for row, t in ((1, 1.0), (3, 0.7)):
            solo = sample_logits(
                logits[row : row + 1],
                temperature=t,
                seed=seeds[row : row + 1],
                noise=algorithm,
                num_samples=8,
            )
            assert torch.equal(solo.ids[0], result.ids[row])


def test_rows_use_their_own_requests_parameters() -> None:
    """Five rows of three requests at successive positions equal one call each; B = 17 and 33 as well."""
    generator = torch.Generator().manual_seed(9)
    request = torch.tensor([0, 0, 1, 1, 2])
    position = torch.tensor([10, 11, 3, 4, 8])
    temperature, seed = torch.tensor([0.5, 1.5, 0.0])[request], torch.tensor([1, 2, 3])[request]
    for repeats in (1, 4, 7):
        B = min(5 * repeats, 17 if repeats == 4 else 33)
        logits = torch.randn(B, 700, generator=generator)
        pick = torch.arange(B) % 5
        ids = sample_logits(
            logits, temperature=temperature[pick], seed=seed[pick], position=position[pick]
        ).ids
        for row in range(B):
            i = int(pick[row])
            one = sample_logits(
                logits[row][None],
                temperature=float(temperature[i]),
                seed=seed[i][None],
                position=int(position[i]),
            )
            assert one.ids.tolist() == ids[row : row + 1].tolist()


def test_head_bias_scale_and_cap_in_their_order() -> None:
    """At id 17, and at the last of 50,257, past the last whole block."""
    generator = torch.Generator().manual_seed(10)
    hidden, weight = torch.randn(4, 16, generator=generator), torch.randn(50_257, 16, generator=generator)
    y = hidden @ weight.t()
    for dtype in (torch.float32, torch.bfloat16):
        for planted in (17, 50_256):
            bias = torch.zeros(50_257, dtype=dtype)
            bias[planted] = 50
            result = sample(
                hidden, weight, temperature=0, head_bias=bias, logit_scale=0.0625, softcap=3.0,
                store_logits=True,
            )  # fmt: skip
            assert result.ids.tolist() == [[planted]] * 4
            assert result.logits is not None
            torch.testing.assert_close(result.logits, 3 * torch.tanh((y + bias.float()) * 0.0625 / 3))


def test_logprob_is_processed_and_without_noise() -> None:
    generator = torch.Generator().manual_seed(12)
    hidden, weight = torch.randn(3, 16, generator=generator) * 3, torch.randn(800, 16, generator=generator)
    bias, mask = torch.randn(800, generator=generator), torch.arange(800) % 5 != 0
    for algorithm in ALGORITHMS:
        result = sample(
            hidden, weight, temperature=0.5, softcap=30.0, logit_bias=bias, mask=mask, seed=1, num_samples=50,
            noise=algorithm, want_logprob=True,
        )  # fmt: skip
        y = 30 * torch.tanh(hidden.double() @ weight.double().t() / 30) + bias
        want = torch.log_softmax(y.masked_fill(~mask, -torch.inf) / 0.5, 1).gather(1, result.ids)
        assert result.logprob is not None
        torch.testing.assert_close(result.logprob.double(), want, rtol=1e-5, atol=2e-5)
        assert (result.logprob <= 0).all()


@algorithms
def test_samples_are_independent_and_do_not_depend_on_their_number(algorithm: Noise) -> None:
    """8 different draws, a prefix of 16; a seed's second sample is not the next seed's first."""
    logits = torch.zeros(2, 1000)
    eight = sample_logits(logits, seed=42, num_samples=8, noise=algorithm).ids
    sixteen = sample_logits(logits, seed=42, num_samples=16, noise=algorithm).ids
    assert torch.equal(eight, sixteen[:, :8]) and all(len(set(row)) > 5 for row in eight.tolist())
    many = torch.zeros(256, 32000)
    second = sample_logits(many, seed=42, num_samples=2).ids[:, 1]
    first = sample_logits(many, seed=43).ids[:, 0]
    assert (second == first).sum() <= 2 and len(set(first.tolist())) > 240


def test_a_row_is_its_seed_wherever_it_sits() -> None:
    generator = torch.Generator().manual_seed(13)
    row = torch.randn(1, 2000, generator=generator)
    seeds = torch.tensor([11, 22, 33, 44])
    together = sample_logits(row.expand(4, -1), seed=seeds, num_samples=6).ids
    equal = sample_logits(row.expand(4, -1), seed=torch.full((4,), 11), num_samples=6).ids
    assert (equal == together[0]).all()
    for i, seed in enumerate(seeds):
        assert torch.equal(sample_logits(row, seed=seed[None], num_samples=6).ids[0], together[i])
        assert i == 0 or not torch.equal(together[i], together[0])
    neighbours = torch.cat(
        [row, torch.full((1, 2000), torch.nan), torch.randn(62, 2000, generator=generator)]
    )
    mixed = sample_logits(neighbours, seed=torch.arange(11, 75), temperature=torch.rand(64).masked_fill_(
        torch.arange(64) == 0, 1.0), num_samples=6).ids  # fmt: skip
    assert torch.equal(mixed[0], together[0])


def test_forms_of_seed_and_position() -> None:
    logits = torch.zeros(3, 500)
    want = sample_logits(logits, seed=2**64 - 5, position=7).ids
    for seed in (-5, torch.tensor(-5)):
        for position in (torch.tensor(7), torch.tensor(7, dtype=torch.int32), torch.full((3,), 7)):
            assert torch.equal(sample_logits(logits, seed=seed, position=position).ids, want)
    assert not torch.equal(sample_logits(logits, seed=2**64 - 5, position=8).ids, want)
    assert not torch.equal(sample_logits(logits, seed=2**32 - 5, position=7).ids, want)


def test_unseeded_calls_differ_and_obey_manual_seed() -> None:
    logits = torch.zeros(8, 3200)
    torch.manual_seed(1)
    first, second = sample_logits(logits).ids, sample_logits(logits).ids
    torch.manual_seed(1)
    assert torch.equal(sample_logits(logits).ids, first) and not torch.equal(first, second)
    assert len(set(first[:, 0].tolist())) > 4  # rows of one call differ too


def test_strided_and_sliced_inputs(make_problem: MakeProblem) -> None:
    problem = make_problem(5, 700, 33, num_samples=10)
    assert problem.hidden is not None and problem.weight is not None
    want = reference.run(problem).ids
    wide = torch.randn(10, 80)
    wide[::2, 1:67:2] = problem.hidden
    views = [
        (problem.hidden.t().contiguous().t(), problem.weight.t().contiguous().t()),
        (wide[::2, 1:67:2], torch.cat([problem.weight, problem.weight], 1)[:, 33:]),
        (problem.hidden, torch.stack([problem.weight, problem.weight], 2)[..., 1]),
        (problem.hidden[:1].expand(5, -1), problem.weight),
    ]
    for hidden, weight in views[:3]:
        assert torch.equal(
            reference.run(dataclasses.replace(problem, hidden=hidden, weight=weight)).ids, want
        )
    rows = reference.run(dataclasses.replace(problem, hidden=views[3][0], seed=torch.full((5,), 3))).ids
    assert (rows == rows[0]).all()


@pytest.mark.parametrize(
    "dtype, D",
    [(torch.bfloat16, d) for d in (16, 20, 63, 65, 300, 511)] + [(torch.float32, d) for d in (1, 2, 3, 5)],
)
def test_any_feature_count(dtype: torch.dtype, D: int) -> None:
    generator = torch.Generator().manual_seed(D)
    hidden, weight = (
        torch.randn(3, D, generator=generator).to(dtype),
        torch.randn(1000, D, generator=generator).to(dtype),
    )
    ids = sample(hidden, weight, temperature=0).ids
    assert torch.equal(ids[:, 0], (hidden.double() @ weight.double().t()).argmax(1))


def test_very_many_rows() -> None:
    """More rows than a launch grid's short sides hold; every row is drawn."""
    ids = sample(torch.ones(70_000, 1), torch.zeros(3, 1), seed=1).ids
    testing.assert_ids_in_range(ids, 3)
    assert (torch.bincount(ids[:, 0]) - 70_000 / 3).abs().max() < 4 * (70_000 * 2 / 9) ** 0.5


def test_a_store_of_every_logit_changes_nothing_else(make_problem: MakeProblem, poisoned_empty: None) -> None:
    """Unwritten memory is NaN here: every logit is written, and none is made where they are not asked for."""
    plain = make_problem(3, 5000, 16, num_samples=7, noise="grouped")
    stored = reference.run(dataclasses.replace(plain, store_logits=True))
    assert stored.logits is not None and stored.logits.isfinite().all()
    result = reference.run(plain)
    assert torch.equal(result.ids, stored.ids)
    assert result.logits is None and result.lse is None and result.logprob is None
    given = dataclasses.replace(plain, hidden=None, weight=None, logits=stored.logits)
    assert torch.equal(reference.run(given).ids, stored.ids)
