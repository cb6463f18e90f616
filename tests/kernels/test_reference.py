"""The CPU implementation: the oracle's ids, every transform and shape, every defined odd case."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsample_kernels import chunks, reference, reference_draws, sample, sample_logits, testing
from fsample_kernels.types import Noise, Problem

MakeProblem = Callable[..., Problem]
ALGORITHMS: tuple[Noise, ...] = ("grouped", "element", "online")
EVERYTHING = {"want_logprob": True, "want_lse": True, "store_logits": True}
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)


def exact_head(logits: Tensor, batch: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """hidden [batch, 16], weight [V, 16] whose product is exactly `logits` [V], which `dtype` must hold."""
    hidden, weight = torch.zeros(batch, 16, dtype=dtype), torch.zeros(logits.shape[0], 16, dtype=dtype)
    hidden[:, 0], weight[:, 0] = 1, logits.to(dtype)
    return hidden, weight


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


@algorithms
def test_masked_ids_are_never_drawn(algorithm: Noise) -> None:
    mask = torch.arange(3000) % 2 == 0
    ids = sample_logits(torch.zeros(1, 3000), seed=4, num_samples=3000, mask=mask, noise=algorithm).ids
    testing.assert_ids_in_range(ids, 3000)
    assert (ids % 2 == 0).all()


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
def test_padding_rows_are_never_drawn(algorithm: Noise) -> None:
    """A bound apart from the row count: zero rows lie far above the real logits, and so do untrained ones."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.cat(
        [torch.randn(1500, generator=generator) - 12, torch.zeros(36), torch.randn(100, generator=generator)]
    )
    hidden, weight = exact_head(logits)
    for temperature in (0.0, 1.0):
        ids = sample(
            hidden, weight, temperature=temperature, seed=1, num_samples=500, vocab_size=1500, noise=algorithm
        ).ids
        testing.assert_ids_in_range(ids, 1500)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("V", [1000, 1001])
