"""The exchange between GPUs of one host: words written straight into the peers' memory by kernels."""

from __future__ import annotations

import os

import torch
import triton
from torch import Tensor

from .. import buffers
from ..ops import exchange, link
from .collectives import RankError, Team

MIN_CAPACITY = 4096  # words a rank and step that a link is opened for at least: 64 KiB a rank and slot
LIMIT_S = 30.0  # a healthy peer is here in microseconds, or, where its host was held up, in seconds


class Link:
    """Symmetric memory of a team of ranks, and the state of its exchange. Opening one is a collective call.

    A step that a peer never joins ends after LIMIT_S, those queued behind it at once: the ids of their rows
    are -1, and the next call (or `check`, after a synchronisation) raises RankError. No rank may go on with
    the group after that.

    Raises ValueError, on every rank alike, where the memory cannot be had or shared.
    """

    def __init__(self, team: Team, device: torch.device, num_words: int) -> None:
        # torch maps NVLink multicast where there is any, and lets a barrier use it; no shared host should.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self.team = team
        self.capacity = max(MIN_CAPACITY, triton.next_power_of_2(num_words))
        self.held, addresses = share(team, device, 4 * team.size * self.capacity)
        self.status = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=True)
        # See ops.link. Epoch 0 is in the zeroed buffers.
        fields = [1, 0, self.status.data_ptr(), team.rank, self.capacity, int(LIMIT_S * 1e9)]
        self.words = torch.tensor(fields + addresses, dtype=torch.int64, device=device)
        # Every buffer is empty before the first word is sent, and the kernel compiled before anybody waits.
        word = torch.zeros(1, dtype=torch.int64, device=device)
        for best in (False, True):
            exchange.exchange(word, word, self.words, team.size, best, only_compile=True)
        torch.cuda.synchronize(device)
        team.barrier()
        self.gather(word)
        self.best_ids(word)
        torch.cuda.synchronize(device)
        self.check()

    def gather(self, words: Tensor) -> Tensor:
        """int64 words, the same shape on every rank -> [R, *shape]; one launch, nothing waits on the host."""
        self.check()
        table = buffers.empty((self.team.size, *words.shape), torch.int64, words.device)
        exchange.exchange(words.contiguous(), table, self.words, self.team.size, best=False)
        return table

    def best_ids(self, keys: Tensor) -> Tensor:
        """Ids of the largest keys, which never leave the kernel's registers."""
        self.check()
        ids = buffers.empty(tuple(keys.shape), torch.int64, keys.device)
        exchange.exchange(keys.contiguous(), ids, self.words, self.team.size, best=True)
        return ids

    def check(self) -> None:
        """Raise RankError, naming the rank, when a step that the device has finished lacked one."""
        missed = link.missed(int(self.status))
        if missed is not None:
            rank, step = missed
            raise RankError(
                f"rank {rank} did not send its words of exchange {step} within {LIMIT_S:g} s, in a "
                f"group of {self.team.size}: dead, or doing something else; start the group again"
            )


def share(team: Team, device: torch.device, num_words: int) -> tuple[object, list[int]]:
    """Zeroed int64 words that every rank of the team can reach: what keeps them, and the ranks' addresses."""
    import torch.distributed._symmetric_memory as symmetric

    held: object = None
    addresses, problem = [0], ""
    try:
        buffer = symmetric.empty(num_words, dtype=torch.int64, device=device)
        buffer.zero_()
        torch.cuda.synchronize(device)
        handle = symmetric.rendezvous(buffer, team.group)
        offset = getattr(handle, "offset", 0)  # the pointers are those of allocations
        held = (buffer, handle)
        addresses = [pointer + offset for pointer in handle.buffer_ptrs]
    except RuntimeError as error:  # a driver or a container that shares no memory between processes
        problem = str(error).splitlines()[0]
    failed = torch.tensor([problem != ""], dtype=torch.int64, device=device)
    lost = [rank for rank, flag in enumerate(team.gather(failed).flatten().tolist()) if flag]
    if lost:
        said = f": {problem}" if problem else ""
        raise ValueError(f"needs memory that GPUs share, and rank {lost[0]} could not share its own{said}")
    return held, addresses


def open_first(team: Team, device: torch.device) -> str:
    """Open the team's first link; the reason why it cannot be had, or ""."""
    try:
        team.links.append(Link(team, device, MIN_CAPACITY))
    except ValueError as error:
        return str(error)
    return ""


def link_for(team: Team, device: torch.device, num_words: int) -> Link:
    """The team's link for that many words; a larger one is opened by all ranks at the same call.

    Smaller ones stay: a captured graph goes on using its own.
    """
    newest = team.links[-1]
    if newest.capacity < num_words:
        newest = Link(team, device, num_words)
        team.links.append(newest)
    assert isinstance(newest, Link)
    return newest
