"""A sampler's call captured in a CUDA graph, as an engine runs it, and what has to hold around a capture.

torch 2.11 and CUDA 13 set the rules. A capture that fails may leave torch's allocator and its default
generator as if it went on, and then the run cannot. So a call that waits for the device is found before, by
a call under torch's own watch for such waits, and after any other failure both are put back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from fsample_cli.errors import FsampleError
from fsample_kernels.distributed import RankError

WARM_UP = 3  # eager calls on the capturing stream: what libraries allocate for a stream is not the graph's
POSITION = 0  # of the captured call, and so of every replay

Draw = Callable[[], Tensor]


class NotCaptured(Exception):
    """The call cannot be captured; `str` says why, for the note of a row."""


@dataclass(frozen=True)
class Captured:
    """A captured call. Nothing of it may be used after `free`."""

    eager: Tensor  # what the last call before the capture gave
    output: Tensor  # what a replay fills
    replay: Callable[[], None]
    free: Callable[[], None]


Capture = Callable[[Draw], Captured]  # raises NotCaptured


class CudaCapture:
    """Captures calls on one side stream of a device, each into a graph with memory of its own."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._word = torch.zeros(1, device=self._device)

    def __call__(self, call: Draw) -> Captured:
        """Call it eagerly, then capture it. Raises NotCaptured, and FsampleError where torch is lost after a
        capture that failed.
        """
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):  # puts the stream back, which a failed capture does not
            for _ in range(WARM_UP):
                call()
            with no_waiting():
                eager = _watched(call)
            torch.cuda.synchronize(self._device)
            graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            inside = _Watch()
            try:
                # thread_local: NCCL's watchdog asks its events from a thread of its own
                with (
                    torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"),
                    inside,
                ):
                    output = call()
            except RuntimeError as error:
                # The call's own error: the capture has ended in order, and the graph gives its memory back
                # itself; a second time would end the process.
                if error is not inside.error:
                    self._recover(pool)
                raise reason(inside.error or error) from error
        torch.cuda.synchronize(self._device)
        return Captured(eager, output, graph.replay, graph.reset)

    def _recover(self, pool: tuple[int, int]) -> None:
        """End the capture for allocator and generator too; for the generator another capture does it."""
        with suppress(RuntimeError):  # where torch did it itself
            torch._C._cuda_endAllocateToPool(self._device.index, pool)
        with suppress(RuntimeError):
            torch._C._cuda_releasePool(self._device.index, pool)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
                self._word.zero_()
        except RuntimeError as error:
            raise FsampleError(
                f"a capture failed, and torch captures nothing since: {_first_line(error)}",
                "leave out --graph, or the sampler that was being captured",
            ) from error


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside it a call of torch that waits for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def reason(error: BaseException) -> BaseException:
    """What to raise for an error inside a capture: NotCaptured, or the error itself where it is another's."""
    if not isinstance(error, RuntimeError) or isinstance(error, (RankError, dist.DistError)):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return NotCaptured("out of GPU memory")
    return NotCaptured(_first_line(error))


def _watched(call: Draw) -> Tensor:
    try:
        return call()
    except RuntimeError as error:
        if "synchronizing" in str(error):
            raise NotCaptured("it waits for the device, which nothing in a graph can") from error
        raise reason(error) from error


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__


class _Watch:
    """Keeps the error that leaves its block: the end of the capture raises another one over it."""

    error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.error = error
