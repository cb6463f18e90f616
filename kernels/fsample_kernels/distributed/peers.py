"""Whether the ranks of a group can write into each other's memory: found out once, the same on every rank."""

from __future__ import annotations

import importlib.util
import socket
import zlib

import torch

from .collectives import Team


def why_not(team: Team, device: torch.device) -> str:
    """The reason why exchange="p2p" cannot be had, or "": the same on every rank. A collective call."""
    able = torch.version.hip is None and importlib.util.find_spec("triton") is not None
    host = zlib.crc32(socket.gethostname().encode())
    own = torch.tensor([host, device.index, able], dtype=torch.int64, device=device)
    table = team.gather(own).tolist()
    indices = [index for _, index, _ in table]
    reach = [
        # Ranks that each see one GPU all call it 0: then the rendezvous has to tell.
        int(len(set(indices)) < team.size or peer == device.index or can_reach(device.index, peer))
        for peer in indices
    ]
    reached = team.gather(torch.tensor(reach, dtype=torch.int64, device=device)).tolist()
    for rank in range(team.size):
        if not table[rank][2]:
            return f"needs NVIDIA GPUs and Triton, rank {rank} lacks one of them"
        for peer in range(team.size):
            if table[rank][0] != table[peer][0]:
                return f"needs all ranks on one host, ranks {rank} and {peer} are on two"
            if not reached[rank][peer]:
                return (
                    f"needs GPUs that reach each other's memory, ranks {rank} and {peer} "
                    f"(GPUs {indices[rank]} and {indices[peer]}) do not"
                )
    return ""


def can_reach(device: int, peer: int) -> bool:
    return torch.cuda.can_device_access_peer(device, peer)
