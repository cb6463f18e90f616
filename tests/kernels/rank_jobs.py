"""What the ranks of `test_distributed` do: jobs for `ranks.run_ranks`."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import weakref
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fsample_kernels import CheckError, api, checked, distributed, noise, sample
from fsample_kernels.distributed import collectives, exchanges, shards
from fsample_kernels.distributed.collectives import Team

Options = dict[str, Any]


def exact_head(B: int, V: int, D: int = 16) -> tuple[Tensor, Tensor]:
    """hidden [B, D], weight [V, D] whose logits are exact in fp32 whatever the order of the sums."""
    generator = torch.Generator().manual_seed(1000 * B + V)
    hidden = torch.randint(-2, 3, (B, D), generator=generator).float()
    return hidden, torch.randint(-8, 9, (V, D), generator=generator) / 8


def part(rank: int, cuts: list[int], weight: Tensor, options: Options) -> tuple[Tensor, Options]:
    """The rank's rows of the head, and options with its part of the head bias."""
    rows = slice(cuts[rank], cuts[rank + 1])
    bias = options.get("head_bias")
    return weight[rows], options if bias is None else options | {"head_bias": bias[rows]}


def draw(
    rank: int, size: int, cuts: list[int], hidden: Tensor, weight: Tensor, calls: list[Options]
) -> list[Any]:
    """One result a call: every field of a SampleResult, and which shard of the logits it is."""
    results = []
    for options in calls:
        shard, mine = part(rank, cuts, weight, options)
        given = mine.pop("hidden", hidden)
        results.append(tuple(distributed.sample(given, shard, **mine)))
    return results


def chi_counts(rank: int, size: int, cuts: list[int], ways: list[tuple[str, str]], broken: bool) -> Tensor:
    """Counts [ways, V] of the ids of one row; `broken` draws cut groups from shared words."""
    if broken:
        noise.group_domain = lambda group, first_id: noise.GROUP
    hidden, weight = exact_head(1, cuts[-1])
    counts = torch.zeros(len(ways), cuts[-1], dtype=torch.int64)
    for way, (exchange, algorithm) in enumerate(ways):
        options: Options = {"exchange": exchange, "noise": algorithm, "num_samples": 4000, "seed": 3}
        for position in range(5):
            result = distributed.sample(
                hidden, weight[cuts[rank] : cuts[rank + 1]], position=position, **options
            )
            counts[way] += torch.bincount(result.ids[0], minlength=cuts[-1])
    return counts


def unseeded(rank: int, size: int, steps: int, exchange: Any) -> Tensor:
    """ids [steps, B] of unseeded calls, each rank's own generator elsewhere."""
    torch.manual_seed(rank)
    hidden, weight = torch.zeros(64, 4), torch.zeros(size * 40, 4)
    shard = weight.tensor_split(size)[rank]
    return torch.stack([
        distributed.sample(hidden, shard, exchange=exchange).ids[:, 0] for _ in range(steps)
    ])  # fmt: skip


def lose_one(rank: int, size: int, lost: int, how: str) -> Any:
    """Two calls; one rank dies or stays away before the second. Returns (message, seconds it took)."""
    hidden, weight = exact_head(3, 300)
    shard = weight.tensor_split(size)[rank]
    distributed.sample(hidden, shard, seed=1)
    if rank == lost:
        if how == "dies":
            os._exit(3)
        time.sleep(6)
        return "woke up"
    start = time.monotonic()
    try:
        distributed.sample(hidden, shard, seed=1, position=1)
    except distributed.RankError as error:
        return str(error), time.monotonic() - start
    return "no error"


def lose_one_before_a_new_call(rank: int, size: int) -> list[str]:
    """As on a GPU, where a collective waits for a rank and tells nobody: what the others hear, twice."""
    hidden, weight = exact_head(3, 300)
    shard = weight.tensor_split(size)[rank]
    with as_on_a_gpu():
        distributed.sample(hidden, shard, seed=1)
        if rank == 1:
            os._exit(3)
        with mock.patch.object(Team, "gather", side_effect=AssertionError("it would wait for ever")):
            return [rank_error(hidden, shard, {"seed": 1, "num_samples": 2}) for _ in range(2)]


