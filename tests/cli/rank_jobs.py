"""What the ranks of `test_tensor_parallel` do: jobs for `tests.kernels.ranks.run_ranks`."""

from __future__ import annotations

import os
import time

import torch

from fsample_cli import samplers
from fsample_cli.errors import FsampleError
from fsample_cli.launch import Place
from fsample_cli.measure.clocks import make_clock_reader
from fsample_cli.measure.compilations import CompilationCounter
from fsample_cli.measure.compile_ahead import compile_ahead
from fsample_cli.measure.team import Ranks, lost_ranks, same_counts
from fsample_cli.measure.timing import WallStopwatch, time_interleaved
from fsample_cli.samplers import tensor_parallel
from fsample_cli.samplers.flashinfer import FlashInferCompiled
from fsample_kernels import distributed
from tests.kernels.rank_jobs import exact_head


def time_a_slow_rank(rank: int, size: int) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
    """Slowest and fastest times of a call that takes 20 ms more on rank 1; the counts agreed on."""
    counts = same_counts((2 + rank, 5 + 3 * rank))
    timed = time_interleaved(
        [lambda i: time.sleep(0.02 * rank)],
        stopwatch=WallStopwatch(),
        device=torch.device("cpu"),
        warmup=counts[0],
        iterations=counts[1],
        flush=None,
        clock_reader=make_clock_reader("cpu"),
        team=Ranks(Place(rank, size, rank, None)),
    )
    return timed.samples_us[0], timed.fastest_us[0], counts


def lose_a_rank(rank: int, size: int) -> str:
    """What the other rank's command would say."""
    team = Ranks(Place(rank, size, rank, None))
    if rank == 1:
        os._exit(3)
    try:
        with lost_ranks():
            team.agree("")
    except FsampleError as error:
        return error.message
    return "nothing"


def gather_products(rank: int, size: int) -> list[bool]:
    """Whether the gathered logits are the whole product, for vocabularies that split unevenly."""
    equal = []
    for vocab in (1, 300, 512, 129):
        generator = torch.Generator().manual_seed(vocab)
        hidden = torch.randint(-2, 3, (3, 8), generator=generator).float()
        weight = torch.randint(-2, 3, (vocab, 8), generator=generator).float()
        equal.append(torch.equal(tensor_parallel.gathered_product(hidden, weight), hidden @ weight.T))
    return equal


def compile_the_gather(rank: int, size: int) -> list[bool]:
    """Whether FlashInfer's logits, compiled with the gather inside as one whole graph, are the product's over
    T. The code generator has tests of its own; here it is the graph that must be whole.
    """
    hidden, weight = exact_head(4, 300, 8)
    temperature = torch.full((4, 1), 0.5)
    equal = []
    for name in samplers.COMPILED:
        sampler = tensor_parallel.load(name)
        assert isinstance(sampler, FlashInferCompiled)
        compiled = torch.compile(sampler.scaled, fullgraph=True, dynamic=False, backend="eager")
        equal.append(torch.equal(compiled(hidden, weight, temperature), (hidden @ weight.T).float() * 2))
    return equal


def agree_on_notes(rank: int, size: int) -> list[str]:
    team = Ranks(Place(rank, size, rank, None))
    return [team.agree(""), team.agree("no compiler" if rank == 1 else "")]


def head_of_ranks() -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [64, 64] and the whole head [8192, 64], exact in bf16, the same on every GPU."""
    return exact_head(64, 8192, 64)


def compile_then_draw(
    rank: int, size: int
) -> tuple[list[str], list[str], dict[tuple[str, int], torch.Tensor]]:
    """Kernels compiled ahead, what the draws compiled after all, and ids by exchange and batch size."""
    hidden, weight = (x.bfloat16().cuda() for x in head_of_ranks())
    made = {exchange: tensor_parallel.load(f"fused:{exchange}") for exchange in tensor_parallel.EXCHANGES}
    found = compile_ahead(made.values(), [weight], [1, 64], 1.0)
    torch.distributed.barrier()
    with CompilationCounter() as counter:
        drawn = {
            (exchange, batch): sampler.sample(
                hidden[:batch], weight, temperature=1.0, seed=5, position=2
            ).cpu()
            for exchange, sampler in made.items()
            for batch in (1, 64)
        }
    distributed.check()
    return [kernel.kernel for kernel in found.kernels], counter.events, drawn
