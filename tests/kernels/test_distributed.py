"""`distributed.sample` over gloo: the same ids on every rank, and one rank's answer where it is promised."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from scipy import stats
from torch import Tensor

from fsample_kernels import SampleResult, distributed, sample, words
from fsample_kernels.distributed import shards
from fsample_kernels.distributed.collectives import Team
from tests.kernels import rank_jobs
from tests.kernels.ranks import LOST, run_ranks

EVERYTHING = {"want_logprob": True, "want_lse": True}


def draw(cuts: list[int], hidden: Tensor, weight: Tensor, calls: list[dict[str, Any]]) -> list[SampleResult]:
    """One result a call, the same on all ranks to the last bit (the shard's logits aside)."""
    ranks = run_ranks(len(cuts) - 1, rank_jobs.draw, cuts, hidden, weight, calls)
    for rank in ranks:
        if isinstance(rank, Exception):
            raise rank
        assert rank != LOST
    for number, call in enumerate(calls):
        first = SampleResult(*ranks[0][number])
        for rank in ranks[1:]:
            other = SampleResult(*rank[number])
            assert torch.equal(first.ids, other.ids), call
            for a, b in ((first.logprob, other.logprob), (first.lse, other.lse)):
                if a is not None and b is not None:  # NaNs are equal here
                    assert torch.equal(a.view(torch.int32), b.view(torch.int32)), call
    return [SampleResult(*result) for result in ranks[0]]


def assert_one_ranks_answer(
    got: SampleResult, hidden: Tensor, weight: Tensor, options: dict[str, Any]
) -> None:
    own = {name: value for name, value in options.items() if name not in ("exchange", "first_id", "hidden")}
    want = sample(options.get("hidden", hidden), weight, **own)
    assert torch.equal(got.ids, want.ids)
    for a, b in ((got.logprob, want.logprob), (got.lse, want.lse)):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-5, equal_nan=True)


# Shards at multiples of 128, one of them empty, one past vocab_size; the last ends inside a block.
ALIGNED = {2: [0, 640, 1101], 3: [0, 128, 128, 1101], 4: [0, 256, 512, 1024, 1101],
           8: [0, 128, 256, 384, 384, 640, 768, 896, 1101]}  # fmt: skip


@pytest.mark.parametrize("size", ALIGNED)
def test_aligned_shards_draw_what_one_rank_draws(size: int) -> None:
    hidden, weight = rank_jobs.exact_head(5, 1101)
    generator = torch.Generator().manual_seed(3)
    per_row = {
        "temperature": torch.tensor([1.0, 0.3, 0.0, 2.0, 5.0]), "seed": torch.arange(5) - 2,
        "position": torch.tensor([0, 1, 2, 2**32 - 1, 7]),
    }  # fmt: skip
    transforms = {
        "head_bias": torch.randint(-4, 5, (1101,), generator=generator) / 4, "logit_scale": 0.5,
        "softcap": 4.0,
        "mask": torch.rand(5, 1101, generator=generator) < 0.7, "vocab_size": 1000,
    }  # fmt: skip
    words_mask = torch.randint(-(2**31), 2**31 - 1, (5, 35), generator=generator).int()
    whole = torch.randn(5, 1101, generator=generator).round()
    calls: list[dict[str, Any]] = [
        {"seed": 7},
        {"seed": 2**64 - 1, "num_samples": 7, "temperature": 3.0, **EVERYTHING},
        {"temperature": 0.0, **EVERYTHING},
        {**per_row, **EVERYTHING, "num_samples": 3},
        {"seed": 5, "temperature": 2.0, **transforms, **EVERYTHING},
        {"seed": 5, "mask": words_mask, "logit_bias": whole, **EVERYTHING},
        {"seed": 6, "logit_bias": ([0, 1, 4, 4], [3, 700, 1100, 1100], [9.0, 9.0, 4.0, 5.0]), },
        {"seed": 8, "noise": "element", "num_samples": 2, **EVERYTHING},
        {"seed": 8, "num_samples": 0, **EVERYTHING},
    ]  # fmt: skip
    for call, got in zip(calls, draw(ALIGNED[size], hidden, weight, calls), strict=True):
        assert_one_ranks_answer(got, hidden, weight, call)
        assert got.implementation in ("reference+candidates", "none+candidates")


