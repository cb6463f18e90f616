"""What a measurement asks of the ranks it runs on, and the answers of a process that is alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fsample_cli.errors import FsampleError, MissingError
from fsample_cli.launch import Place
from fsample_kernels import distributed

Samples = tuple[tuple[float, ...], ...]  # [call][iteration]
SLEEP_CYCLES = 4_000_000  # about 2 ms: longer than the host takes to launch any sampler
TIMEOUT = timedelta(minutes=10)  # compiling a baseline on one rank takes minutes, and the others wait


class Solo:
    """One process: nothing to wait for, nothing to compare."""

    rank = 0
    size = 1

    def agree(self, note: str) -> str:
        """The note of a sampler, empty only where every rank may run it: the others must not wait for one."""
        return note

    def meet(self) -> None:
        """Wait for the others."""

    def before_call(self, flush: Callable[[], None] | None) -> Callable[[], None] | None:
        """What runs before each timed call."""
        return flush

    def over_ranks(self, samples: Samples) -> tuple[Samples, Samples]:
        """(slowest, fastest) rank of every iteration. A step is done when its slowest rank is."""
        return samples, samples


SOLO = Solo()


class Ranks(Solo):
    """The ranks of a process group; every method is a collective call."""

    def __init__(self, place: Place, device: torch.device | None = None) -> None:
        self.rank, self.size = place.rank, place.size
        self.device = device  # this rank's GPU

    def agree(self, note: str) -> str:
        notes: list[str] = [""] * self.size
        dist.all_gather_object(notes, note)
        return next((text for text in notes if text), "")

    def meet(self) -> None:
        dist.barrier()

    def before_call(self, flush: Callable[[], None] | None) -> Callable[[], None] | None:
        if self.device is None:
            return lambda: _flush_and_meet(flush)
        word = torch.zeros(1, device=self.device)

        def aligned() -> None:
            """Ranks' devices start together, with all that is timed queued behind them: no launch is seen."""
            if flush is not None:
                flush()
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            dist.all_reduce(word)  # on the device alone: a barrier would hold up the host

        return aligned

    def over_ranks(self, samples: Samples) -> tuple[Samples, Samples]:
        each: list[Samples] = [()] * self.size
        dist.all_gather_object(each, samples)
        slowest = tuple(tuple(map(max, zip(*call, strict=True))) for call in zip(*each, strict=True))
        fastest = tuple(tuple(map(min, zip(*call, strict=True))) for call in zip(*each, strict=True))
        return slowest, fastest


def _flush_and_meet(flush: Callable[[], None] | None) -> None:
    if flush is not None:
        flush()
    dist.barrier()


@contextmanager
def team_of(place: Place | None, device: str) -> Iterator[Solo]:
    """Join the process group of the ranks and leave it; SOLO without a place.

    Raises MissingError where ranks outnumber GPUs.
    """
    if place is None:
        yield SOLO
        return
    own = None
    if device == "cuda":
        if place.local_rank >= torch.cuda.device_count():
            raise MissingError(
                f"--tp {place.size} needs a GPU for each rank, found {torch.cuda.device_count()}",
                "--device cpu runs any number of ranks",
            )
        # No multicast over NVLink: a process that dies with it in use can take a shared host out of service.
        for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")):
            os.environ.setdefault(name, value)
        own = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(own)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // place.size))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method="env://" if place.store is None else f"file://{place.store}",
        rank=place.rank,
        world_size=place.size,
        timeout=TIMEOUT,
        device_id=own,
    )
    try:
        with lost_ranks():
            yield Ranks(place, own)
            distributed.check()  # what the last calls on the device lacked
    finally:
        dist.destroy_process_group()


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Turn what a lost rank raises in the others into an error of one line."""
    try:
        yield
    except (distributed.RankError, dist.DistError) as error:
        raise FsampleError(f"a rank was lost: {error}", "its own output says why") from error
    except RuntimeError as error:  # gloo has no type of its own
        if "gloo" not in str(error):
            raise
        raise FsampleError(f"a rank was lost: {error}", "its own output says why") from error


def same_counts(counts: Sequence[int]) -> tuple[int, ...]:
    """Rank 0's counts, on every rank: numbers of calls must not be each rank's own."""
    sent: list[tuple[int, ...]] = [tuple(counts)]
    dist.broadcast_object_list(sent, src=0)
    return sent[0]
