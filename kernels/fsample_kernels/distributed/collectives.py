"""The collective calls of this package, on any backend, with errors that name the missing rank."""

from __future__ import annotations

import contextlib
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
GRACE_S = 2.0  # how long a rank that saw a call fail waits for slower ones to say that they began it
# What the group's store holds of each rank, as a number.
ARRIVED, MET, REFUSED, FAILED = "arrived", "met", "refused", "failed"


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
        self.calls = 0  # begun here; ranks make the same ones, so it is the number of the call on all
        self.arrived = self.meetings = self.refusals = 0
        self.last_refusal = 0  # as the store has it, see `refuse`
        self.refused = ""  # why this rank refused its latest call, until all are known to have done so
        self.failed = ""  # why this rank can make no more calls
        # Calls that all ranks have compared, see `shards`. A group that gets the name of an earlier one has a
        # team of its own, and compares anew. The key holds the weight's storage itself, weakly: an address is
        # given out again, perhaps on one rank only.
        self.agreed: dict[tuple[StorageWeakRef, tuple[object, ...]], Agreed] = {}
        self.links: list[Link] = []  # of exchange="p2p", the one in use last
        self.link_problem: str | None = None  # why there can be none, "" where there is; None: not yet known
        with contextlib.suppress(RuntimeError):  # its loss is the error of the first call
            for what in (ARRIVED, MET, REFUSED, FAILED):  # a store may remember a group of the same name
                self._say(what, 0)

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None  # a call has it: see `team_of`
        return group

    def begin(self) -> None:
        """Raise RankError where an earlier call lost a rank, or the others may be a call ahead.

        After a refusal it waits, as `meet`, until all ranks have refused that call, or one of them fails.
        """
        if self.refused:
            try:
                if self._late(REFUSED, self.last_refusal, self._limit_s(), unless_failed=True):
                    self._fail_alone(self.refused)
            except RuntimeError as error:
                raise self._lost(self._without_store()) from error
            self.refused = ""
        if self.failed:
            raise RankError(self.failed)
        self.calls += 1

    def arrive(self) -> None:
        """Tell the others, through the group's store, that this rank takes part in the next call.

        Done where a call waits for the others anyway; it is what lets an error name a rank. Raises RankError
        when the store is gone.
        """
        try:
            self.arrived = self.calls
            self._say(ARRIVED, self.calls)
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            raise self._lost(self._without_store()) from error

    def meet(self) -> None:
        """Wait until every rank is here, by the store: NCCL tells nobody of one that a collective waits for.

        Raises RankError, naming the ranks, when some are not within the timeout of init_process_group.
        """
        try:
            self.meetings += 1
            self._say(MET, self.meetings)
            late = self._late(MET, self.meetings, self._limit_s())
            absent = self._absent(late) if late else ""
        except RuntimeError as error:
            raise self._lost(self._without_store()) from error
        if absent:
            raise self._lost(absent)

    def refuse(self, error: BaseException) -> None:
        """Note that a call ended on this rank before its exchange.

        Where all ranks refuse it, they go on: see `begin`. Otherwise the others wait for this rank's words,
        and would take those of its next call for them: so it makes none.
        """
        if isinstance(error, RankError):  # of another rank: not this one ended the call
            self._fail(str(error))
            return
        # Grows with every refusal, and of as many is less where the call came later: refusing that one is not
        # what a rank that refused an earlier one, alone, waits for.
        self.refusals += 1
        self.last_refusal = (self.refusals << 32) - self.calls
        with contextlib.suppress(RuntimeError):  # `begin` finds the store gone as well
            self._say(REFUSED, self.last_refusal)
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, ValueError):
            self.refused = reason
        else:
            self._fail_alone(reason)

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
        self._fail(message)
        return RankError(message)

    def _fail_alone(self, reason: str) -> None:
        self._fail(
            f"an earlier call of rank {self.rank} ended before its exchange, not so on every rank; start "
            f"the group again, the others may be a call ahead. The call's error was: {reason}"
        )

    def _fail(self, message: str) -> None:
        self.failed = message
        with contextlib.suppress(RuntimeError):  # where the store is gone, the others find that out
            self._say(FAILED, 1)

    def _who_is_missing(self) -> str:
        if not self.calls:
            return "a rank did not take part in a collective call: look at the other processes' logs"
        try:
            absent = self._absent(self._late(ARRIVED, self.arrived, GRACE_S))
        except RuntimeError:
            return self._without_store()
        return absent or (
            f"a rank of the group of {self.size} was lost during fsample call {self.calls}, which every "
            "rank had begun: look at the other processes' logs"
        )

    def _absent(self, late: list[int]) -> str:
        """Who ended this call early, or else who is late for it; "" where nobody did or is."""
        refused = [rank for rank in range(self.size) if self._count(REFUSED, rank) > self.last_refusal]
        if refused:
            return (
                f"{self._names(refused)} ended fsample call {self.calls} on a group of {self.size} ranks "
                "before the exchange: the error raised there says why"
            )
        if not late:
            return ""
        return (
            f"{self._names(late)} did not arrive at fsample call {self.calls} on a group of {self.size} "
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

    def _limit_s(self) -> float:
        return self._store().timeout.total_seconds()  # type: ignore[attr-defined,no-any-return]  # no stub

    def _say(self, what: str, count: int) -> None:
        self._store().set(self._key(what, self.rank), str(count))

    def _late(self, what: str, count: int, seconds: float, unless_failed: bool = False) -> list[int]:
        """The ranks that the store has not counted that often, at once or after so many seconds.

        unless_failed: wait no longer once one of them has failed.
        """
        deadline, pause = time.monotonic() + seconds, 0.001
        late = list(range(self.size))
        while late := [rank for rank in late if self._count(what, rank) < count]:
            failed = unless_failed and any(self._count(FAILED, rank) for rank in late)
            if failed or time.monotonic() > deadline:
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
    if not isinstance(group, dist.ProcessGroup) or _own_rank(group) < 0:
        raise ValueError("group must have this process as a member; call only from the ranks that are in it")
    held = _teams.get(group)
    if held is None:
        held = _teams[group] = Team(group)
    return held


def _own_rank(group: dist.ProcessGroup) -> int:
    """This process's rank in it. Raises ValueError for a group that is destroyed."""
    try:
        return dist.get_rank(group)
    except ValueError as error:  # torch's "Group <...> is not registered"
        raise ValueError(
            "group must be a process group that is not destroyed, got one that torch.distributed no longer "
            "knows; make another with torch.distributed.new_group"
        ) from error
