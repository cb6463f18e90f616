"""What a rank tells the others about a row: 64-bit words, integers only, so that no id or score is rounded.

    key    = score, as a 32-bit integer in the order of the fp32 values | 0x7fffffff - id
    masses = lse, fp32 bits                                            | logprob, fp32 bits
    draw   = lse, fp32 bits                                            | id

The largest signed key is the best score and, of equals, the lowest id: a comparison, whatever the order in
which words arrive. A bad row (score +inf, or above it the NaN of a word that never came) beats everything, a
shard without an allowed id (score -inf) nothing; all mean id -1, whatever the low half holds. The kernel for
Hopper makes the same keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ID = (1 << 31) - 1
_INFINITY = 0x7F800000  # as bits and so in the order of scores; -inf is -0x7F800001
_LOW = 0xFFFFFFFF


def pack_key(score: Tensor, ids: Tensor) -> Tensor:
    """score fp32 (no NaN), ids int64 in [-1, 2**31), same shape -> int64."""
    bits = (score + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return (ordered << 32) | (MAX_ID - ids)


def key_ids(key: Tensor) -> Tensor:
    """The ids, int64, -1 for a bad row or one without an allowed id."""
    score = key >> 32
    return (MAX_ID - (key & _LOW)).masked_fill((score >= _INFINITY) | (score == -_INFINITY - 1), -1)


def key_scores(key: Tensor) -> Tensor:
    """The scores, fp32."""
    ordered = (key >> 32).to(torch.int32)
    return torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)


def pack_bits(high: Tensor, low: Tensor) -> Tensor:
    """Two fp32 tensors of one shape -> int64, bit for bit."""
    return pack_words(high, low.contiguous().view(torch.int32))


def pack_words(high: Tensor, low: Tensor) -> Tensor:
    """fp32 bits above an integer in [-2**31, 2**31) of the same shape -> int64."""
    return (high.contiguous().view(torch.int32).to(torch.int64) << 32) | (low.to(torch.int64) & _LOW)


def high_bits(word: Tensor) -> Tensor:
    """The fp32 value in the high half."""
    return (word >> 32).to(torch.int32).view(torch.float32)


def low_bits(word: Tensor) -> Tensor:
    """The fp32 value in the low half."""
    return _low_signed(word).view(torch.float32)


def low_ids(word: Tensor) -> Tensor:
    """The signed integer in the low half, int64."""
    return _low_signed(word).to(torch.int64)


def _low_signed(word: Tensor) -> Tensor:
    return (((word & _LOW) ^ (1 << 31)) - (1 << 31)).to(torch.int32)