def lose_the_store(rank: int, size: int) -> list[str]:
    """Rank 0, which hosts the store, dies: what the next call and the next steps of the others say."""
    hidden, weight = exact_head(3, 300)
    shard = weight.tensor_split(size)[rank]
    distributed.sample(hidden, shard, seed=1)
    if rank == 0:
        os._exit(3)
    time.sleep(0.5)
    said = [rank_error(hidden, shard, {"seed": 1, "position": 1})]
    for step in (Team.arrive, Team.arrive, Team.meet):
        try:
            step(collectives.team_of(None))
        except distributed.RankError as error:
            said.append(str(error))
    return said


def rank_error(hidden: Tensor, shard: Tensor, options: Options) -> str:
    try:
        return str(distributed.sample(hidden, shard, **options))
    except distributed.RankError as error:
        return str(error)


def refuse_alone(rank: int, size: int, what: str, compared: bool) -> list[str]:
    """A call that rank 1 alone ends early, for what ranks do not compare, before they do, or out of memory;
    then the next one. `compared`: at every call, or as on a GPU."""
    hidden, weight = exact_head(4, 256)
    shard = weight.tensor_split(size)[rank]
    odd = rank == 1
    same: Options = {"seed": 1, "logit_bias": {5: 1.0}}
    changes: dict[str, Options] = {
        "a value": {"logit_bias": {5: torch.inf}},
        "a name": {"noise": "gumbel"},
        "a kind": {"exchange": "all"},
    }
    options = same | (changes.get(what, {}) if odd else {})
    states = hidden[0] if odd and what == "a shape" else hidden
    said = []
    with contextlib.nullcontext() if compared else as_on_a_gpu():
        distributed.sample(hidden, shard, position=torch.tensor(0), **same)
        broken = odd and what == "memory"
        with (
            mock.patch.object(api, "choose", side_effect=MemoryError) if broken else contextlib.nullcontext()
        ):
            try:
                said.append(rank_error(states, shard, {**options, "position": torch.tensor(1)}))
            except (ValueError, MemoryError) as error:
                said.append(type(error).__name__)
        said.append(rank_error(hidden, shard, {**same, "position": torch.tensor(2)}))
    return said


def refuse_alike(rank: int, size: int) -> Any:
    """As on a GPU, calls that all ranks refuse: after ranks have compared, before, and as they compare; rank
    1's host is late each time. Then ids of the next one."""
    hidden, weight = exact_head(4, 256)
    shard = weight.tensor_split(size)[rank]
    collectives.GRACE_S = 0.1
    refused: list[Options] = [{"temperature": -1.0}, {"noise": "gumbel"}, {"num_samples": 2 + rank}]
    with as_on_a_gpu():
        distributed.sample(hidden, shard, seed=1)
        for options in refused:
            time.sleep(0.5 * rank)
            assert "must be" in complaint(hidden, shard, {"seed": 1, **options})
        return distributed.sample(hidden, shard, seed=1).ids


def refuse_different_calls(rank: int, size: int) -> str:
    """Rank 1 refuses a call that rank 0 made without waiting for it, and rank 0 the next one."""
    team = collectives.team_of(None)
    for _ in range(2 - rank):
        team.begin()
    team.refuse(ValueError("position must be"))
    try:
        team.begin()
    except distributed.RankError as error:
        return str(error)
    return "went on"


