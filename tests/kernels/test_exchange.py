"""The kernel that exchanges words between GPUs: its steps in the interpreter, and its instructions compiled.

A process interprets one rank at a time, so what a peer would send is put into its buffer beforehand, or ranks
are processes that share their buffers.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import re
import signal
import sys
import time

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fsample_kernels import words
from fsample_kernels.ops import exchange, link

CAPACITY, RANKS = 700, 3


class Machine:
    """Ranks' buffers in host memory; `own` is the one whose kernel runs."""

    def __init__(self, own: int = 1) -> None:
        self.buffers = [torch.zeros(2, RANKS, CAPACITY, 2, dtype=torch.int64) for _ in range(RANKS)]
        self.status = torch.zeros((), dtype=torch.int64)
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.link = torch.tensor([1, 0, self.status.data_ptr(), own, CAPACITY, 3, *addresses])

    def missed(self) -> tuple[int, int] | None:
        return link.missed(int(self.status))

    def put(self, source: int, target: int, epoch: int, sent: Tensor) -> None:
        halves = torch.stack([sent >> 32, sent], 1) & 0xFFFFFFFF
        self.buffers[target][epoch & 1, source, : len(sent)] = (torch.tensor(epoch) << 32) | halves

    def step(self, sent: Tensor) -> Tensor:
        table = torch.full((RANKS, len(sent)), -99999)
        exchange.exchange(sent, table, self.link, RANKS, best=False)
        return table

    def best(self, sent: Tensor) -> Tensor:
        ids = torch.full((len(sent),), -99999)
        exchange.exchange(sent, ids, self.link, RANKS, best=True)
        return ids


