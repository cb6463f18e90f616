"""Several processes of one command: ranks of our own on this machine, or those that torchrun has started.

The process that a user starts becomes a supervisor: it runs the same command once for each rank, with its
place in the environment, and imports nothing heavy itself. Rank 0 alone writes to the terminal.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsample_cli.errors import FsampleError, UsageError

PLACE = "FSAMPLE_RANK"  # "rank/size/file of the store", for ranks that `supervise` starts
GRACE_S = 5.0  # how long rank 0 may take to say itself what went wrong on another rank
END_S = 20.0  # how long the others may take after rank 0: a profiler writes down what it saw of them


@dataclass(frozen=True)
class Place:
    """Which rank this process is. `store` is a file that the ranks meet at; None under torchrun."""

    rank: int
    size: int
    local_rank: int
    store: str | None


def place(tp: int) -> Place | None:
    """This process's place among `tp` ranks, or None where it still has to start them.

    Raises UsageError where torchrun started another number of them.
    """
    if PLACE in os.environ:
        own, of, store = os.environ[PLACE].split("/", 2)
        return Place(int(own), int(of), int(own), store)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    size = int(os.environ["WORLD_SIZE"])
    if size != tp:
        raise UsageError(f"--tp must be the number of ranks that torchrun started, {size}, got {tp}")
    return Place(int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), None)


def runs_here(tp: int) -> bool:
    """Whether this process is to run the command itself: alone, or as one of several ranks."""
    return tp == 1 or place(tp) is not None


def supervise(tp: int, command: Sequence[str] | None = None, *, quiet: bool = False) -> int:
    """Run the command line of this process as `tp` ranks and return rank 0's exit code.

    Says so first, unless `quiet`: until a rank says something, seconds pass.

    When another rank fails, the rest is ended and its last words are raised as an FsampleError.
    """
    if not quiet:
        print(f"fsample: starting {tp} ranks", file=sys.stderr)
    words = [sys.executable, "-m", "fsample_cli", *sys.argv[1:]] if command is None else list(command)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.txt" for rank in range(tp)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(tp):
                env = {**os.environ, PLACE: f"{rank}/{tp}/{folder}/store"}
                if rank == 0:
                    ranks.append(subprocess.Popen(words, env=env))
                    continue
                with logs[rank].open("wb") as log:
                    ranks.append(subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=log))
            return _wait(ranks, logs)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> int:
    deadline: float | None = None
    while True:
        codes = [process.poll() for process in ranks]
        if codes[0] is not None:
            end = time.monotonic() + (END_S if codes[0] == 0 else 0)
            while time.monotonic() < end and any(process.poll() is None for process in ranks):
                time.sleep(0.02)
            return codes[0] if codes[0] >= 0 else 128 - codes[0]
        failed = next((rank for rank, code in enumerate(codes) if code not in (None, 0)), None)
        if failed is not None:
            deadline = deadline or time.monotonic() + GRACE_S
            if time.monotonic() > deadline:
                lines = logs[failed].read_text(errors="replace").strip().splitlines()
                last = lines[-1].removeprefix("fsample: ") if lines else f"exit code {codes[failed]}"
                raise FsampleError(f"rank {failed} of {len(ranks)} ended: {last}")
        time.sleep(0.02)