@pytest.mark.parametrize("size", [2, 3])
def test_element_noise_draws_the_same_tokens_for_any_cut(size: int) -> None:
    hidden, weight = rank_jobs.exact_head(6, 500)
    calls: list[dict[str, Any]] = [
        {"seed": s, "noise": "element", "num_samples": 20, **EVERYTHING} for s in (1, 2)
    ]
    cuts = [0, 1, 500] if size == 2 else [0, 130, 261, 500]
    for call, got in zip(calls, draw(cuts, hidden, weight, calls), strict=True):
        assert_one_ranks_answer(got, hidden, weight, call)


# One row and odd remainders over 2 to 8 ranks; fewer tokens than ranks.
@pytest.mark.parametrize("size, V", [(2, 1519), (3, 257), (4, 503), (4, 3), (8, 503)])
def test_a_winner_in_the_first_and_last_row_of_a_shard_keeps_its_id(size: int, V: int) -> None:
    cuts = [-(-V * rank // size) for rank in range(size + 1)]
    if V == 3:
        cuts = [0, 1, 1, 2, 3]  # rank 1 holds nothing
    planted = sorted({id for a, b in zip(cuts, cuts[1:], strict=False) if b > a for id in (a, b - 1)})
    hidden, weight = torch.eye(len(planted)), torch.zeros(V, len(planted))
    weight[planted, range(len(planted))] = 120.0
    calls: list[dict[str, Any]] = [
        {"seed": 1, "temperature": temperature, "exchange": exchange, "noise": noise, **EVERYTHING}
        for temperature in (0.0, 1.0)
        for exchange, noise in (("candidates", "grouped"), ("candidates", "element"), ("log_mass", "grouped"),
                                ("log_mass", "online"), ("auto", "online"))
    ]  # fmt: skip
    for call, got in zip(calls, draw(cuts, hidden, weight, calls), strict=True):
        assert got.ids[:, 0].tolist() == planted, call
        assert got.logprob is not None and got.lse is not None
        torch.testing.assert_close(got.logprob, torch.zeros(len(planted), 1))
        torch.testing.assert_close(got.lse, torch.full((len(planted),), 120.0))
        assert got.implementation.endswith("log_mass" if call["exchange"] != "candidates" else "candidates")


def test_a_head_bias_belongs_to_the_rows_of_its_shard() -> None:
    """50 at id 17, which is rank 0's, then at rank 1's first and last of 50,257; the lse says that it is
    added once."""
    cuts = [0, 25_216, 50_257]
    generator = torch.Generator().manual_seed(10)
    hidden, weight = torch.randn(4, 16, generator=generator), torch.randn(50_257, 16, generator=generator)
    planted = [17, 25_216, 50_256]
    calls: list[dict[str, Any]] = [
        {"seed": 1, "temperature": 0.0, "head_bias": 50 * (torch.arange(50_257) == id).to(dtype),
         "exchange": exchange, **EVERYTHING}
        for id in planted
        for dtype in (torch.float32, torch.bfloat16)
        for exchange in ("candidates", "log_mass")
    ]  # fmt: skip
    for number, (call, got) in enumerate(zip(calls, draw(cuts, hidden, weight, calls), strict=True)):
        assert got.ids.tolist() == [[planted[number // 4]]] * 4, call
        assert_one_ranks_answer(got, hidden, weight, call)


def test_rows_that_a_rank_cannot_serve() -> None:
    """Nothing allowed on one rank, on all; a NaN on one rank; a tie of greedy rows across ranks."""
    cuts = [0, 100, 200, 300]
    hidden, weight = torch.eye(5), torch.zeros(300, 5)
    weight[250, 2] = torch.nan
    weight[[40, 140, 240], 3] = 9.0
    mask = torch.ones(5, 300, dtype=torch.bool)
    mask[0, :100] = mask[0, 200:] = False
    mask[1] = False
    mask[3:, 250] = False  # 0 times NaN is NaN in these rows as well
    temperature = torch.tensor([1.0, 1.0, 1.0, 0.0, torch.nan])
    calls: list[dict[str, Any]] = [
        {"seed": seed, "mask": mask, "temperature": temperature, "exchange": exchange, **EVERYTHING}
        for seed in range(3)
        for exchange in ("candidates", "log_mass")
    ]
    seen = set()
    for got in draw(cuts, hidden, weight, calls):
        ids = got.ids[:, 0].tolist()
        assert 100 <= ids[0] < 200 and ids[1:] == [-1, -1, 40, -1]
        seen.add(ids[0])
        assert got.lse is not None and got.logprob is not None
        torch.testing.assert_close(got.lse[0], torch.tensor(100.0).log())
        torch.testing.assert_close(got.logprob[0, 0], -torch.tensor(100.0).log())
        assert got.lse[1] == -torch.inf and got.lse[2].isnan() and got.lse[3] == 9.0 and got.lse[4].isnan()
        assert got.logprob[[1, 2, 4]].isnan().all() and got.logprob[3] == 0
    assert len(seen) > 1


@pytest.mark.parametrize("cuts", [[0, 256, 600], [0, 128, 384, 600]], ids=str)
def test_the_batch_may_change_from_step_to_step(cuts: list[int]) -> None:
    hidden, weight = rank_jobs.exact_head(16, 600)
    calls: list[dict[str, Any]] = [
        {"hidden": hidden[:rows], "seed": 4, "position": position, **EVERYTHING}
        for position, rows in enumerate((8, 16, 1, 0, 16, 8))
    ]
    for call, got in zip(calls, draw(cuts, hidden, weight, calls), strict=True):
        assert_one_ranks_answer(got, hidden, weight, call)


@pytest.mark.parametrize("exchange", ["candidates", "log_mass"])
def test_equal_reduces_give_equal_bits(exchange: str) -> None:
    (changed, first), *others = run_ranks(2, rank_jobs.repeat, 500, exchange)
    assert changed == 0
    for again, bits in others:
        assert again == 0 and torch.equal(bits, first)


@pytest.mark.parametrize(
    "size, steps, exchange", [(2, 300, "candidates"), (4, 60, "log_mass"), (8, 40, "candidates")]
)
def test_unseeded_ranks_stay_together(size: int, steps: int, exchange: str) -> None:
    ranks = run_ranks(size, rank_jobs.unseeded, steps, exchange)
    for rank in ranks[1:]:
        assert torch.equal(rank, ranks[0])
    assert len(set(map(tuple, ranks[0].tolist()))) == steps  # every step draws afresh
    assert ranks[0].unique().numel() > 0.9 * size * 40


# Cuts through groups: one rank a block of its own, three ranks in one block, a shard of one token; four
# ranks, and eight that share two blocks, one of them without ids.
@pytest.mark.parametrize(
    "cuts",
    [[0, 77, 256], [0, 3, 70, 256], [0, 129, 130, 256], [0, 60, 128, 200, 256],
     [0, 9, 40, 70, 70, 128, 160, 250, 256]],
    ids=str,
)  # fmt: skip
def test_distribution_over_shards_that_cut_groups(cuts: list[int]) -> None:
    ways = [("candidates", "grouped"), ("log_mass", "grouped"), ("candidates", "element")]
    for way, p in zip(ways, p_values(cuts, ways, broken=False), strict=True):
        assert p > 1e-3, way


def test_shared_words_in_a_cut_group_would_be_seen() -> None:
    assert p_values([0, 77, 256], [("candidates", "grouped")], broken=True)[0] < 1e-6


def p_values(cuts: list[int], ways: list[tuple[str, str]], broken: bool) -> list[float]:
    """Chi-squared p-value of 20,000 draws of one row for each (exchange, noise); equal on every rank."""
    ranks = run_ranks(len(cuts) - 1, rank_jobs.chi_counts, cuts, ways, broken)
    for other in ranks[1:]:
        assert torch.equal(other, ranks[0])
    hidden, weight = rank_jobs.exact_head(1, cuts[-1])
    expected = torch.softmax((hidden @ weight.t())[0].double(), 0) * 20_000
    big = expected > 5
    wanted = torch.cat([expected[big], expected[~big].sum()[None]])
    found = []
    for counts in ranks[0].double():
        observed = torch.cat([counts[big], counts[~big].sum()[None]])
        statistic = float(((observed - wanted) ** 2 / wanted.clamp(min=1e-9)).sum())
        found.append(float(stats.chi2.sf(statistic, int(big.sum()))))
    return found


@pytest.mark.parametrize(
    "size, lost, how, timeout_s", [(3, 1, "dies", 60), (2, 0, "dies", 60), (3, 1, "stays away", 3)]
)
def test_a_lost_rank_is_named_within_the_timeout(size: int, lost: int, how: str, timeout_s: float) -> None:
    ranks = run_ranks(size, rank_jobs.lose_one, lost, how, timeout_s=timeout_s)
    assert ranks.pop(lost) == (LOST if how == "dies" else "woke up")
    said = f"rank {lost} did not arrive at fsample call 2 on a group of {size} ranks"
    for message, seconds in ranks:
        assert message.startswith(said), message
        assert seconds < timeout_s + 5


def test_a_rank_lost_before_a_new_call_is_named_on_any_backend() -> None:
    first, gone, third = run_ranks(3, rank_jobs.lose_one_before_a_new_call, timeout_s=2)
    assert gone == LOST
    for message in (*first, *third):
        assert message.startswith("rank 1 did not arrive at fsample call 2 on a group of 3 ranks"), message


def test_a_store_that_dies_with_rank_0_is_an_error_of_ranks() -> None:
    gone, said = run_ranks(2, rank_jobs.lose_the_store, timeout_s=20, tcp=True)
    assert gone == LOST and not isinstance(said, Exception) and len(said) >= 3, said
    for message in said:
        assert re.match("fsample call . on a group of 2 ranks failed, and so did the store", message), message


@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.parametrize("what", ["a value", "a shape", "a name", "a kind", "memory"])
def test_a_rank_that_ends_a_call_alone_makes_no_other(what: str, compared: bool) -> None:
    """Else its next words would be taken for those that the others still wait for."""
    others, (own, after) = run_ranks(2, rank_jobs.refuse_alone, what, compared, timeout_s=2)
    assert own == ("MemoryError" if what == "memory" else "ValueError")
    assert after.startswith("an earlier call of rank 1 ended before its exchange, not so on every rank")
    for message in others:
        assert message.startswith("rank 1 ended fsample call "), message


def test_ranks_that_refuse_alike_go_on_however_late_one_is() -> None:
    hidden, weight = rank_jobs.exact_head(4, 256)
    for ids in run_ranks(2, rank_jobs.refuse_alike, timeout_s=15):
        assert torch.equal(ids, sample(hidden, weight, seed=1).ids)


def test_refusals_of_two_calls_are_not_one_that_all_share() -> None:
    _, said = run_ranks(2, rank_jobs.refuse_different_calls, timeout_s=2)
    assert said.startswith("an earlier call of rank 1 ended before its exchange"), said


def test_a_rank_that_hears_of_a_loss_is_not_named_for_it() -> None:
    *others, gone = run_ranks(3, rank_jobs.lose_one_within_a_call, False)
    assert gone == LOST
    for first, second, _ in others:
        assert second == first
        assert first.startswith("a rank of the group of 3 was lost during fsample call 2"), first


def test_a_rank_that_refused_alone_hears_of_it_when_another_fails() -> None:
    (first, _, _), (own, after, seconds), gone = run_ranks(3, rank_jobs.lose_one_within_a_call, True)
    assert gone == LOST and own.startswith("logit_bias")
    assert first.startswith("rank 1 ended fsample call 2 on a group of 3 ranks before the exchange"), first
    assert after.startswith("an earlier call of rank 1 ended before its exchange") and seconds < 30, after


def test_two_ranks_of_nccl_on_one_gpu_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("ncclInvalidUsage: ... Duplicate GPU detected : rank 0 and rank 1 both on 1b000")

    monkeypatch.setattr(Team, "_say", lambda *_: None)  # there is no store
    team = Team.__new__(Team)
    team.size = 2
    with pytest.raises(distributed.RankError, match="^two ranks of the group of 2 use one GPU, and NCCL"):
        team._collective(refuse)
    assert team.failed


@pytest.mark.parametrize(
    "backend, reason", [("gloo", "a group of gloo"), ("nccl", "a call must be made once")]
)
def test_a_capture_that_ranks_would_have_to_compare_in(
    monkeypatch: pytest.MonkeyPatch, backend: str, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    weight = torch.zeros(4, 8)
    on_a_gpu = SimpleNamespace(
        storage_offset=weight.storage_offset, stride=weight.stride, untyped_storage=weight.untyped_storage,
        device=torch.device("cuda", 0), is_cuda=True,
    )  # fmt: skip
    team = SimpleNamespace(agreed={}, backend=backend)
    with pytest.raises(ValueError, match=f"^{reason}"):
        shards.agree(cast(Team, team), (1, 2, 3, 4), cast(Tensor, on_a_gpu))


@pytest.mark.parametrize(
    "backend, timeout_s, said",
    [
        ("gloo", 20, "a rank of the group of 2 was lost during fsample call 1"),
        ("nccl", 2, "rank 1 did not arrive at fsample call 1"),
    ],
)
def test_a_rank_that_dies_while_it_compiles_is_an_error_of_ranks(
    backend: str, timeout_s: float, said: str
) -> None:
    ranks = run_ranks(2, rank_jobs.lose_one_that_compiles, backend, timeout_s=timeout_s)
    assert ranks[1] == LOST
    assert ranks[0].startswith(said) and ("backend says" in ranks[0]) == (backend == "gloo"), ranks[0]


DISAGREEMENTS = {
    "B": "rows B of hidden must be the same on every rank, got rank 0: 4, rank 1: 8",
    "dtype": "dtype must be the same",
    "seed": r"seed must be the same on every rank, got rank 0: 1, rank 1: 2",
    "unseeded": "seed must be the same on every rank, got rank 0: values on the host, rank 1: none",
    "position": "position must be the same on every rank, got rank 0: 0, rank 1: 5",
    "temperature": "temperature must be the same on every rank, got rank 0: 1.0, rank 1: 0.5",
    "temperatures": "temperature must be .* got rank 0: values on the host, rank 1: float32 tensor .4.",
    "temperatures' shape": "temperature must be .* rank 0: float32 tensor .4., rank 1: float32 tensor .3.",
    "math": "math must be the same on every rank, got rank 0: fast, rank 1: exact",
    "store_logits": "store_logits must be the same on every rank, got rank 0: False, rank 1: True",
    "exchange": "exchange must be the same",
    "want_lse": "want_lse must be the same",
    "first_id": "first_id of rank 1 must be 128, .* got 100",
    "weight_shard's dtype": "dtype of weight_shard must be .*, got rank 0: float32, rank 1: bfloat16",
    "weight_shard's D": "D of weight_shard must be the same on every rank, got rank 0: 16, rank 1: 15",
    "logit_scale": "logit_scale must be the same",
    "softcap": "softcap must be the same",
    "head_bias": "head_bias must be the same .*, got rank 0: none, rank 1: float32 tensor of weight_shard's",
    "head_bias's rows": "head_bias must be .* of weight_shard's rows, rank 1: float32 tensor not of",
    "logit_bias": "logit_bias must be the same",
    "logit_bias's shape": "logit_bias must be .* rank 0: float32 tensor .4, 256., rank 1: .* .4, 200.",
    "mask": "mask must be the same on every rank, got rank 0: none, rank 1: bool tensor .256.",
    "mask's width": "mask must be .* rank 0: bool tensor .256., rank 1: bool tensor .200.",
    "implementation": "implementation must be the same on every rank, got rank 0: auto, rank 1: reference",
    "rows for hopper": "whether implementation='hopper' can read weight_shard .* 0: True, rank 1: False",
    "p2p": "exchange must be the same on every rank, got rank 0: auto, rank 1: p2p",
}


def test_ranks_that_disagree_all_say_so_and_go_on() -> None:
    for messages in run_ranks(2, rank_jobs.disagree, list(DISAGREEMENTS)):
        assert messages.pop() == "still in step"
        for message, pattern in zip(messages, DISAGREEMENTS.values(), strict=True):
            assert re.match(pattern, message), message


def test_a_group_with_the_name_of_an_earlier_one_compares_anew() -> None:
    """As on a GPU, where a group compares what it has not seen: another group has other shards."""
    _, first, second = run_ranks(3, rank_jobs.regroup)
    hidden, weight = rank_jobs.exact_head(4, 384)
    for before, name, after, new_name, gone in (first, second):
        assert name == new_name
        assert gone  # a group of gloo that outlives its process's modules ends it with SIGABRT
        assert torch.equal(before, sample(hidden, weight, seed=1).ids)
        assert torch.equal(after, sample(hidden, weight[128:], seed=1).ids)


def test_what_was_compared_is_compared_again_when_an_option_changes() -> None:
    """As on a GPU: nothing is gathered again for the same call, and once for each that differs."""
    counts = run_ranks(2, rank_jobs.count_comparisons)
    assert counts[0] == counts[1] == [1, 0, 0] + [1, 0] * 22


def test_a_call_that_was_refused_is_not_made() -> None:
    """Its kernels are not compiled: the next of its kind is the one before which ranks meet."""
    assert run_ranks(2, rank_jobs.made_after_a_refusal) == [[False, True, True]] * 2


def test_several_groups_in_one_process() -> None:
    ranks = run_ranks(4, rank_jobs.in_groups)
    hidden, weight = rank_jobs.exact_head(5, 512)
    for rank, results in enumerate(ranks):
        assert not isinstance(results, Exception), results
        for position in range(20):
            own, across = results[2 * position : 2 * position + 2]
            assert torch.equal(own, sample(hidden, weight, seed=rank // 2, position=position).ids)
            if rank in (1, 3):
                assert torch.equal(across, sample(hidden, weight, seed=9, position=position).ids)


def test_ids_beyond_the_integers_of_fp32() -> None:
    assert run_ranks(2, rank_jobs.far_id) == [[16_777_217] * 4] * 2


def test_keys_order_scores_then_lower_ids() -> None:
    """Neighbouring fp32 scores of all sizes and signs, zeros, infinities; ids at both ends of their range."""
    ones = torch.tensor([1.0, -1.0, 3e-39, -3e-39, 1e38, 22.87])
    scores = torch.cat([
        ones, torch.nextafter(ones, torch.tensor(torch.inf)), torch.tensor([0.0, torch.inf, -torch.inf])
    ])  # fmt: skip
    ids = torch.tensor([0, 1, 16_777_216, 16_777_217, 2**31 - 1])
    score, id = scores.repeat_interleave(len(ids)), ids.repeat(len(scores))
    key = words.pack_key(score, id)
    assert torch.equal(words.key_ids(key), id.masked_fill(score.isinf(), -1))
    order = torch.argsort(key, descending=True)
    wanted = sorted(range(len(key)), key=lambda i: (-float(score[i]), int(id[i])))
    assert order.tolist() == wanted
    assert words.pack_key(torch.tensor(-0.0), torch.tensor(5)) == words.pack_key(
        torch.tensor(0.0), torch.tensor(5)
    )
    bad, none = words.pack_key(torch.tensor([torch.inf, -torch.inf]), torch.tensor([-1, -1]))
    assert bad > key.max() and words.key_ids(bad) == words.key_ids(none) == -1
    lowest = words.pack_key(torch.tensor(-3.4e38), torch.tensor(2**31 - 1))
    assert none < lowest


def test_halves_of_words_come_back() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -1.5, torch.inf, -torch.inf, 3e-39])
    ids = torch.tensor([-1, 0, 1, 2**31 - 1, 16_777_217, 5, -1])
    packed = words.pack_words(values, ids)
    assert torch.equal(words.high_bits(packed).view(torch.int32), values.view(torch.int32))
    assert torch.equal(words.low_ids(packed), ids)
    both = words.pack_bits(values, values.flip(0))
    assert torch.equal(words.low_bits(both), values.flip(0)) and torch.equal(words.high_bits(both), values)


def test_without_a_group_it_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        distributed.sample(torch.zeros(1, 4), torch.zeros(4, 4))


def test_a_destroyed_group_is_named() -> None:
    for said in run_ranks(2, rank_jobs.use_a_destroyed_group):
        assert len(said) == 2
        for message in said:
            assert re.match("group must be a process group that is not destroyed, got .*; make", message), (
                said
            )


BAD = [
    ({"exchange": "all"}, "exchange must be one of auto, p2p, p2p_after, candidates, log_mass, got 'all'"),
    ({"exchange": "p2p"}, "exchange='p2p' writes into the memory of GPUs"),
    ({"exchange": "candidates", "noise": "online"}, ".* has none; use 'log_mass'"),
    ({"first_id": -3}, "first_id must be an integer, 0 or above"),
    ({"noise": "gumbel"}, "noise must be one of"),
    ({"implementation": "cuda"}, "implementation must be one of"),
    (
        {"implementation": "hopper"},
        "implementation='hopper' needs .* multiples of 128, that of rank 1 .* 150",
    ),
    ({"head_bias": torch.zeros(200)}, r"head_bias must have shape \[150\]"),
    ({"vocab_size": 301}, r"vocab_size must be in \[1, V\] with V = 300"),
    ({"mask": torch.ones(150, dtype=torch.bool)}, ".*300 columns"),
    ({"num_samples": 2.5}, "num_samples must be an integer"),
    ({"temperature": "hot"}, "temperature must be a finite number"),
    ({"temperature": 10**400}, "temperature must be a finite number"),
    ({"logit_scale": 10**400}, "logit_scale must be a finite number"),
    ({"softcap": float("inf")}, "softcap must be a finite number"),
]


def test_bad_arguments() -> None:
    for messages in run_ranks(2, rank_jobs.bad_arguments, [options for options, _ in BAD]):
        for message, (_, pattern) in zip(messages, BAD, strict=True):
            assert re.match(pattern, message), message
