"""Any arguments at all, as in `test_properties`, of what ranks call: `distributed.sample`, `check`, merging.

FSAMPLE_EXAMPLES=10000 draws half as many calls of each function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from fsample_kernels import distributed, noise, sample
from fsample_kernels.distributed import Merged, merge_log_mass
from fsample_kernels.types import SampleResult
from tests.kernels.any_arguments import (
    HEAD_OPTIONS,
    MERGE_WRONG,
    PROFILE,
    RUBBISH,
    SHARD_OPTIONS,
    VALUES,
    WRONG,
    Call,
    calls,
    check_refusal,
    each_alone,
    per_row,
    position,
    seed,
)

MASSES = [0.0, -200.0, 3.0, 4.0, 77.0, 1e30, 3e38, -3e38, math.inf, -math.inf, -math.inf, math.nan]


@st.composite
def merges(draw: Callable[..., Any]) -> Call:
    """Calls of `merge_log_mass`: ids that name their rank, but for some that are below 0."""
    R, B, K = draw(st.integers(1, 5)), draw(st.integers(0, 4)), draw(st.integers(0, 3))
    ids = torch.arange(R * B * K).view(R, B, K) + draw(st.sampled_from([0, 2**31, -3]))
    if draw(st.booleans()):
        lse = torch.randn(R, B, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**20)))) * 3
    else:
        lse = torch.tensor(
            draw(st.lists(st.sampled_from(MASSES), min_size=R * B, max_size=R * B)), dtype=torch.float32
        ).view(R, B)
    options = {
        "seed": seed(draw, B, 0),
        "position": position(draw, B, 0),
        "greedy": draw(st.booleans())
        if draw(st.booleans())
        else per_row(draw, B, [True, False], (torch.bool,)),
    }
    broken = draw(st.sets(st.sampled_from(sorted(MERGE_WRONG)), max_size=2)) if draw(st.booleans()) else set()
    tensors: dict[str, Any] = {"ids": ids, "lse": lse}
    for name in sorted(broken):
        place = tensors if name in tensors else options
        place[name] = draw(RUBBISH | st.sampled_from(MERGE_WRONG[name]))
    return Call(tensors, options, frozenset(broken))


@PROFILE
@given(merges())
def test_merge_log_mass(call: Call) -> None:
    event(check_merge(merge_log_mass, call))


def test_each_wrong_value_of_a_merge_alone() -> None:
    tensors = {"ids": torch.arange(6).view(2, 3, 1), "lse": torch.zeros(2, 3)}
    for call, wrong in each_alone(
        Call(tensors, {"seed": 1, "position": 0, "greedy": False}, frozenset()), MERGE_WRONG, MERGE_WRONG
    ):
        assert check_merge(merge_log_mass, call) == "refused" or not wrong, call


def check_merge(function: Callable[..., Merged], call: Call) -> str:
    """What became of the call, in a word. Raises AssertionError."""
    try:
        merged = function(**call.tensors, **call.options)
    except ValueError as error:
        check_refusal(str(error), call)
        return "refused"
    ids, lse = call.tensors["ids"], call.tensors["lse"]
    _, B, K = ids.shape
    assert merged.ids.shape == merged.rank.shape == (B, K) and merged.lse.shape == (B,)
    assert merged.ids.dtype == merged.rank.dtype == torch.int64 and merged.lse.dtype == torch.float32
    for row in range(B):
        given = {
            name: int(value.expand(B)[row]) if isinstance(value, Tensor) else int(value)
            for name, value in call.options.items()
        }
        numbered = not (isinstance(call.options["seed"], Tensor) and call.options["seed"].dim())
        check_merged_row(merged, row, ids[:, row], lse[:, row].double(), given, row if numbered else 0)
    return "merged"


def check_merged_row(
    merged: Merged, row: int, ids: Tensor, lse: Tensor, given: dict[str, int], number: int
) -> None:
    """ids [R, K], lse [R] float64; the draw worked out from the words of the row, word by word."""
    fp32 = torch.finfo(torch.float32).max
    compared = lse if given["greedy"] else lse * math.log2(math.e)
    compared = torch.where(compared > fp32, torch.inf, torch.where(compared < -fp32, -torch.inf, compared))
    got_ids, got_ranks, total = merged.ids[row].tolist(), merged.rank[row].tolist(), merged.lse[row].double()
    if not 0 <= given["position"] < 2**32 or bool((compared.isnan() | (compared == torch.inf)).any()):
        assert set(got_ids + got_ranks) <= {-1} and total.isnan()
        return
    if bool((compared == -torch.inf).all()):
        assert set(got_ids + got_ranks) <= {-1} and total == -torch.inf
        return
    kept = lse.masked_fill(compared == -torch.inf, -torch.inf)
    expected = kept.amax() if given["greedy"] else torch.logsumexp(kept, 0)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    word = given["seed"] % 2**64
    for k in range(ids.shape[1]):
        r0, r1, _, _ = noise.philox(
            torch.arange(len(lse)), given["position"], k, noise.RANK << 24 | number, word % 2**32, word >> 32
        )
        u = (r0.double() + (r1.double() + 0.5) * 2.0**-32) * 2.0**-32
        score = compared if given["greedy"] else compared - (-torch.log1p(-u.clamp(max=1 - 2.0**-53))).log2()
        best = [int(score.argmax())]
        if not given["greedy"]:  # rounding may decide between scores that are equal in fp32
            near = 2.0**-21 * (float(compared.masked_fill(compared == -torch.inf, 0).abs().max()) + 64)
            best = (score >= score.max() - near).nonzero()[:, 0].tolist()
        right = [(int(ids[r, k]), r) if ids[r, k] >= 0 else (-1, -1) for r in best]
        assert (got_ids[k], got_ranks[k]) in right


def test_the_checks_can_fail() -> None:
    call = Call(
        {"ids": torch.arange(2 * 30).view(2, 3, 10), "lse": torch.zeros(2, 3)},
        {"seed": 1, "position": torch.tensor([5, -1, 2**32]), "greedy": torch.tensor([False, True, False])},
        frozenset(),
    )
    assert check_merge(merge_log_mass, call) == "merged"
    right = merge_log_mass(**call.tensors, **call.options)
    for wrong in (
        right._replace(ids=right.ids + 1), right._replace(ids=right.ids.clamp(min=0)),
        right._replace(ids=right.ids.roll(1, 1)), right._replace(rank=1 - right.rank),
        right._replace(lse=right.lse + 0.001), right._replace(lse=right.lse.nan_to_num(0)),
    ):  # fmt: skip

        def merge(wrong: Merged = wrong, **arguments: Any) -> Merged:
            return wrong

        with pytest.raises(AssertionError):
            check_merge(merge, call)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@PROFILE
@given(calls(head=True, more=SHARD_OPTIONS))
def test_distributed_sample(call: Call) -> None:
    event(check_one_rank(distributed.sample, call))


@pytest.mark.usefixtures("group")
def test_each_wrong_value_of_a_rank_alone() -> None:
    plain = Call({"hidden": torch.randn(2, 8), "weight": torch.randn(9, 8)}, {"seed": 1}, frozenset())
    for call, wrong in each_alone(plain, {*plain.tensors, *HEAD_OPTIONS, *SHARD_OPTIONS}):
        assert check_one_rank(distributed.sample, call) == "refused" or not wrong, call


def check_one_rank(function: Callable[..., SampleResult], call: Call) -> str:
    """Beside `test_sample`: a group of one rank draws what `sample` draws, and refuses what it refuses."""
    own = {name: value for name, value in call.options.items() if name in SHARD_OPTIONS}
    shared = {name: value for name, value in call.options.items() if name not in SHARD_OPTIONS}
    hidden, weight = call.tensors["hidden"], call.tensors["weight"]
    torch.manual_seed(1)  # of a call without a seed
    try:
        got = function(hidden, weight, **own, **shared)
    except ValueError as error:
        blamed = {"weight_shard" if name == "weight" else name for name in call.broken}
        if "exchange" in own:
            blamed.add("exchange")  # "candidates" does not go with noise="online"
        check_refusal(str(error), call._replace(broken=frozenset(blamed)))
        if "exchange" not in str(error) and not call.broken & set(SHARD_OPTIONS):
            with pytest.raises(ValueError):
                sample(hidden, weight, **shared)
        return "refused"
    torch.manual_seed(1)
    want = sample(hidden, weight, **shared)
    assert torch.equal(got.ids, want.ids)
    for field in ("logprob", "lse", "logits"):
        mine, theirs = getattr(got, field), getattr(want, field)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4, equal_nan=True)
    return "drawn"


@pytest.mark.usefixtures("group")
def test_distributed_check() -> None:
    distributed.check(None)
    for value in [*VALUES, *WRONG["group"]]:
        if value is not None:
            with pytest.raises(ValueError, match="^group must"):
                distributed.check(value)
