"""Ranks of one head on one GPU: a stream, a workspace and a link each, and the device code of many GPUs.

What a peer writes through NVLink comes from another SM here: this tests the code and its races, not the
wires. Only the last CTA of a block of rows waits for a peer, one a rank and block; all others end by
themselves. So ranks do not keep each other from running, as long as their streams do run side by side.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsample_kernels.ops import exchange, hopper_sample
from fsample_kernels.ops.link import clock, missed
from fsample_kernels.types import Problem

CAPACITY = 512  # words a rank and step
STEPS_A_GRAPH = 50
UNWRITTEN = -99999
Draw = Callable[[], Tensor]


@triton.jit  # type: ignore[untyped-decorator]
def close_step(  # type: ignore[no-untyped-def]
    drawn_ptr, history_ptr, size, made_ptr, order_ptr, position_ptr, delays_ptr, BLOCK: tl.constexpr
):  # fmt: skip
    """Keep what a step drew, [size] int64; set the position of the next one and hold it up, in ns."""
    step = tl.load(made_ptr)
    i = tl.arange(0, BLOCK)
    drawn = tl.load(drawn_ptr + i, mask=i < size, other=0)
    tl.store(history_ptr + step * size + i, drawn, mask=i < size)
    tl.store(position_ptr, tl.load(order_ptr + step + 1))
    wanted = tl.load(delays_ptr + step)
    spins = tl.full((), 0, tl.int64)
    start = clock(spins, True)
    while clock(spins, True) - start < wanted:
        spins += 1
    tl.store(made_ptr, step + 1)


class Rank:
    """One of `ranks`; its `draw`, set by the test, makes its part of a step at `position` on its stream.

    addresses: of every rank's buffer, [2, R, CAPACITY, 2] int64; order [steps + 1] int64: positions of the
    steps; size: elements that a step draws.
    """

    draw: Draw

    def __init__(self, number: int, addresses: list[int], order: Tensor, size: int) -> None:
        self.number, self.addresses, self.order, self.size = number, addresses, order, size
        self.ranks, steps = len(addresses), len(order) - 1
        self.stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.status = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=True)
        self.link = torch.zeros(6 + self.ranks, dtype=torch.int64, device="cuda")
        self.position = torch.zeros((), dtype=torch.int64, device="cuda")
        self.made = torch.zeros((), dtype=torch.int64, device="cuda")
        self.history = torch.zeros(steps, size, dtype=torch.int64, device="cuda")
        generator = torch.Generator().manual_seed(number)
        kind = torch.rand(steps, generator=generator)
        short = torch.randint(3_000, (steps,), generator=generator)  # to meet in the exchange itself
        long = torch.randint(100_000, (steps,), generator=generator)  # to come steps late
        self.delays = (short * (kind < 0.6) + long * (kind < 0.1)).cuda()

    def start(self, limit_s: float) -> None:
        """As a new link is: epoch 0 is in the buffers, which the caller zeroes."""
        fields = [1, 0, self.status.data_ptr(), self.number, CAPACITY, int(limit_s * 1e9)]
        self.link.copy_(torch.tensor(fields + self.addresses))
        self.status.zero_()
        self.made.zero_()
        self.position.copy_(self.order[0])
        self.history.fill_(UNWRITTEN)

    def step(self) -> None:
        close_step[(1,)](
            self.draw(), self.history, self.size, self.made, self.order, self.position, self.delays,
            triton.next_power_of_2(self.size), num_warps=1,
        )  # fmt: skip

    def by_kernel(self, problem: Problem) -> Draw:
        """exchange="p2p": the kernel that draws sends and waits."""
        return lambda: hopper_sample.run_linked(problem, self.link, self.ranks).ids

    def after_kernel(self, problem: Problem) -> Draw:
        """exchange="p2p_after": a kernel of its own does."""

        def draw() -> Tensor:
            _, keys = hopper_sample.candidates(problem)
            ids = torch.empty_like(keys)
            exchange.exchange(keys, ids, self.link, self.ranks, best=True)
            return ids

        return draw

    def gather(self, table: Tensor) -> Draw:
        """Words of the exchange alone; table [positions, N] int64: this rank's."""

        def draw() -> Tensor:
            words = table.index_select(0, self.position.view(1))
            gathered = words.new_empty(self.ranks, words.numel())
            exchange.exchange(words, gathered, self.link, self.ranks, best=False)
            return gathered

        return draw


class Ranks:
    """All of them. Nothing of theirs runs when a method returns."""

    def __init__(self, count: int, order: Tensor, size: int) -> None:
        self.order = order
        self.buffers = torch.zeros(count, 2, count, CAPACITY, 2, dtype=torch.int64, device="cuda")
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.each = [Rank(number, addresses, order, size) for number in range(count)]

    def start(self, limit_s: float) -> None:
        """Before the first step. What a step needs is compiled, loaded and allocated, which could wait for a
        kernel that waits: every rank has made a step that waited for nobody."""
        for limit in (0.0, limit_s):
            self.buffers.zero_()
            for rank in self.each:
                rank.start(limit)
            torch.cuda.synchronize()
            if limit == 0.0:
                for rank in self.each:
                    with torch.cuda.stream(rank.stream):
                        rank.step()
                    torch.cuda.synchronize()

    def launch(self, steps: int) -> None:
        """Steps launched one by one; a rank's workspace is used again and again."""
        for step in range(steps):
            for rank in self.each[:: 1 if step % 2 else -1]:
                with torch.cuda.stream(rank.stream):
                    rank.step()
        torch.cuda.synchronize()

    def replay(self, steps: int) -> None:
        """Steps in graphs of many, so that they are made back to back."""
        graphs = []
        for rank in self.each:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=rank.stream):
                for _ in range(STEPS_A_GRAPH):
                    rank.step()
        torch.cuda.synchronize()
        for _ in range(steps // STEPS_A_GRAPH):
            for rank, graph in zip(self.each, graphs, strict=True):
                with torch.cuda.stream(rank.stream):
                    graph.replay()
        torch.cuda.synchronize()

    def complaint(self, steps: int, want: Tensor) -> str:
        """ "" where every rank drew want [positions, size] in all steps, else what was wrong and where."""
        expected = want[self.order[:steps]]
        said = [self._complaint(rank, rank.history[:steps], expected) for rank in self.each]
        return "\n".join(line for line in said if line)

    def _complaint(self, rank: Rank, got: Tensor, expected: Tensor) -> str:
        wrong = (got != expected).nonzero()
        lost = missed(int(rank.status))
        if not len(wrong) and lost is None:
            return ""
        steps = int((got != expected).any(1).sum())
        lines = [
            f"rank {rank.number} of {rank.ranks}, {rank.size} words a step: {len(wrong)} wrong in {steps} of "
            f"{len(got)} steps; (rank, epoch) missed {lost}, link words {rank.link[:2].tolist()}"
        ]
        if lost is not None and lost[1] == 1:
            lines.append("missed in the first step: do the streams run side by side?")
        groups = torch.bincount(wrong[:, 1] // 32, minlength=1).tolist()
        lines.append(f"by 32 rows: {groups}")
        for step, row in wrong[:8].tolist():
            lines.append(
                f"step {step} row {row}: got {int(got[step, row])}, want {int(expected[step, row])}, in the "
                f"step before {int(expected[step - 1, row])}; position {int(self.order[step])}, delay "
                f"before it {int(rank.delays[step - 1])} ns"
            )
        return "\n  ".join(lines)