def some_words(n: int, seed: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.interpreter
def test_steps_of_changing_size_meet_and_count_on() -> None:
    """One word, two blocks and a rest, fewer again: old words of the larger step must not be taken."""
    machine = Machine()
    for epoch, n in enumerate((1, 600, 600, 3, 5), start=1):
        own, left, right = (some_words(n, 10 * epoch + rank) for rank in range(3))
        machine.put(0, 1, epoch, left)
        machine.put(2, 1, epoch, right)
        assert torch.equal(machine.step(own), torch.stack([left, own, right]))
        assert machine.link[:2].tolist() == [epoch + 1, 0] and machine.missed() is None
        for target in (0, 2):  # what this rank has written into its peers' memory
            got = machine.buffers[target][epoch & 1, 1, :n]
            assert torch.equal((got[:, 0] << 32) | (got[:, 1] & 0xFFFFFFFF), own)
            assert (got >> 32 == epoch).all()


@pytest.mark.interpreter
def test_a_tag_of_any_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs at which the tag turns negative, and comes round; more blocks of words than programs."""
    monkeypatch.setattr(exchange, "PROGRAMS", 2)
    machine = Machine()
    for start in (2**31 - 1, 2**32 - 1):
        machine.link[0] = start
        for epoch in range(start, start + 3):
            own, left, right = (some_words(600, epoch % 1000 + rank) for rank in range(3))
            machine.put(0, 1, epoch, left)
            machine.put(2, 1, epoch, right)
            assert torch.equal(machine.step(own), torch.stack([left, own, right]))
        machine.step(own)
        assert machine.missed() == (0, start + 3)  # nothing old is taken
        machine.status.zero_()


LENGTHS = (3, 300, 1, 64)


def share(words: Tensor) -> Tensor:
    """The words, in memory that forked processes have at the same address."""
    return words.share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def take_steps(machine: Machine, rank: int, steps: int, wrong: Tensor) -> None:
    """A process's part of the test below: words and their number are known from rank and step."""
    for epoch in range(1, steps + 1):
        sent = [some_words(LENGTHS[epoch % 4], 10 * epoch + source) for source in range(RANKS)]
        wrong[rank] = (machine.step(sent[rank]) != torch.stack(sent)).sum()
        if wrong[rank]:
            return
    wrong[rank] = machine.link[0] != steps + 1


@pytest.mark.interpreter
def test_ranks_that_run_at_once_stay_in_step() -> None:
    """Each is stopped again and again, wherever it is, while its peers go on as far as they can."""
    machines = [Machine(rank) for rank in range(RANKS)]
    shared = [share(buffer) for buffer in machines[0].buffers]
    wrong = share(torch.zeros(RANKS, dtype=torch.int64))
    for machine in machines:
        machine.buffers = shared
        machine.link[link.LIMIT.value :] = torch.tensor([1000, *(buffer.data_ptr() for buffer in shared)])
    fork = multiprocessing.get_context("fork")
    steps = 16
    ranks = [
        fork.Process(target=take_steps, args=(machine, rank, steps, wrong))
        for rank, machine in enumerate(machines)
    ]
    for process in ranks:
        process.start()
    turns = random.Random(1)
    while running := [process for process in ranks if process.is_alive()]:
        stopped = turns.choice(running)
        assert stopped.pid is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        time.sleep(turns.uniform(0, 0.1))
        os.kill(stopped.pid, signal.SIGCONT)
        time.sleep(turns.uniform(0, 0.01))
    assert [process.exitcode for process in ranks] == [0] * RANKS
    assert wrong.tolist() == [0] * RANKS


@pytest.mark.interpreter
def test_ids_of_the_largest_keys() -> None:
    """A clear winner on each rank, a tie, nothing anywhere, a bad row on one rank, a word that never came."""
    scores = torch.tensor(
        [[5.0, 1, 2, 3, -torch.inf, 9], [1, 5, 2, 3, -torch.inf, torch.inf], [1, 1, 7, 3, -torch.inf, 9]]
    )
    ids = torch.tensor(
        [[3, 4, 5, 6, -1, 8], [1003, 1004, 1005, 1006, -1, -1], [2003, 2004, 2005, 2006, -1, 2008]]
    )
    keys = words.pack_key(scores, ids)
    machine = Machine()
    machine.put(0, 1, 1, keys[0])
    machine.put(2, 1, 1, keys[2])
    assert machine.best(keys[1]).tolist() == [3, 1004, 2005, 6, -1, -1]
    machine.put(0, 1, 2, keys[0])
    assert machine.best(keys[1]).tolist() == [-1] * 6 and machine.missed() == (2, 2)


@pytest.mark.interpreter
@pytest.mark.parametrize("ranks", [1, 3, 6, 33])
def test_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """The last of them alone is late in one step, and named; no warp's width is a limit."""
    monkeypatch.setattr(sys.modules[__name__], "RANKS", ranks)
    machine = Machine(own=0)
    for epoch in (1, 2):
        sent = [some_words(3, rank) for rank in range(ranks)]
        for source in range(1, ranks - (epoch == 2)):
            machine.put(source, 0, epoch, sent[source])
        table = machine.step(sent[0])
        late = epoch == 2 and ranks > 1
        assert torch.equal(table[: ranks - late], torch.stack(sent[: ranks - late]))
        assert machine.missed() == ((ranks - 1, 2) if late else None)


@pytest.mark.interpreter
def test_a_rank_that_does_not_come_is_named_and_its_words_are_poison() -> None:
    machine = Machine()
    own = some_words(2, 1)
    machine.put(0, 1, 1, own)
    machine.put(2, 1, 1, own)
    machine.buffers[1][1, 2, 1, 1] ^= 1 << 32  # one half of one word is of another step
    table = machine.step(own)
    assert machine.missed() == (2, 1)
    assert table[2, 0] == own[0] and table[2, 1] == link.POISON.value
    assert words.key_ids(table[2, 1]) == -1 and table[2, 1] > words.pack_key(
        torch.tensor(3e38), torch.tensor(0)
    )
    assert words.high_bits(table[2, 1]).isnan() and words.low_bits(table[2, 1]).isnan()


@pytest.mark.interpreter
def test_after_a_miss_no_step_waits_and_the_first_miss_is_kept() -> None:
    """Steps queued behind a rank that died end one poll after another, and do not cover its name."""
    machine = Machine()
    machine.link[link.LIMIT.value] = 20
    own = some_words(2, 1)
    machine.put(0, 1, 1, own)
    machine.step(own)  # rank 2 never comes
    assert machine.missed() == (2, 1) and machine.link[link.LIMIT.value] == 0
    machine.put(2, 1, 2, own)
    for _ in range(2):
        machine.step(own)  # rank 0 has given up too
    assert machine.missed() == (2, 1) and machine.link[:2].tolist() == [4, 0]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_words_are_stored_and_polled_at_system_scope(ranks: int, best: bool) -> None:
    signature = {
        "words_ptr": "*i64", "out_ptr": "*i64", "link_ptr": "*i64", "num_words": "i32",
        "RANKS": "constexpr", "BLOCK": "constexpr", "WARPS": "constexpr", "BEST": "constexpr",
        "ASM": "constexpr",
    }  # fmt: skip
    constants = {
        "RANKS": ranks, "BLOCK": exchange.BLOCK, "WARPS": exchange.WARPS, "BEST": best, "ASM": True,
    }  # fmt: skip
    aligned = {(argument,): [["tt.divisibility", 16]] for argument in range(3)}  # as torch allocates
    source = ASTSource(exchange.exchange_kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": exchange.WARPS})
    ptx = made.asm["ptx"]
    assert ptx.count("st.relaxed.sys.global.b64") >= 2 * ranks
    assert ptx.count("ld.relaxed.sys.global.b64") >= 4 * ranks  # a first look, and the loop
    assert "globaltimer" in ptx and "cubin" in made.asm
    # Threads read clocks that differ: a look and a maximum over all come between a clock and a branch.
    straight = [re.split(r"\bbra\b", after)[0] for after in ptx.split("globaltimer")[1:]]
    polls = [code for code in straight if "ld.relaxed.sys" in code and re.search(r"bar(rier)?\.sync", code)]
    assert len(polls) == ranks
    # Every word belongs to one thread: inline assembly would run in its copies too, and send or vote twice.
    held = {
        name: math.prod(int(n) for n in re.findall(r"= \[(\d+)\]", text)[:3])  # of a thread, warp, CTA
        for name, text in re.findall(r"(#blocked\d*) = #ttg.blocked<{(.*?)order", made.asm["ttgir"])
    }
    lines = [line for line in made.asm["ttgir"].splitlines() if "relaxed.sys" in line]
    tensors = {found for line in lines for found in re.findall(r"tensor<(\d+)xi\d+, (#\w+)>", line)}
    assert tensors and all(held[layout] <= int(words) for words, layout in tensors), (held, tensors)
