"""Turn arguments into a checked `Problem`, or raise `ValueError` with argument, rule, value and next step.

Nothing here waits for a GPU: shapes, dtypes and host values are checked, and the values of device tensors
are left to the implementations, which answer a bad one with id -1 in its row.
"""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from .bias_forms import LogitBias, split_logit_bias
from .checks import (
    FLOATING,
    HALF_OR_SINGLE,
    batch_size,
    bias_tensor,
    check_tensor,
    dtype_name,
    either,
    flag,
    integer,
    matrix,
    number,
    one_of,
    per_row,
    same_device,
    sample_count,
    seed_bits,
    shape_of,
    shown,
    single,
    steps,
)
from .types import MIN_TEMPERATURE, Implementation, Math, Noise, Problem

MAX_COLUMNS = 2**31 - 4096  # kernels count ids in 32 bits, past the last of a tile too
SOFTCAPS = (2.0**-126, 2.0**126)  # within fp32's normal numbers, and so is what is divided by them


class Shard(NamedTuple):
    """Which part of a vocabulary of `total` ids a rank's weight holds: its row 0 is token `first_id`."""

    first_id: int
    total: int


def head_problem(
    hidden: Tensor,
    weight: Tensor,
    *,
    shard: Shard | None = None,
    temperature: float | Tensor,
    seed: int | Tensor | None,
    position: int | Tensor,
    num_samples: int,
    head_bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    logit_bias: LogitBias | None,
    mask: Tensor | None,
    vocab_size: int | None,
    noise: Noise,
    math: Math,
    want_logprob: bool,
    want_lse: bool,
    store_logits: bool,
) -> Problem:
    """Check a call of `sample`. hidden [B, D], weight [V, D]; the rest as `api.sample` documents it.

    With `shard`, weight and head_bias are a rank's part of the head, perhaps empty, and V is `shard.total`.
    """
    head = "weight" if shard is None else "weight_shard"
    for name, tensor in (("hidden", hidden), (head, weight)):
        matrix(name, tensor)
    if hidden.dtype != weight.dtype or hidden.dtype not in HALF_OR_SINGLE:
        raise ValueError(
            f"hidden and {head} must have one dtype out of bfloat16, float16, float32, got "
            f"{dtype_name(hidden.dtype)} and {dtype_name(weight.dtype)}; convert them first, a quantised "
            "head with its scales"
        )
    same_device(head, weight, hidden)
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must have shape [B, D] with D = {weight.shape[1]} (from {head}), "
            f"got {shape_of(hidden)}; {head} has one row a token"
        )
    if hidden.shape[1] == 0:
        raise ValueError("hidden must have at least one feature, got D = 0; pass [B, D] with D >= 1")
    return _problem(
        hidden, weight, None, temperature, seed, position, num_samples, head_bias, logit_scale, softcap,
        logit_bias, mask, vocab_size, noise, math, want_logprob, want_lse, store_logits, shard,
    )  # fmt: skip


def logits_problem(
    logits: Tensor,
    *,
    temperature: float | Tensor,
    seed: int | Tensor | None,
    position: int | Tensor,
    num_samples: int,
    logit_scale: float,
    softcap: float | None,
    logit_bias: LogitBias | None,
    mask: Tensor | None,
    vocab_size: int | None,
    noise: Noise,
    math: Math,
    want_logprob: bool,
    want_lse: bool,
) -> Problem:
    """Check a call of `sample_logits`. logits [B, V] bf16, fp16 or fp32."""
    matrix("logits", logits)
    if logits.dtype not in HALF_OR_SINGLE:
        raise ValueError(
            f"logits must be bfloat16, float16 or float32, got {dtype_name(logits.dtype)}; "
            "convert with logits.float()"
        )
    return _problem(
        None, None, logits, temperature, seed, position, num_samples, None, logit_scale, softcap, logit_bias,
        mask, vocab_size, noise, math, want_logprob, want_lse, False,
    )  # fmt: skip


def implementation_name(name: str) -> Implementation:
    """Check the name of an implementation."""
    return one_of("implementation", name, get_args(Implementation))