def lose_one_within_a_call(rank: int, size: int, refused: bool) -> tuple[str, str, float]:
    """The last rank dies after ranks have compared, where rank 1 may have refused the call alone: what this
    call and the next say, and the seconds both took. Hosts do not find out at the same time."""
    hidden, weight = exact_head(4, 128 * size)
    shard = weight.tensor_split(size)[rank]
    run = exchanges.run

    def dying(*arguments: Any, **options: Any) -> Any:
        if rank == size - 1:
            time.sleep(2.0 * refused)  # rank 1 has said so by then, or nobody could name it
            os._exit(3)
        time.sleep(0.5 * rank)
        return run(*arguments, **options)

    distributed.sample(hidden, shard, seed=1)
    bias = {5: torch.inf if refused and rank == 1 else 1.0}
    start = time.monotonic()
    with mock.patch.object(exchanges, "run", dying):
        try:
            first = rank_error(hidden, shard, {"seed": 1, "logit_bias": bias})
        except ValueError as error:
            first = str(error)
    return first, rank_error(hidden, shard, {"seed": 1}), time.monotonic() - start


def lose_one_that_compiles(rank: int, size: int, backend: str) -> str:
    """Rank 1 dies where ranks wait for each other's kernels before the first exchange on a GPU."""
    team = collectives.team_of(None)
    team.begin()
    team.arrive()
    team.gather(torch.zeros(1, dtype=torch.int64))
    team.backend = dist.Backend(backend)  # the name alone: what it does where NCCL would wait for ever
    if rank == 1:
        os._exit(3)
    try:
        team.barrier()
    except distributed.RankError as error:
        return str(error)
    return "no error"


def disagree(rank: int, size: int, cases: list[str]) -> list[str]:
    """Rank 1 differs from the others in one argument; what each case says, and whether all can go on."""
    messages = []
    for what in cases:
        hidden, weight = exact_head(4, 256)
        shard = weight.tensor_split(size)[rank]
        elsewhere: dict[str, Options] = {
            "mask's width": {"mask": torch.ones(256, dtype=torch.bool)},
            "logit_bias's shape": {"logit_bias": torch.zeros(4, 256)},
            "head_bias's rows": {"head_bias": torch.zeros(128)},
            "temperatures' shape": {"temperature": torch.ones(4)},
            "rows for hopper": {"implementation": "hopper"},
        }
        options: Options = {"seed": 1, **elsewhere.get(what, {})}
        if rank == 1:
            if what == "rows for hopper":
                shard = torch.zeros(128, 17)[:, :-1]
            elif what == "B":
                hidden = torch.zeros(8, 16)
            elif what == "dtype":
                hidden, shard = hidden.bfloat16(), shard.bfloat16()
            elif what == "weight_shard's dtype":
                shard = shard.bfloat16()
            elif what == "weight_shard's D":
                shard = shard[:, :-1]
            else:
                changes: dict[str, Options] = {
                    "seed": {"seed": 2}, "unseeded": {"seed": None}, "position": {"position": 5},
                    "temperature": {"temperature": 0.5}, "temperatures": {"temperature": torch.ones(4)},
                    "math": {"math": "exact"}, "store_logits": {"store_logits": True},
                    "first_id": {"first_id": 100},
                    "exchange": {"exchange": "log_mass"}, "want_lse": {"want_lse": True},
                    "logit_scale": {"logit_scale": 2}, "softcap": {"softcap": 30.0},
                    "head_bias": {"head_bias": torch.zeros(128)}, "logit_bias": {"logit_bias": {1: 1.0}},
                    "mask": {"mask": torch.ones(256, dtype=torch.bool)},
                    "mask's width": {"mask": torch.ones(200, dtype=torch.bool)},
                    "logit_bias's shape": {"logit_bias": torch.zeros(4, 200)},
                    "head_bias's rows": {"head_bias": torch.zeros(100)},
                    "temperatures' shape": {"temperature": torch.ones(3)},
                    "implementation": {"implementation": "reference"}, "p2p": {"exchange": "p2p"},
                }  # fmt: skip
                options |= changes[what]
        messages.append(complaint(hidden, shard, options))
    hidden, weight = exact_head(4, 256)
    together = distributed.sample(hidden, weight.tensor_split(size)[rank], seed=1).ids
    return [
        *messages,
        "still in step" if torch.equal(together, sample(hidden, weight, seed=1).ids) else "lost",
    ]


