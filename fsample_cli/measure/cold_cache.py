"""Emptying the cache between timed iterations, outside the measured span.

Serving finds the LM head cold: the layers before it have streamed gigabytes through L2. Timing the same
buffers again and again would leave a small head in cache and show more bandwidth than memory has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

MIN_BYTES = 32 * 2**20
DEFAULT_CPU_CACHE = 64 * 2**20
CPU_FLUSH_LIMIT = 96 * 2**20


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache: L2 of a GPU, the largest cache that Linux reports on a CPU (64 MiB
    elsewhere).
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [
        int(text[:-1]) * units[text[-1]]
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if (text := path.read_text().strip()) and text[-1] in units
    ]
    return max(sizes, default=DEFAULT_CPU_CACHE)


def flush_bytes(device: torch.device) -> int:
    """Bytes that one flush moves through the cache. A cloud CPU reports the 300 MiB that many guests share;
    emptying all of it would take longer than most calls, so the CPU's flush stops at 96 MiB.
    """
    wanted = max(MIN_BYTES, 2 * cache_bytes(device))
    return wanted if device.type == "cuda" else min(wanted, CPU_FLUSH_LIMIT)


def make_flush(device: torch.device) -> Callable[[], None]:
    """A function that evicts what the last call left in the cache.

    On a GPU it writes a buffer of twice the L2, then reads another one. The write alone would leave a cache
    full of dirty lines, whose write-back then falls into the next timed kernel (about 14 us on an H200); the
    read replaces them with clean ones. On a CPU it reads only.
    """
    size = flush_bytes(device)
    read = torch.zeros(size // 4, dtype=torch.float32, device=device)
    total = torch.empty((), dtype=torch.float32, device=device)
    if device.type != "cuda":
        return lambda: _read(read, total)
    written = torch.empty(size, dtype=torch.int8, device=device)

    def flush() -> None:
        written.zero_()
        _read(read, total)

    return flush


def _read(buffer: torch.Tensor, total: torch.Tensor) -> None:
    torch.sum(buffer, dim=0, out=total)


def describe(device: torch.device, cold: bool) -> str:
    """The mode in words, for tables and records."""
    name = "L2" if device.type == "cuda" else "cache"
    if not cold:
        return f"warm {name}: the same buffers every iteration"
    size = f"{flush_bytes(device) / 2**20:.0f} MiB"
    moved = f"{size} written, then {size} read" if device.type == "cuda" else f"{size} read"
    return f"cold {name}: {moved} before each iteration, outside the measured span"