def _problem(
    hidden: Tensor | None,
    weight: Tensor | None,
    logits: Tensor | None,
    temperature: float | Tensor,
    seed: int | Tensor | None,
    position: int | Tensor,
    num_samples: int,
    head_bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    logit_bias: LogitBias | None,
    mask: Tensor | None,
    vocab_size: int | None,
    noise: Noise,
    math: Math,
    want_logprob: bool,
    want_lse: bool,
    store_logits: bool,
    shard: Shard | None = None,
) -> Problem:
    rows = logits if logits is not None else hidden
    assert rows is not None
    num_rows = rows.shape[0]
    held = rows.shape[1] if weight is None else weight.shape[0]
    first_id, num_columns = (0, held) if shard is None else shard
    source = "logits" if weight is None else "weight" if shard is None else "weight_shard of all ranks"
    if num_columns == 0:
        raise ValueError(f"{source} must hold at least one token, got V = 0; pass V >= 1")
    if num_columns > MAX_COLUMNS:
        raise ValueError(
            f"{source} must hold at most 2**31 - 4096 tokens, got V = {num_columns}; pass fewer of them"
        )
    batch_size(num_rows)
    bound = id_bound(vocab_size, num_columns, source)
    if head_bias is not None:
        bias_tensor("head_bias", head_bias, rows, [(held,)])
    bool_mask, bitmask = _masks(mask, rows, num_rows, num_columns, bound)
    dense_bias, sparse_bias = split_logit_bias(logit_bias, rows, num_rows, num_columns, bound)
    scale, samples = single("logit_scale", logit_scale), sample_count(num_samples)
    if softcap is not None and not SOFTCAPS[0] <= number("softcap", softcap) <= SOFTCAPS[1]:
        raise ValueError(
            f"softcap must be above 0, in [2**-126, 2**126], got {shown(softcap)}; "
            "leave it out (None) for no soft-cap"
        )
    return Problem(
        hidden=hidden,
        weight=weight,
        logits=logits,
        temperature=_temperature(temperature, rows, num_rows),
        seed=_seed(seed, rows, num_rows),
        position=steps(position, rows, num_rows),
        num_samples=samples,
        head_bias=head_bias,
        logit_scale=scale,
        softcap=None if softcap is None else float(softcap),
        logit_bias=dense_bias,
        sparse_bias=sparse_bias,
        mask=bool_mask,
        bitmask=bitmask,
        vocab_size=bound,
        first_id=first_id,
        noise=one_of("noise", noise, get_args(Noise)),
        math=one_of("math", math, get_args(Math)),
        want_logprob=flag("want_logprob", want_logprob),
        want_lse=flag("want_lse", want_lse),
        store_logits=flag("store_logits", store_logits),
    )


def id_bound(vocab_size: int | None, num_columns: int, source: str) -> int:
    """The number of ids that may be drawn, of the V that the source has."""
    bound = num_columns if vocab_size is None else integer("vocab_size", vocab_size)
    if not 1 <= bound <= num_columns:
        raise ValueError(
            f"vocab_size must be in [1, V] with V = {num_columns} (from {source}), got {shown(bound)}; "
            "it is the number of ids that may be drawn"
        )
    return bound


def _temperature(value: float | Tensor, rows: Tensor, num_rows: int) -> float | Tensor:
    if isinstance(value, Tensor):
        per_row("temperature", value, rows, num_rows, FLOATING)
        return value.to(torch.float32).expand(num_rows)
    given = number("temperature", value)
    if not given >= 0:
        raise ValueError(f"temperature must be 0 (greedy) or above, got {shown(value)}")
    # Rounded to fp32, as a tensor's entries are: a number and a tensor of it draw the same tokens.
    single = ctypes.c_float(given).value
    if math.isinf(single):
        raise ValueError(
            f"temperature must be finite in fp32, got {shown(value)}; for a flat draw use logit_scale=0"
        )
    return single if single >= MIN_TEMPERATURE else 0.0


def _seed(value: int | Tensor | None, rows: Tensor, num_rows: int) -> int | Tensor:
    if value is None:
        # The device's own generator: torch.manual_seed rules it, and a captured CUDA graph advances it.
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=rows.device)
    return seed_bits(value, rows, num_rows)


def _masks(
    mask: Tensor | None, rows: Tensor, num_rows: int, num_columns: int, bound: int
) -> tuple[Tensor | None, Tensor | None]:
    """(bool mask, None), (None, packed mask) or (None, None)."""
    if mask is None:
        return None, None
    check_tensor("mask", mask)
    same_device("mask", mask, rows)
    if mask.dtype == torch.bool:
        widths = sorted({num_columns, bound})
        if not (
            mask.dim() in (1, 2) and mask.shape[-1] in widths and tuple(mask.shape[:-1]) in ((), (num_rows,))
        ):
            raise ValueError(
                f"a bool mask must have shape [V] or [B, V] with B = {num_rows} and {either(widths)} "
                f"columns (V or vocab_size), got {shape_of(mask)}; True allows an id"
            )
        return mask, None
    if mask.dtype == torch.int32:
        widths = sorted({-(-num_columns // 32), -(-bound // 32)})
        if not (mask.dim() == 2 and mask.shape[0] == num_rows and mask.shape[1] in widths):
            raise ValueError(
                f"a packed mask must have shape [B, ceil(V/32)] with B = {num_rows} and {either(widths)} "
                f"words (for V or vocab_size), got {shape_of(mask)}; bit i of word w allows id 32 w + i"
            )
        return None, mask
    raise ValueError(
        f"mask must be bool or packed int32, got {dtype_name(mask.dtype)}; convert with mask.bool()"
    )
