"""The collective calls of this package, on any backend, with errors that name the missing rank."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.multiprocessing.reductions import StorageWeakRef

from ..validation import Shard
from ..words import key_ids

# torch 2.13 renamed it; older ones have the second name alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
GRACE_S = 2.0  # how long a rank that saw a call fail waits for slower ones to say that they are there


class RankError(RuntimeError):
    """A rank of the group is gone or never came; the message names it."""


class Transport(Protocol):
    """How the words of all ranks come together."""

    def gather(self, words: Tensor) -> Tensor:
        """int64 words, the same shape on every rank -> [R, *shape], on their device."""
        ...

    def best_ids(self, keys: Tensor) -> Tensor:
        """The ids of the largest of all ranks' keys, int64, of the same shape."""
        ...


class Link(Transport, Protocol):
    """A transport of its own memory; see `p2p.Link`."""

    capacity: int
    words: Tensor

    def check(self) -> None: ...


@dataclass
class Agreed:
    """A kind of call that ranks have compared; and whether they have made one, its kernels compiled."""

    shard: Shard
    made: bool = False


class Team:
    """One process group as this package uses it: who is in it, and the calls made on it so far."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)  # held on to, it would outlive its threads' modules: SIGABRT at exit
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.backend = dist.get_backend(group)
        self.members = dist.get_process_group_ranks(group)  # global ranks
        self.calls = 0
        # Calls that all ranks have compared, see `shards`. A group that gets the name of an earlier one has a
        # team of its own, and compares anew. The key holds the weight's storage itself, weakly: an address is
        # given out again, perhaps on one rank only.
        self.agreed: dict[tuple[StorageWeakRef, tuple[object, ...]], Agreed] = {}
        self.links: list[Link] = []  # of exchange="p2p", the one in use last
        self.link_problem: str | None = None  # why there can be none, "" where there is; None: not yet known

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None  # a call has it: see `team_of`
        return group

    def arrive(self) -> None:
        """Tell the others, through the group's store, that this rank takes part in the next call.

        Done where a call waits for its collectives anyway (gloo); it is what lets an error name a rank.
        """
        self.calls += 1
        self._store().set(self._key(self.rank), str(self.calls))

    def gather(self, words: Tensor) -> Tensor:
        """int64 words, the same shape on every rank -> [R, *shape], on their device.

        Raises RankError, naming the ranks, when some do not take part within the group's timeout.
        """
        staged = self._stage(words)
        gathered = torch.empty((self.size, *staged.shape), dtype=staged.dtype, device=staged.device)
        # Concatenated, as every backend takes it: gloo refuses an output with a dimension more.
        flat = gathered.view(-1)
        self._collective(lambda: _all_gather(flat, staged.view(-1), group=self.group))
        return gathered.to(words.device)

    def best_ids(self, keys: Tensor) -> Tensor:
        return key_ids(self.gather(keys).amax(0))

    def broadcast(self, word: Tensor) -> Tensor:
        """The word of the group's rank 0, on every rank. Raises RankError as `gather`."""
        staged = self._stage(word).clone()
        self._collective(lambda: dist.broadcast(staged, src=self.members[0], group=self.group))
        return staged.to(word.device)

    def barrier(self) -> None:
        """Wait until every rank is here. Raises RankError as `gather`."""
        self._collective(lambda: dist.barrier(self.group))

    def _stage(self, words: Tensor) -> Tensor:
        """gloo gathers in host memory only."""
        return (words.cpu() if self.backend == "gloo" else words).contiguous()

    def _collective(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:  # gloo's only type for a lost peer and for a timeout
            raise RankError(f"{self._who_is_missing()}; the backend says: {error}") from error

    def _who_is_missing(self) -> str:
        if not self.calls:
            return "a rank did not take part in a collective call: look at the other processes' logs"
        deadline = time.monotonic() + GRACE_S
        try:
            while True:
                missing = [rank for rank in range(self.size) if self._arrived(rank) < self.calls]
                if not missing or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        except RuntimeError:  # DistStoreError, DistNetworkError: the store's host is gone
            return (
                f"fsample call {self.calls} on a group of {self.size} ranks failed, and so did the store "
                "that says who is there: the process that hosts it, rank 0 unless a launcher does, is gone"
            )
        if not missing:
            return (
                f"a rank of the group of {self.size} was lost during fsample call {self.calls}, which every "
                "rank had begun: look at the other processes' logs"
            )
        names = ", ".join(f"rank {rank}" + self._global_name(rank) for rank in missing)
        return (
            f"{names} did not arrive at fsample call {self.calls} on a group of {self.size} ranks: dead, "
            "or doing something else; every rank must make the same calls in the same order"
        )

    def _global_name(self, rank: int) -> str:
        return "" if self.members[rank] == rank else f" (global rank {self.members[rank]})"

    def _arrived(self, rank: int) -> int:
        key = self._key(rank)
        store = self._store()
        return int(store.get(key)) if store.check([key]) else 0

    def _key(self, rank: int) -> str:
        return f"fsample/{self.group.group_name}/{rank}"

    @staticmethod
    def _store() -> Store:
        # torch has no public name for the store that init_process_group made (seen up to 2.13).
        return _get_default_store()


# By the group itself, not by its name, which is used again after destroy_process_group.
_teams: weakref.WeakKeyDictionary[dist.ProcessGroup, Team] = weakref.WeakKeyDictionary()


def team_of(group: dist.ProcessGroup | None) -> Team:
    """The team of a group, None being the default one. Raises ValueError where this process is in none."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group must be a process group of torch.distributed, and none is initialised; "
            "call torch.distributed.init_process_group first, or run under torchrun"
        )
    group = dist.group.WORLD if group is None else group
    # For ranks outside of it, new_group returns a number in place of a group.
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError("group must have this process as a member; call only from the ranks that are in it")
    held = _teams.get(group)
    if held is None:
        held = _teams[group] = Team(group)
    return held
