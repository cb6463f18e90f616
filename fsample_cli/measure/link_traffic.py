"""Bytes that a tensor-parallel step sends over the link, and the times they allow: plain arithmetic.

R ranks hold V / R rows of the head each, rounded up; B rows, D hidden size, e bytes an element. A rank

    reads       shard  = ceil(V / R) D e + B D e
    gather      writes B ceil(V / R) e of logits, receives (R - 1) times as much, and reads all B V e
    candidates  receives (R - 1) 8 B: one 64-bit word of score and id a row and rank

Time of a rank: the longer of its memory traffic and its product, and the link after it. Nothing overlaps and
no latency is counted, so a small batch is held to a few microseconds too little.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsample_cli.hardware import Gpu, ceilings
from fsample_cli.workloads import BYTES_PER_ELEMENT, Workload

WORD = 8


@dataclass(frozen=True)
class LinkStep:
    """What one rank does in one step; bytes, and microseconds where the GPU's link is known."""

    shard_bytes: int
    gather_bytes: int  # received, logits in the dtype of the head
    candidate_bytes: int  # received
    gather_us: float | None
    candidates_us: float | None


def link_step(workload: Workload, batch: int, ranks: int, gpu: Gpu | None) -> LinkStep:
    V, D, e = workload.vocab, workload.hidden, BYTES_PER_ELEMENT[workload.dtype]
    held = -(-V // ranks)
    shard = held * D * e + batch * D * e
    gather = (ranks - 1) * batch * held * e
    candidates = (ranks - 1) * batch * WORD
    if gpu is None or gpu.link_bandwidth is None:
        return LinkStep(shard, gather, candidates, None, None)
    bandwidth, rate = ceilings(gpu, workload.dtype)
    product = 2 * batch * held * D / rate
    logits = batch * (held + V) * e / bandwidth  # written once where they are made, read once by each rank
    after_gather = gather / gpu.link_bandwidth + logits
    head = max(shard / bandwidth, product)
    return LinkStep(
        shard,
        gather,
        candidates,
        1e6 * (head + after_gather),
        1e6 * (head + candidates / gpu.link_bandwidth),
    )


def ranks_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most` itself."""
    return tuple(sorted({1 << k for k in range(most.bit_length()) if 1 << k <= most} | {most}))