@algorithms
def test_a_nan_row_is_minus_one_and_disturbs_no_other(algorithm: Noise, V: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(V, 32, generator=generator).bfloat16()
    hidden = torch.randn(6, 32, generator=generator).bfloat16()
    clean = sample(
        hidden, weight, seed=9, temperature=temperature, num_samples=5, noise=algorithm, want_lse=True
    )
    hidden[2, 0], hidden[4, 3] = torch.nan, torch.inf
    result = sample(
        hidden,
        weight,
        seed=9,
        temperature=temperature,
        num_samples=5,
        noise=algorithm,
        want_lse=True,
        want_logprob=True,
    )
    bad = torch.tensor([False, False, True, False, True, False])
    testing.assert_ids_in_range(result.ids, V, bad)
    assert torch.equal(result.ids[~bad], clean.ids[~bad])
    assert result.lse is not None and clean.lse is not None and result.logprob is not None
    assert torch.equal(result.lse[~bad], clean.lse[~bad])
    assert result.lse[bad].isnan().all() and result.logprob[bad].isnan().all()


@algorithms
def test_non_finite_logits(algorithm: Noise) -> None:
    """A NaN under the mask is just forbidden; +inf spoils its row; nothing allowed is -1 with lse -inf."""
    logits = torch.zeros(5, 300)
    logits[0, 7], logits[1, 8], logits[2], logits[3, :299] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits[4, 6] = torch.nan
    mask = torch.ones(300, dtype=torch.bool)
    mask[7] = False
    result = sample_logits(
        logits, seed=1, mask=mask, noise=algorithm, num_samples=20, want_lse=True, want_logprob=True
    )
    testing.assert_ids_in_range(result.ids, 300, torch.tensor([False, True, True, False, True]))
    assert (result.ids[0] != 7).all() and (result.ids[3] == 299).all()
    assert result.lse is not None and result.logprob is not None
    assert result.lse.tolist()[2:4] == [-math.inf, 0.0]
    assert result.lse.isnan().tolist() == [False, True, False, False, True]
    assert result.logprob[3].tolist() == [0.0] * 20
    assert result.logprob.isnan().any(1).tolist() == [False, True, True, False, True]


@pytest.mark.parametrize("algorithm", ["grouped", "element", "online"])
def test_groups_without_mass_beside_very_low_logits(algorithm: Noise) -> None:
    mask = torch.arange(5000) >= 4096
    for value in (-60.0, -120.0, -3e4):  # 2**-x leaves fp32 from the second on
        for given, allowed in ((None, 5000), (mask, 904)):
            result = sample_logits(
                torch.full((1, 5000), value), seed=0, mask=given, noise=algorithm, num_samples=3,
                want_lse=True, want_logprob=True,
            )  # fmt: skip
            assert result.lse is not None and result.logprob is not None
            assert result.lse.item() == pytest.approx(value + math.log(allowed), rel=1e-6)
            assert result.logprob[0].tolist() == pytest.approx([-math.log(allowed)] * 3, rel=1e-5)
            assert (result.ids >= 5000 - allowed).all()


def test_huge_logits_and_tiny_temperatures() -> None:
    logits = torch.tensor([[1e38, 9e37, -1e38], [1.0, 0.0, -3e38], [-1e30, -2e30, -3e38]])
    for temperature in (1.0, 1e-30, 1e-42, 1e-300):
        if temperature == 1e-30:
            continue  # 1e38 / 1e-30 counts as infinite, see below
        assert sample_logits(logits, seed=1, temperature=temperature).ids.tolist() == [[0], [0], [0]]
    assert sample_logits(logits, seed=1, temperature=2.0**-60).ids.tolist() == [[-1], [0], [-1]]


def test_packed_masks_are_read_by_global_id(make_problem: MakeProblem) -> None:
    generator = torch.Generator().manual_seed(6)
    V = 1669
    allowed = torch.rand(3, V, generator=generator) < 0.3
    padded = torch.cat([allowed, torch.zeros(3, -V % 32, dtype=torch.bool)], 1).view(3, -1, 32)
    words = (padded.long() << torch.arange(32)).sum(2)
    packed = torch.where(words >= 2**31, words - 2**32, words).int()
    strided = torch.full((3, packed.shape[1] + 5), -1, dtype=torch.int32)
    strided[:, : packed.shape[1]] = packed
    problem = make_problem(3, V, 16, num_samples=50)
    want = reference.run(dataclasses.replace(problem, mask=allowed)).ids
    assert torch.equal(reference.run(dataclasses.replace(problem, bitmask=packed)).ids, want)
    view = strided[:, : packed.shape[1]]
    assert torch.equal(reference.run(dataclasses.replace(problem, bitmask=view)).ids, want)
    short = dataclasses.replace(problem, bitmask=packed[:, :10].contiguous(), vocab_size=320)
    testing.assert_same_ids(short, reference.run(short).ids)
    one = reference.run(dataclasses.replace(problem, mask=allowed[1].expand(3, -1))).ids
    same = dataclasses.replace(problem, bitmask=packed[1:2].expand(3, -1))  # one row in memory for all
    assert torch.equal(reference.run(same).ids, one)
    # blocks of 4096 ids: whole chunks lie past the mask
    ended = make_problem(3, 9000, 16, noise="online", bitmask=packed[:, :10], vocab_size=320)
    testing.assert_same_ids(ended, reference.run(ended).ids)


def test_bad_sparse_bias_on_the_device_spoils_its_row_only() -> None:
    logits = torch.zeros(5, 100)
    rows, ids = torch.tensor([0, 1, 2, 3, 3]), torch.tensor([100, -1, 0, 1, 50])
    values = torch.tensor([5.0, 5.0, torch.nan, torch.inf, 60.0])
    result = sample_logits(logits, seed=1, logit_bias=(rows, ids, values), num_samples=4)
    testing.assert_ids_in_range(result.ids, 100, torch.tensor([True, True, True, True, False]))
    assert torch.equal(result.ids[4], sample_logits(logits, seed=1, num_samples=4).ids[4])
    outside = (torch.tensor([5]), torch.tensor([1]), torch.tensor([1.0]))
    assert (sample_logits(logits, seed=1, logit_bias=outside).ids == -1).all()
    head = torch.eye(5), torch.zeros(100, 5)
    stored = sample(*head, seed=1, logit_bias=(rows, ids, values), store_logits=True)
    assert stored.logits is not None and stored.logits[2, 0].isnan() and stored.logits[3, 1] == torch.inf
    inside = (torch.tensor([3, 3]), torch.tensor([50, 50]), torch.tensor([20.0, 20.0]))
    assert sample_logits(logits, seed=1, logit_bias=inside).ids[3].tolist() == [50]  # repeats add


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


def test_temperature_tensors_outside_their_range_spoil_their_rows() -> None:
    temperature = torch.tensor([math.nan, math.inf, -1.0, -0.0, 1e-30, 1.0])
    result = sample_logits(
        torch.eye(6, 50), temperature=temperature, seed=1, want_logprob=True, want_lse=True
    )
    testing.assert_ids_in_range(result.ids, 50, torch.tensor([True, True, True, False, False, False]))
    assert result.ids[3:5, 0].tolist() == [3, 4]
    position = torch.tensor([0, -1, 2**32, 2**32 - 1, 1, 2])
    ids = sample_logits(torch.eye(6, 50), seed=1, position=position).ids
    testing.assert_ids_in_range(ids, 50, torch.tensor([False, True, True, False, False, False]))


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
    generator = torch.Generator().manual_seed(10)
    hidden, weight = torch.randn(4, 24, generator=generator), torch.randn(5025, 24, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        bias = torch.zeros(5025, dtype=dtype)
        bias[17] = 50
        result = sample(
            hidden, weight, temperature=0, head_bias=bias, logit_scale=0.0625, softcap=3.0, store_logits=True
        )
        assert result.ids.tolist() == [[17]] * 4
        want = 3 * torch.tanh((hidden @ weight.t() + bias.float()) * 0.0625 / 3)
        assert result.logits is not None
        torch.testing.assert_close(result.logits, want)


@algorithms
@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_softcap_does_not_unmask(algorithm: Noise, cap: float) -> None:
    """Spare lanes and masked ids stay at -inf: all real logits sit at -cap, where a capped -inf would be."""
    hidden, weight = exact_head(torch.full((1000,), -1000.0))
    mask = torch.arange(1000) % 3 != 0
    ids = sample(
        hidden, weight, softcap=cap, mask=mask, seed=1, num_samples=5000, vocab_size=990, noise=algorithm
    ).ids
    testing.assert_ids_in_range(ids, 990)
    assert (ids % 3 != 0).all()


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
