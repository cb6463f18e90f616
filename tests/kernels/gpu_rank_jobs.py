"""What the ranks of `test_multi_gpu` do, one GPU each."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from fsample_kernels import distributed
from fsample_kernels.distributed.collectives import team_of
from fsample_kernels.ops import hopper_configs, hopper_sample
from fsample_kernels.ops.link import clock
from tests.kernels.rank_jobs import exact_head, part


def draw(rank: int, size: int, cuts: list[int], batch: int, calls: list[dict[str, Any]]) -> list[Any]:
    """Fields of one result a call, on the CPU; the head is exact in bf16."""
    hidden, weight = (x.bfloat16().cuda() for x in exact_head(batch, cuts[-1], 64))
    results = []
    for call in calls:
        options = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in call.items()}
        shard, mine = part(rank, cuts, weight, options)
        result = distributed.sample(hidden, shard.contiguous(), **mine)
        results.append(tuple(x.cpu() if isinstance(x, Tensor) else x for x in result))
    return results


def draw_apart(rank: int, size: int, cuts: list[int], batch: int, options: dict[str, Any]) -> list[Any]:
    """Ids of two calls: by the kernel for Hopper on rank 0 and the portable one on rank 1; by tiles of 256
    ids on rank 0 and of 128 on rank 1."""
    hidden, weight = (x.bfloat16().cuda() for x in exact_head(batch, cuts[-1], 64))
    shard = weight[cuts[rank] : cuts[rank + 1]]
    why_not = hopper_sample.why_not
    with mock.patch.object(hopper_sample, "why_not", lambda problem: "no" if rank else why_not(problem)):
        drawn = [distributed.sample(hidden, shard, **options).ids.cpu()]
    tiles = hopper_configs.UP_TO_128 if rank else hopper_configs.LARGE
    # vocab_size makes it a call of another kind: every rank has compiled its kernel before one waits.
    with mock.patch.object(hopper_sample, "variant", lambda problem: tiles):
        result = distributed.sample(hidden, shard, position=1, vocab_size=cuts[-1], **options)
    assert result.implementation.startswith("hopper") or torch.cuda.get_device_capability() != (9, 0)
    return [*drawn, result.ids.cpu()]


def unseeded(rank: int, size: int, steps: int, exchange: Any) -> Tensor:
    """ids [2 steps, B] of calls without a seed, then of a captured one that is replayed; ranks' generators
    differ."""
    torch.manual_seed(rank)
    hidden = torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda")
    shard = torch.zeros(2048, 64, dtype=torch.bfloat16, device="cuda")

    def step() -> Tensor:
        return distributed.sample(hidden, shard, exchange=exchange).ids[:, 0]

    ids = [step() for _ in range(steps)]
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = step()
    for _ in range(steps):
        graph.replay()
        ids.append(drawn.clone())
    torch.cuda.synchronize()
    distributed.check()
    return torch.stack(ids).cpu()


def grow(rank: int, size: int) -> tuple[int, list[int]]:
    """Calls of 5000 rows, which need a larger link, between replays of a graph of 64 that keeps its own:
    wrong tokens, and the links' capacities."""
    torch.set_default_device("cuda")  # what must lie in the host's memory says so
    V = 4096
    hidden, weight = planted_head(V)
    shard = weight.tensor_split(size)[rank].contiguous()
    seed = torch.zeros((), dtype=torch.int64)
    states, many = hidden[0].clone(), hidden[1, :1].repeat(5000, 1)

    def step(rows: Tensor) -> Tensor:
        return distributed.sample(rows, shard, seed=seed, exchange="p2p").ids

    step(states)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = step(states)
    wrong = 0
    for turn in range(4):
        states.copy_(hidden[turn % 2])
        graph.replay()
        wrong += int((drawn != (7, V - 3)[turn % 2]).sum()) + int((step(many) != V - 3).sum())
    distributed.check()
    return wrong, [link.capacity for link in team_of(None).links]


def in_two_groups(rank: int, size: int, steps: int) -> int:
    """Steps of two groups of the same ranks side by side, a stream each; wrong tokens."""
    hidden, weight = planted_head(8192)
    shard = weight.tensor_split(size)[rank].contiguous()
    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    streams = [torch.cuda.Stream() for _ in groups]  # type: ignore[no-untyped-call]
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")

    def step(which: int, state: int) -> None:
        ids = distributed.sample(hidden[state], shard, seed=seed, exchange="p2p", group=groups[which]).ids
        wrong[which] += (ids != (7, 8192 - 3)[state]).sum()

    for which in (0, 1):  # links are opened one after the other
        with torch.cuda.stream(streams[which]):
            step(which, 0)
        torch.cuda.synchronize()
    for number in range(steps):
        for which in (0, 1):
            with torch.cuda.stream(streams[which]):
                step(which, (number + which) % 2)
    torch.cuda.synchronize()
    for group in groups:
        distributed.check(group)
    return int(wrong.sum())


