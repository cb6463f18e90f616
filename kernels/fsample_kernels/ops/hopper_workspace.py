"""State of the Hopper kernel that every launch leaves as it found it, so that no launch has to make it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from fsample_kernels.ops.hopper_rows import EMPTY_KEY

ROWS = 1024  # of a workspace at least
SPARES = 64  # made at a time


@dataclass(frozen=True)
class Workspace:
    """One a stream, and one a captured call: two launches at once must not share it.

    It is no argument of `sample`, since a caller could only get it wrong: launches of one stream never
    overlap, and a captured call keeps its own, whatever streams replay it. The price is memory: 12 bytes a
    row and, once a call has had more than 192 rows, up to 192 KiB an SM; and 0.9 MB for every `SPARES`
    captured calls. The scratch of a captured call is memory of its graph.
    """

    keys: Tensor  # [rows] int64, EMPTY_KEY
    counters: Tensor  # [row blocks] int32, 0
    flags: Tensor  # [flags] int32, 0
    scratch: Tensor  # [values] fp32, whatever they are: sums of parted tiles, logits of groups that lead

    def serves(self, num_rows: int, num_scratch: int, num_flags: int) -> bool:
        return (
            self.keys.shape[0] >= num_rows
            and self.scratch.shape[0] >= num_scratch
            and self.flags.shape[0] >= num_flags
        )


_of_stream: dict[tuple[int, int], Workspace] = {}
_spares: dict[int | None, list[Workspace]] = {}  # of a device: filled, and not yet given away
_given: list[Workspace] = []  # to captured calls: a graph holds addresses, and does not keep what lies there
_giving = threading.Lock()


def make(
    count: int, num_rows: int, num_scratch: int, num_flags: int, device: torch.device
) -> list[Workspace]:
    """`count` of them, in two fills."""
    keys = torch.full((count, num_rows), EMPTY_KEY.value, dtype=torch.int64, device=device)
    zeros = torch.zeros(count, num_flags + num_rows, dtype=torch.int32, device=device)
    scratch = torch.empty(count, num_scratch, dtype=torch.float32, device=device)
    return [Workspace(keys[i], zeros[i, num_flags:], zeros[i, :num_flags], scratch[i]) for i in range(count)]


def make_for_good(
    count: int, num_rows: int, num_scratch: int, num_flags: int, device: torch.device
) -> list[Workspace]:
    """`make` on a thread of its own, which no pool of the caller's thread serves: torch.compile with graphs
    (mode="reduce-overhead") runs a call within one first, and lets nothing of it live on."""
    stream = torch.cuda.current_stream(device)

    def there() -> list[Workspace]:
        with torch.cuda.stream(stream):
            return make(count, num_rows, num_scratch, num_flags, device)

    with ThreadPoolExecutor(1, "fsample-workspace") as thread:
        return thread.submit(there).result()


def workspace(num_rows: int, num_scratch: int, num_flags: int, device: torch.device) -> Workspace:
    """The workspace of the current stream, or inside a capture one for that call alone.

    A captured call takes a spare that an earlier call has filled, and no other call gets it again: there is
    no telling when a graph has been replayed for the last time. Where none is left, or it is too small, the
    graph fills one at the head of each replay.
    """
    if torch.cuda.is_current_stream_capturing():
        with _giving:  # one captured call of one thread
            spares = _spares.get(device.index)
            if not spares or not spares[-1].serves(num_rows, 0, num_flags):
                return make(1, num_rows, num_scratch, num_flags, device)[0]
            _given.append(spares.pop())
            return replace(_given[-1], scratch=torch.empty(num_scratch, dtype=torch.float32, device=device))
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    held = _of_stream.get(key)
    if held is None or not held.serves(num_rows, num_scratch, num_flags):
        rows = max(ROWS, triton.next_power_of_2(num_rows))
        scratch = num_scratch if held is None else max(num_scratch, held.scratch.shape[0])
        [held] = make_for_good(1, rows, scratch, num_flags, device)
        _of_stream[key] = held
    if not _spares.get(device.index):
        made = make_for_good(SPARES, ROWS, 0, num_flags, device)
        # Replays on other streams do not wait for the fills. An event is waited for also where torch refuses
        # waits for a stream (`set_sync_debug_mode`).
        torch.cuda.current_stream(device).record_event().synchronize()
        _spares[device.index] = made
    return held
