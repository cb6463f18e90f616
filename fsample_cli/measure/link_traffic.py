"""Bytes that a tensor-parallel step sends over the link, and the times they allow: plain arithmetic.

R ranks hold W rows of the head each, the shards of `bench --tp`: V / R rounded up to a multiple of 128.
B rows, D hidden size, e bytes an element. A rank

    reads       shard  = W D e + B D e
    gather      writes B W e of logits, receives (R - 1) times as much, and reads all R B W e
    candidates  receives (R - 1) 8 B: one 64-bit word of score and id a row and rank, through NCCL
    p2p         receives (R - 1) 16 B: the word as two tagged halves of 8 bytes (with logprob twice that)

Time of a rank: the longer of its memory traffic and its product, then the link, then what an exchange costs
whatever its size, measured at two ranks and taken for any number. Nothing overlaps, and the draw from
gathered logits is one read of them: less than any sampler takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsample_cli.hardware import Gpu, ceilings
from fsample_cli.shards import width_of
from fsample_cli.workloads import BYTES_PER_ELEMENT, Workload

WORD = 8
P2P_WORD = 16
# Medians of fused:p2p and fused:candidates minus the shard's draw alone, the middle one of three batch sizes.
P2P_US = 2.4
NCCL_US = 43.5
MEASURED = "profiles/h200/2026-11-30-adab702-bench-tp2-graph-llama3-70b.json"


@dataclass(frozen=True)
class LinkStep:
    """What one rank does in one step."""

    shard_bytes: int
    gather_bytes: int  # received, logits in the dtype of the head
    candidate_bytes: int  # received
    p2p_bytes: int  # received
    gather_us: float
    candidates_us: float
    p2p_us: float


def link_step(workload: Workload, batch: int, ranks: int, gpu: Gpu) -> LinkStep:
    """For a GPU whose link bandwidth is known."""
    assert gpu.link_bandwidth is not None
    D, e = workload.hidden, BYTES_PER_ELEMENT[workload.dtype]
    held, others = min(workload.vocab, width_of(workload.vocab, ranks)), ranks - 1
    shard = held * D * e + batch * D * e
    gather, words, halves = (others * batch * size for size in (held * e, WORD, P2P_WORD))
    bandwidth, rate = ceilings(gpu, workload.dtype)
    head = 1e6 * max(shard / bandwidth, 2 * batch * held * D / rate)
    logits = 1e6 * batch * (held + ranks * held) * e / bandwidth  # written where they are made, read by each
    link = 1e6 / gpu.link_bandwidth
    p2p, nccl = (P2P_US, NCCL_US) if others else (0.0, 0.0)
    return LinkStep(
        shard,
        gather,
        words,
        halves,
        gather_us=head + gather * link + logits + nccl,
        candidates_us=head + words * link + nccl,
        p2p_us=head + halves * link + p2p,
    )


def ranks_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most` itself."""
    return tuple(sorted({1 << k for k in range(most.bit_length()) if 1 << k <= most} | {most}))
