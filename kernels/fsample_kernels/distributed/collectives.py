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
GRACE_S = 2.0  # how long a rank that saw a call fail waits for slower ones to say how they stand
ARRIVED, MET, REFUSED = "arrived", "met", "refused"  # what the group's store counts of each rank


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
        self.said = dict.fromkeys((ARRIVED, MET, REFUSED), 0)  # as the store counts this rank
        self.failed = ""  # why this rank can make no more calls
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

    @property
    def calls(self) -> int:
        return self.said[ARRIVED]

    def begin(self) -> None:
        """Raise RankError where an earlier call lost a rank, or the others may be a call ahead."""
        if self.failed:
            raise RankError(self.failed)

    def arrive(self) -> None:
        """Tell the others, through the group's store, that this rank takes part in the next call.

        Done where a call waits for the others anyway; it is what lets an error name a rank. Raises RankError
        when the store is gone.
        """
        try:
            if not self.calls:
                self._say(REFUSED, 0)  # a store may remember a group of the same name
            self._say(ARRIVED, self.calls + 1)
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            raise self._lost(self._without_store()) from error

    def meet(self) -> None:
        """Wait until every rank is here, by the store: NCCL tells nobody of one that a collective waits for.

        Raises RankError, naming the ranks, when some are not within the timeout of init_process_group.
        """
        try:
            self._say(MET, self.said[MET] + 1)
            limit_s = self._store().timeout.total_seconds()  # type: ignore[attr-defined]  # torch's stub lacks it
            late = self._late(MET, self.said[MET], limit_s)
        except RuntimeError as error:
            raise self._lost(self._without_store()) from error
        if late:
            raise self._lost(self._did_not_arrive(late))

    def refuse(self, error: BaseException) -> None:
        """Note that a call ended on this rank before its exchange.

        Where all ranks refuse it, they go on. Otherwise the others wait for this rank's words, and would take
        those of its next call for them: so it makes none.
        """
        try:
            self._say(REFUSED, self.said[REFUSED] + 1)
            shared = isinstance(error, ValueError) and not self._late(REFUSED, self.said[REFUSED], GRACE_S)
        except RuntimeError:
            shared = False
        if isinstance(error, RankError):
            self.failed = str(error)
        elif not shared:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self.failed = (
                f"an earlier call of rank {self.rank} ended before its exchange, not so on every rank; start "
                f"the group again, the others may be a call ahead. The call's error was: {reason}"
            )

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
        """Wait until every rank is here. Raises RankError as `meet`."""
        if self.backend != "gloo":  # which tells of a lost rank itself, and at once
            self.meet()
        self._collective(lambda: dist.barrier(self.group))

    def _stage(self, words: Tensor) -> Tensor:
        """gloo gathers in host memory only."""
        return (words.cpu() if self.backend == "gloo" else words).contiguous()

    def _collective(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:  # gloo's only type for a lost peer and for a timeout
            if "Duplicate GPU" in str(error):  # of NCCL
                raise self._lost(
                    f"two ranks of the group of {self.size} use one GPU, and NCCL takes one for each; give "
                    "every rank its own (torch.cuda.set_device), or use the backend gloo"
                ) from error
            raise self._lost(f"{self._who_is_missing()}; the backend says: {error}") from error

    def _lost(self, message: str) -> RankError:
        self.failed = message
        return RankError(message)

    def _who_is_missing(self) -> str:
        if not self.calls:
            return "a rank did not take part in a collective call: look at the other processes' logs"
        try:
            missing = self._late(ARRIVED, self.calls, GRACE_S)
            refused = [rank for rank in range(self.size) if self._count(REFUSED, rank) > self.said[REFUSED]]
        except RuntimeError:
            return self._without_store()
        if missing:
            return self._did_not_arrive(missing)
        if refused:
            return (
                f"{self._names(refused)} ended fsample call {self.calls} on a group of {self.size} ranks "
                "before the exchange: the error raised there says why"
            )
        return (
            f"a rank of the group of {self.size} was lost during fsample call {self.calls}, which every "
            "rank had begun: look at the other processes' logs"
        )

    def _did_not_arrive(self, ranks: list[int]) -> str:
        return (
            f"{self._names(ranks)} did not arrive at fsample call {self.calls} on a group of {self.size} "
            "ranks: dead, or doing something else; every rank must make the same calls in the same order"
        )

    def _without_store(self) -> str:
        return (
            f"fsample call {self.calls} on a group of {self.size} ranks failed, and so did the store "
            "that says who is there: the process that hosts it, rank 0 unless a launcher does, is gone"
        )

    def _names(self, ranks: list[int]) -> str:
        """With the global rank where it is another."""
        return ", ".join(
            f"rank {rank}" + ("" if self.members[rank] == rank else f" (global rank {self.members[rank]})")
            for rank in ranks
        )

    def _say(self, what: str, count: int) -> None:
        self.said[what] = count
        self._store().set(self._key(what, self.rank), str(count))

    def _late(self, what: str, count: int, seconds: float) -> list[int]:
        """The ranks that the store has not counted that often, at once or after so many seconds."""
        deadline, pause = time.monotonic() + seconds, 0.001
        late = list(range(self.size))
        while late := [rank for rank in late if self._count(what, rank) < count]:
            if time.monotonic() > deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return late

    def _count(self, what: str, rank: int) -> int:
        key, store = self._key(what, rank), self._store()
        return int(store.get(key)) if store.check([key]) else 0

    def _key(self, what: str, rank: int) -> str:
        return f"fsample/{self.group.group_name}/{what}/{rank}"

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
