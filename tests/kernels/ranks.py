"""Run a function as several ranks of a process group, a process each, and collect what they return.

Processes are forked from a server that has imported torch already, so that eight of them start in a moment.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["fsample_kernels.distributed", "tests.kernels.ranks"])

Job = Callable[..., Any]  # (rank, size, *arguments) -> anything that pickles
LOST = "no answer"  # in place of the result of a rank that died or hung


def run_ranks(
    size: int,
    job: Job,
    *arguments: object,
    timeout_s: float = 60,
    wait_s: float = 120,
    backend: str = "gloo",
    tcp: bool = False,
) -> list[Any]:
    """What each rank returned; for one that raised, its exception; for one that never answered, LOST.

    timeout_s: of the process group; wait_s: for all ranks together; tcp: rank 0 hosts the group's store, a
    file else. `job` must be a function of an importable module. Tensors travel by value: the memory that
    torch would share goes with the process that made it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packed = pickle.dumps((job, arguments))
        store = f"tcp://127.0.0.1:{free_port()}" if tcp else f"file://{name}/store"
        processes = [
            _context.Process(target=_rank, args=(rank, size, name, store, timeout_s, backend, packed))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + wait_s
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        found = [folder / f"{rank}.answer" for rank in range(size)]
        return [pickle.loads(path.read_bytes()) if path.exists() else LOST for path in found]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(
    rank: int, size: int, folder: str, store: str, timeout_s: float, backend: str, packed: bytes
) -> None:
    torch.set_num_threads(1)
    device = None
    if backend == "nccl":
        # No multicast over NVLink: a process that dies with it in use can take a shared host out of service.
        os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )
    job, arguments = pickle.loads(packed)
    try:
        answer = job(rank, size, *arguments)
    except (ValueError, RuntimeError, TypeError) as error:
        answer = error
    (Path(folder) / f"{rank}.answer").write_bytes(pickle.dumps(answer))
    dist.destroy_process_group()
