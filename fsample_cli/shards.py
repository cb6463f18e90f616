"""How a head of V rows is split over R ranks: plain arithmetic. Shards are as long as 128 divides them, the
last ones shorter.
"""

from __future__ import annotations

from fsample_cli.errors import UsageError

BLOCK = 128  # shards that start at its multiples draw the same tokens for any number of ranks


def width_of(vocab: int, size: int) -> int:
    """Rows of a full shard."""
    return -(-vocab // (size * BLOCK)) * BLOCK


def rows_of(vocab: int, rank: int, size: int) -> slice:
    """The rows of the head that a rank holds; none where the vocabulary is too short for all of them."""
    width = width_of(vocab, size)
    return slice(min(vocab, rank * width), min(vocab, (rank + 1) * width))


def check_shards(vocab: int, size: int) -> None:
    """Refuse ranks without a row, whose product cannot be timed. Raises UsageError."""
    ranks = -(-vocab // width_of(vocab, size))
    if ranks < size:
        raise UsageError(
            f"--tp must leave each rank a row of the head, {BLOCK} rows or more to all but the last, "
            f"got {size} ranks for V = {vocab:,}",
            f"try --tp {ranks}" if ranks > 1 else "leave out --tp",
        )
