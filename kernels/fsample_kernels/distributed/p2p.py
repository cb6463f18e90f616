"""The exchange between GPUs of one host: words written straight into the peers' memory, in one kernel."""

from __future__ import annotations

import os
import socket
import zlib

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from ..ops import exchange
from .collectives import RankError, Team

MIN_CAPACITY = 4096  # words a rank and step that a link is opened for at least: 64 KiB a rank and slot
LIMIT_S = 30.0  # a healthy peer is here in microseconds, or, where its host was held up, in seconds


class Link:
    """Symmetric memory of a team of ranks, and the state of its exchange. Opening one is a collective call.

    A step that a peer never joins ends after LIMIT_S: the ids of its rows are -1, and the next call (or
    `check`, after a synchronisation) raises RankError. No rank may go on with the group after that.
    """

    def __init__(self, team: Team, device: torch.device, num_words: int) -> None:
        # torch maps NVLink multicast where there is any, and lets a barrier use it; no shared host should.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric

        check_peers(team, device)
        self.team = team
        self.capacity = max(MIN_CAPACITY, triton.next_power_of_2(num_words))
        self.buffer = symmetric.empty(4 * team.size * self.capacity, dtype=torch.int64, device=device)
        self.buffer.zero_()
        self.handle = symmetric.rendezvous(self.buffer, team.group)
        offset = getattr(self.handle, "offset", 0)  # the pointers are those of allocations
        pointers = [pointer + offset for pointer in self.handle.buffer_ptrs]
        self.peers = torch.tensor(pointers, dtype=torch.int64, device=device)
        self.state = torch.tensor(
            [1, 0], dtype=torch.int64, device=device
        )  # epoch 0 is in the zeroed buffers
        self.status = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        # Every buffer is empty before the first word is sent, and the kernel compiled before anybody waits.
        word = torch.zeros(1, dtype=torch.int64, device=device)
        for best in (False, True):
            self._exchange(word, word, best, only_compile=True)
        torch.cuda.synchronize(device)
        dist.barrier(team.group)
        self.gather(word)
        self.best_ids(word)
        torch.cuda.synchronize(device)
        self.check()

    def gather(self, words: Tensor) -> Tensor:
        """int64 words, the same shape on every rank -> [R, *shape]; one launch, nothing waits on the host."""
        table = torch.empty((self.team.size, *words.shape), dtype=torch.int64, device=words.device)
        self._exchange(words, table, best=False)
        return table

    def best_ids(self, keys: Tensor) -> Tensor:
        """Ids of the largest keys, which never leave the kernel's registers."""
        ids = torch.empty(keys.shape, dtype=torch.int64, device=keys.device)
        self._exchange(keys, ids, best=True)
        return ids

    def _exchange(self, words: Tensor, out: Tensor, best: bool, only_compile: bool = False) -> None:
        self.check()
        exchange.exchange(
            words.contiguous(), out, self.peers, self.state, self.status.data_ptr(), self.team.rank,
            self.team.size, self.capacity, int(LIMIT_S * 1e9), best, only_compile,
        )  # fmt: skip

    def check(self) -> None:
        """Raise RankError, naming the rank, when a step that the device has finished lacked one."""
        missing, step = self.status.tolist()
        if missing:
            raise RankError(
                f"rank {missing - 1} did not send its words of exchange {step} within {LIMIT_S:g} s, in a "
                f"group of {self.team.size}: dead, or doing something else; start the group again"
            )


def check_peers(team: Team, device: torch.device) -> None:
    """Compare hosts and GPUs of the ranks. Raises ValueError, on every rank alike, naming the pair."""
    host = zlib.crc32(socket.gethostname().encode())
    own = torch.tensor([host, device.index], dtype=torch.int64, device=device)
    table = team.gather(own).tolist()
    indices = [index for _, index in table]
    reach = [
        # Ranks that each see one GPU all call it 0: then the rendezvous has to tell.
        int(len(set(indices)) < team.size or peer == device.index or can_reach(device.index, peer))
        for peer in indices
    ]
    reached = team.gather(torch.tensor(reach, dtype=torch.int64, device=device)).tolist()
    for rank in range(team.size):
        for peer in range(team.size):
            if table[rank][0] != table[peer][0]:
                raise ValueError(
                    f"exchange='p2p' needs all ranks on one host, ranks {rank} and {peer} are on two; "
                    "use 'candidates'"
                )
            if not reached[rank][peer]:
                raise ValueError(
                    f"exchange='p2p' needs GPUs that reach each other's memory, ranks {rank} and {peer} "
                    f"(GPUs {indices[rank]} and {indices[peer]}) do not; use 'candidates'"
                )


def can_reach(device: int, peer: int) -> bool:
    return torch.cuda.can_device_access_peer(device, peer)


def open_link(team: Team, device: torch.device, num_words: int) -> None:
    """Give the team a link for that many words; opened, or opened again, by all ranks at the same call."""
    if team.link is None or team.link.capacity < num_words:
        team.link = Link(team, device, num_words)
