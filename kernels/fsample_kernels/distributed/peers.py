"""Whether the ranks of a group can write into each other's memory: found out once, the same on every rank."""

from __future__ import annotations

import importlib.util
import os
import socket
import zlib
from pathlib import Path

import torch

from .collectives import Team

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of Linux; hosts of a cluster may share a name
LACKS = (
    "",
    "needs NVIDIA GPUs and Triton, rank {rank} lacks one of them",
    "needs GPUs that write into each other's memory, which NCCL_P2P_DISABLE=1 switches off on rank {rank}",
)


def why_not(team: Team, device: torch.device) -> str:
    """The reason why exchange="p2p" cannot be had, or "": the same on every rank. A collective call."""
    able = torch.version.hip is None and importlib.util.find_spec("triton") is not None
    lacks = 2 * (os.environ.get("NCCL_P2P_DISABLE") == "1") if able else 1
    own = torch.tensor([host(), device.index, lacks], dtype=torch.int64, device=device)
    table = team.gather(own).tolist()
    indices = [index for _, index, _ in table]
    reach = [
        # Ranks that each see one GPU all call it 0: then the rendezvous has to tell.
        int(len(set(indices)) < team.size or peer == device.index or can_reach(device.index, peer))
        for peer in indices
    ]
    reached = team.gather(torch.tensor(reach, dtype=torch.int64, device=device)).tolist()
    for rank in range(team.size):
        if table[rank][2]:
            return LACKS[table[rank][2]].format(rank=rank)
        for peer in range(team.size):
            if table[rank][0] != table[peer][0]:
                return f"needs all ranks on one host, ranks {rank} and {peer} are on two"
            if not reached[rank][peer]:
                return (
                    f"needs GPUs that reach each other's memory, ranks {rank} and {peer} "
                    f"(GPUs {indices[rank]} and {indices[peer]}) do not"
                )
    return ""


def host() -> int:
    """The same for all processes of one host, another elsewhere."""
    try:
        boot = BOOT_ID.read_bytes()
    except OSError:
        boot = b""
    return zlib.crc32(socket.gethostname().encode() + boot)


def can_reach(device: int, peer: int) -> bool:
    return torch.cuda.can_device_access_peer(device, peer)
