"""The two shapes that are passed around: a checked request (`Problem`), what comes back (`SampleResult`).

Dimension letters, the same in every file: B rows, V vocabulary, D hidden size, K samples a row, T tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

MIN_TEMPERATURE = 2.0**-64  # below it a row is greedy: y / temperature would leave the range of fp32

Noise = Literal["grouped", "element", "online"]
Math = Literal["fast", "exact"]
Implementation = Literal["auto", "reference", "triton", "hopper", "unfused"]


class SampleResult(NamedTuple):
    """What `sample` and `sample_logits` return; fields that were not asked for are None."""

    ids: Tensor  # [B, K] int64; -1 in a row with a NaN or +inf logit, or with no allowed token
    logprob: Tensor | None = None  # [B, K] fp32, natural log, of the drawn id under p
    lse: Tensor | None = None  # [B] fp32, natural log-sum-exp of y / temperature
    logits: Tensor | None = None  # [B, V] fp32, y before temperature, -inf where forbidden
    implementation: str = ""  # what ran: "reference", "triton", "hopper", "unfused"


class Compiled(NamedTuple):
    """One kernel that `warm_up` or `compile_only` made ready."""

    kernel: str
    seconds: float  # wall clock on its thread
    cached: bool  # True: read from Triton's cache on disk


@dataclass(frozen=True)
class Problem:
    """One checked call. `validation` builds it; every implementation reads it and checks nothing again.

    Tensors are on one device. A field that a caller may give as a number or as a tensor stays what it was, so
    that a number costs no launch and a device tensor no synchronisation.
    """

    hidden: Tensor | None  # [B, D] bf16, fp16 or fp32, any strides; None when logits are given
    weight: Tensor | None  # [V, D] same dtype
    logits: Tensor | None  # [B, V] for sample_logits, else None
    temperature: float | Tensor  # number, or [B] fp32
    seed: int | Tensor  # 0 <= int < 2**64; int64 0-d (serves the batch, row index enters the counter) or [B]
    position: int | Tensor  # 0 <= int < 2**32; int64 0-d or [B]
    num_samples: int
    head_bias: Tensor | None  # [V] floating
    logit_scale: float
    softcap: float | None
    logit_bias: Tensor | None  # [V] or [B, V] floating
    sparse_bias: tuple[Tensor, Tensor, Tensor] | None  # rows, ids int64 [N], values fp32 [N]; repeats add
    mask: Tensor | None  # bool [V] or [B, V], True = allowed
    bitmask: Tensor | None  # int32 [B, >= ceil(vocab_size / 32)], bit = 1: allowed
    vocab_size: int  # ids at or above it are never drawn; bound on global ids
    # Global id of weight's row 0, 0 unless the head is a shard. `head_bias` and `logits` belong to the shard;
    # every other tensor over the vocabulary is read by global id.
    first_id: int
    noise: Noise
    math: Math
    want_logprob: bool
    want_lse: bool
    store_logits: bool

    @property
    def num_rows(self) -> int:
        source = self.hidden if self.hidden is not None else self.logits
        assert source is not None
        return source.shape[0]

    @property
    def num_columns(self) -> int:
        """Vocabulary rows held here: V, or the length of the shard."""
        source = self.weight if self.weight is not None else self.logits
        assert source is not None
        return source.shape[0] if self.weight is not None else source.shape[1]