def as_on_a_gpu() -> Any:
    """Ranks that compare what they have not seen, and nothing else."""
    return mock.patch.object(shards, "compares_always", lambda team, device: False)


def regroup(rank: int, size: int) -> Any:
    """ids of three ranks, then of the last two as a group of their own with one weight, with its names; and
    whether the first group was gone by then."""
    hidden, weight = exact_head(4, 128 * size)
    shard = weight.tensor_split(size)[rank]
    with as_on_a_gpu():
        before = distributed.sample(hidden, shard, seed=1).ids
        assert dist.group.WORLD is not None
        name, first = dist.group.WORLD.group_name, weakref.ref(dist.group.WORLD)
        store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        if rank == 0:  # hosts nothing: the store is a file
            return None
        dist.destroy_process_group()
        gc.collect()
        gone = first() is None
        again = dist.distributed_c10d.PrefixStore("again", store)
        dist.init_process_group("gloo", store=again, rank=rank - 1, world_size=size - 1)
        assert dist.group.WORLD is not None
        after = distributed.sample(hidden, shard, seed=1).ids
        return before, name, after, dist.group.WORLD.group_name, gone


def use_a_destroyed_group(rank: int, size: int) -> list[str]:
    """What a draw and a check say on a group of both ranks, once it is destroyed; the default one goes on."""
    hidden, weight = exact_head(4, 128 * size)
    shard = weight.tensor_split(size)[rank]
    group = dist.new_group(list(range(size)))
    distributed.sample(hidden, shard, seed=1, group=group)
    dist.destroy_process_group(group)
    said = [complaint(hidden, shard, {"seed": 1, "group": group})]
    try:
        distributed.check(group)
    except ValueError as error:
        said.append(str(error))
    distributed.sample(hidden, shard, seed=1)
    return said


def count_comparisons(rank: int, size: int) -> list[int]:
    """How often ranks compare: at a call, at two other steps of it, then at each change and once more."""
    hidden, weight = exact_head(4, 256)
    shard = weight.tensor_split(size)[rank]
    calls: list[tuple[Tensor, Tensor, Options]] = [
        (hidden, shard, options)
        for options in (
            {}, {"temperature": 0.5, "position": 3}, {"seed": 2}, {"softcap": 3.0}, {"logit_scale": 2.0},
            {"mask": torch.ones(256, dtype=torch.bool)}, {"head_bias": torch.zeros(128)},
            {"logit_bias": torch.zeros(256)}, {"num_samples": 2}, {"vocab_size": 200}, {"want_lse": True},
            {"noise": "element"}, {"seed": None}, {"first_id": 128 * rank}, {"math": "exact"},
            {"store_logits": True}, {"temperature": torch.ones(4)}, {"position": torch.arange(4)},
            {"seed": torch.arange(4)}, {"mask": torch.full((4, 8), -1, dtype=torch.int32)},
            {"logit_bias": {1: 1.0}},
        )
    ]  # fmt: skip
    low = shard.bfloat16()
    calls += [(hidden[:2], shard, {}), (hidden.bfloat16(), low, {}), (hidden, shard.t().clone().t(), {})]
    calls += [(hidden.half(), low.view(torch.float16), {})]  # the same memory
    counts = []
    compare = shards._compare
    with as_on_a_gpu(), mock.patch.object(shards, "_compare", side_effect=compare) as counted:
        for number, (states, weights, options) in enumerate(calls):
            for _ in range(1 if number < 3 else 2):
                before = counted.call_count
                distributed.sample(states, weights, **{"seed": 1, **options})
                counts.append(counted.call_count - before)
    return counts


def made_after_a_refusal(rank: int, size: int) -> list[bool]:
    """Whether a call counts as made: refused by all ranks for a value, made, made again."""
    hidden, weight = exact_head(4, 256)
    shard = weight.tensor_split(size)[rank]
    made = []
    with as_on_a_gpu():
        for temperature in (-1.0, 1.0, 0.5):
            try:
                distributed.sample(hidden, shard, seed=1, temperature=temperature)
            except ValueError:
                pass
            [agreed] = collectives.team_of(None).agreed.values()
            made.append(agreed.made)
    return made