def start_cold(rank: int, size: int, limit_s: float) -> list[int]:
    """First calls of a rank that compiles, its cache of kernels empty, and of one that has them all."""
    from fsample_kernels.distributed import p2p

    p2p.LIMIT_S = limit_s
    hidden, weight = planted_head(4096)
    shard = weight.tensor_split(size)[rank].contiguous()
    with tempfile.TemporaryDirectory() as empty:
        if rank == 1:
            os.environ["TRITON_CACHE_DIR"] = empty
        ids = [distributed.sample(hidden[0, :B], shard, seed=1, exchange="p2p").ids for B in (1, 64)]
        ids.append(distributed.sample(hidden[1].repeat(2, 1), shard, seed=1, exchange="p2p_after").ids)
        torch.cuda.synchronize()
    distributed.check()
    return sorted({int(id) for drawn in ids for id in drawn.flatten()})


def hold_up(cycles: int) -> None:
    """Keep the device busy before what is queued next."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def planted_head(V: int) -> tuple[Tensor, Tensor]:
    """A weight whose columns 0 and 1 put all mass on ids 7 and V - 3; two hidden states that pick one."""
    weight = torch.zeros(V, 64, dtype=torch.bfloat16, device="cuda")
    weight[7, 0] = weight[V - 3, 1] = 120.0
    hidden = torch.zeros(2, 64, 64, dtype=torch.bfloat16, device="cuda")
    hidden[0, :, 0] = hidden[1, :, 1] = 1.0
    return hidden, weight


@triton.jit
def random_delay(delays_ptr, step_ptr, num_steps):  # type: ignore[no-untyped-def]
    """Keep the device busy for as many nanoseconds as the step's entry says, and count the step."""
    step = tl.load(step_ptr)
    wanted = tl.load(delays_ptr + step % num_steps)
    spins = tl.full((), 0, tl.int64)
    start = clock(spins, True)
    while clock(spins, True) - start < wanted:
        spins += 1
    tl.store(step_ptr, step + 1)


STEPS_A_GRAPH = 100


def alternate(rank: int, size: int, V: int, steps: int, exchange: Any) -> tuple[int, int]:
    """Back-to-back steps whose winner and whose delays are random: (steps made, wrong tokens seen).

    Graphs of many steps keep the host out of it. The winner of a step comes from a table on the device, the
    same on every rank; a rank is held up for up to 100 us before every fifth step or so, each at its own.
    """
    hidden, weight = planted_head(V)
    shard = weight.tensor_split(size)[rank].contiguous()
    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    made = torch.zeros(1, dtype=torch.int64, device="cuda")
    rows = 65_537  # a prime: what meets what in a graph is new in every replay
    states = torch.randint(2, (rows,), generator=torch.Generator().manual_seed(9)).cuda()
    own = torch.Generator().manual_seed(rank)
    waits = torch.randint(1, 100_000, (rows,), generator=own) * (torch.rand(rows, generator=own) < 0.2)
    delays = waits.cuda()
    winners = torch.tensor([7, V - 3], device="cuda")

    def one_step() -> None:
        state = states.index_select(0, made % rows)
        random_delay[(1,)](delays, made, rows)
        chosen = hidden.index_select(0, state)[0]
        ids = distributed.sample(chosen, shard, seed=seed, exchange=exchange).ids
        wrong.add_((ids != winners.index_select(0, state)).sum())

    one_step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS_A_GRAPH):
            one_step()
    for _ in range(-(-steps // STEPS_A_GRAPH)):
        graph.replay()
    torch.cuda.synchronize()
    distributed.check()
    return int(made) - 1, int(wrong)


def replay(rank: int, size: int, V: int, replays: int, exchange: Any) -> list[int]:
    """Graphs of three steps replayed with rank 1 held up; wrong tokens, and distinct draws of a flat head."""
    hidden, weight = planted_head(V)
    shard = weight.tensor_split(size)[rank].contiguous()
    flat = torch.zeros_like(shard)
    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    position = torch.zeros((), dtype=torch.int64, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def steps() -> Tensor:
        for state, id in ((0, 7), (1, V - 3)):
            ids = distributed.sample(hidden[state], shard, seed=seed, exchange=exchange).ids
            wrong.add_((ids != id).sum())
        return distributed.sample(hidden[0], flat, seed=seed, position=position, exchange=exchange).ids

    steps()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = steps()
    seen = []
    for number in range(replays):
        position.fill_(number)
        if rank == 1:
            hold_up(100_000)
        graph.replay()
        seen.append(drawn.clone())
    torch.cuda.synchronize()
    distributed.check()
    return [int(wrong), len({tuple(ids.flatten().tolist()) for ids in seen}), int(torch.stack(seen).sum())]


def stay_away(rank: int, size: int, limit_s: float) -> Any:
    """Rank 1 misses a step; what rank 0 hears at the call after it, and when."""
    from fsample_kernels.distributed import p2p

    p2p.LIMIT_S = limit_s
    hidden, weight = planted_head(4096)
    shard = weight.tensor_split(size)[rank].contiguous()
    distributed.sample(hidden[0], shard, seed=1, exchange="p2p")
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(limit_s + 5)
        return "woke up"
    start = time.monotonic()
    ids = distributed.sample(hidden[0], shard, seed=1, exchange="p2p").ids
    torch.cuda.synchronize()
    try:
        distributed.check()
    except distributed.RankError as error:
        return str(error), time.monotonic() - start, sorted(set(ids.flatten().tolist()))
    return "no error"
