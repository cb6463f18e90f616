"""Which ids each rank holds, and whether all ranks ask for the same draw: compared, not assumed."""

from __future__ import annotations

import struct

import torch

from ..validation import Shard
from ..words import MAX_ID
from .collectives import Team

_FIELDS = (  # every rank must give the same, the first two aside
    "rows of weight_shard", "first_id", "rows B of hidden", "hidden size D", "dtype", "num_samples",
    "want_logprob", "want_lse", "noise", "exchange", "vocab_size", "seed (given or not)", "seed", "position",
    "temperature",
)  # fmt: skip
Header = tuple[int, ...]


def agree(team: Team, header: Header, device: torch.device) -> Shard:
    """Compare the headers of all ranks and lay out the vocabulary.

    Without first_id, shards follow each other in the order of ranks; with it, it must say just that, so that
    a wrong offset is found here and not in the tokens.

    Raises ValueError, on every rank alike, naming the argument and what each rank gave; RankError when a rank
    does not take part.
    """
    table = team.gather(torch.tensor(header, dtype=torch.int64, device=device)).tolist()
    for at in range(2, len(_FIELDS)):
        given = [row[at] for row in table]
        if len(set(given)) > 1:
            raise ValueError(
                f"{_FIELDS[at]} must be the same on every rank, got {_by_rank(given)}; "
                "a call of `distributed.sample` is one draw that all ranks make together"
            )
    lengths, given_firsts = [row[0] for row in table], [row[1] for row in table]
    total = sum(lengths)
    if not 1 <= total <= MAX_ID:
        raise ValueError(f"the shards must hold 1 to 2**31 - 1 tokens together, got {_by_rank(lengths)}")
    firsts = [sum(lengths[:rank]) for rank in range(team.size)]
    for rank, given_first in enumerate(given_firsts):
        if given_first >= 0 and lengths[rank] and given_first != firsts[rank]:
            raise ValueError(
                f"first_id of rank {rank} must be {firsts[rank]}, the rows of the ranks before it, got "
                f"{given_first}; shards are contiguous and rise with the rank, lengths {_by_rank(lengths)}"
            )
    return Shard(firsts[team.rank], total)


def signed(value: object) -> int:
    """A host value as an int64 to compare. What is no number, or on a device, counts as equal."""
    if isinstance(value, int):
        bits = value % (1 << 64)
        return bits - (1 << 64) if bits >> 63 else bits
    if isinstance(value, float):
        return int.from_bytes(struct.pack("<d", value), "little", signed=True)
    return -1


def _by_rank(values: list[int]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
