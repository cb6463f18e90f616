"""What the ranks of `test_multi_gpu` do, one GPU each."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsample_kernels import distributed
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


def alternate(rank: int, size: int, V: int, steps: int, exchange: Any) -> int:
    """Back-to-back steps with the winner alternating and a rank held up on the device; wrong tokens seen."""
    hidden, weight = planted_head(V)
    shard = weight.tensor_split(size)[rank].contiguous()
    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        if torch.rand((), generator=generator) < 0.2:
            hold_up(int(torch.randint(1, 200_000, (), generator=generator)))
        ids = distributed.sample(hidden[step % 2], shard, seed=seed, exchange=exchange).ids
        wrong += (ids != (7, V - 3)[step % 2]).sum()
    return int(wrong)


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