def bad_arguments(rank: int, size: int, cases: list[Options]) -> list[str]:
    """What a head of 300 ids says to each case."""
    hidden, weight = exact_head(2, 300)
    return [complaint(hidden, weight.tensor_split(size)[rank], {"seed": 1, **options}) for options in cases]


def complaint(hidden: Tensor, shard: Tensor, options: Options) -> str:
    try:
        return str(distributed.sample(hidden, shard, **options))
    except ValueError as error:
        return str(error)


def in_groups(rank: int, size: int) -> Any:
    """Two groups of two at the same time, then one across them, on one head; ids of each."""
    hidden, weight = exact_head(5, 512)
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
    across = dist.new_group([3, 1])  # sorted by torch: 1 holds the first half
    ids = []
    for position in range(20):
        own = low if rank < 2 else high
        mine = weight.tensor_split(2)[rank % 2]
        ids.append(distributed.sample(hidden, mine, seed=rank // 2, position=position, group=own).ids)
        if rank in (1, 3):
            half = weight.tensor_split(2)[dist.get_rank(across)]
            ids.append(distributed.sample(hidden, half, seed=9, position=position, group=across).ids)
        else:
            try:
                distributed.sample(hidden, weight, seed=9, group=across)
            except ValueError as error:
                assert "member" in str(error)
                ids.append(torch.empty(0))
    return ids


def repeat(rank: int, size: int, times: int, exchange: Any) -> tuple[int, Tensor]:
    """How many of equal calls gave other bits than the first, and the first's: ids, logprob and lse."""
    hidden, weight = torch.randn(16, 8), torch.randn(400, 8)
    shard = weight.tensor_split(size)[rank]

    def bits() -> Tensor:
        result = distributed.sample(
            hidden, shard, seed=1, exchange=exchange, want_logprob=True, want_lse=True
        )
        assert result.logprob is not None and result.lse is not None
        floats = torch.cat([result.logprob.flatten(), result.lse])
        return torch.cat([result.ids.flatten(), floats.view(torch.int32)])

    first = bits()
    return sum(not torch.equal(bits(), first) for _ in range(times - 1)), first


def far_id(rank: int, size: int) -> list[int]:
    """Token 16777217, which fp32 does not hold, drawn at temperature 1 and 0, through rank 1's offset."""
    first = 16_777_216
    weight = torch.full((first, 1), -1.0, dtype=torch.bfloat16) if rank == 0 else torch.zeros(2, 1)
    weight = weight.bfloat16()
    if rank == 1:
        weight[1] = 64.0
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    found = []
    for exchange in ("candidates", "log_mass"):
        for temperature in (0.0, 1.0):
            result = distributed.sample(hidden, weight, seed=1, temperature=temperature, exchange=exchange)
            found.append(int(result.ids))
    return found


def checked_calls(rank: int, size: int) -> list[str]:
    """What checked calls say: with an id out of range on the last rank, with a bad tensor, and right ones."""
    hidden, weight = exact_head(3, 300)
    shard = weight.tensor_split(size)[rank]
    best_ids = Team.best_ids
    said = []

    def planted(team: Team, keys: Tensor) -> Tensor:
        return best_ids(team, keys) * 0 + 301

    def call(**options: Any) -> None:
        try:
            distributed.sample(hidden, shard, seed=1, **options)
            said.append("drew")
        except (ValueError, CheckError) as error:
            said.append(str(error))

    with checked():
        with mock.patch.object(Team, "best_ids", planted if rank == size - 1 else best_ids):
            call()
        call(temperature=torch.tensor([1.0, -1.0, 1.0]))
        call()
        call(exchange="log_mass", num_samples=3, want_logprob=True, mask=torch.zeros(300, dtype=torch.bool))
    return said
