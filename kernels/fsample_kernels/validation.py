"""Turn arguments into a checked `Problem`, or raise `ValueError` with argument, rule, value and next step.

Nothing here waits for a GPU: shapes, dtypes and host values are checked, and the values of device tensors
are left to the implementations, which answer a bad one with id -1 in its row.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from .noise import MAX_POSITION, MAX_ROWS
from .types import MIN_TEMPERATURE, Implementation, Math, Noise, Problem

HALF_OR_SINGLE = (torch.bfloat16, torch.float16, torch.float32)
FLOATING = (*HALF_OR_SINGLE, torch.float64)

Choice = TypeVar("Choice")
SparseTriple = tuple[Tensor, Tensor, Tensor] | tuple[Sequence[int], Sequence[int], Sequence[float]]
LogitBias = Tensor | SparseTriple | Mapping[int, float] | Sequence[Mapping[int, float]]


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
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        _matrix(name, tensor)
    if hidden.dtype != weight.dtype or hidden.dtype not in HALF_OR_SINGLE:
        raise ValueError(
            "hidden and weight must have one dtype out of bfloat16, float16, float32, "
            f"got {_short(hidden.dtype)} and {_short(weight.dtype)}; convert them first, a quantised head "
            "with its scales"
        )
    _same_device("weight", weight, hidden)
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must have shape [B, D] with D = {weight.shape[1]} (from weight), got {_shape(hidden)}; "
            "weight is [V, D], one row a token"
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
    _matrix("logits", logits)
    if logits.dtype not in HALF_OR_SINGLE:
        raise ValueError(
            f"logits must be bfloat16, float16 or float32, got {_short(logits.dtype)}; "
            "convert with logits.float()"
        )
    return _problem(
        None, None, logits, temperature, seed, position, num_samples, None, logit_scale, softcap, logit_bias,
        mask, vocab_size, noise, math, want_logprob, want_lse, False,
    )  # fmt: skip


def implementation_name(name: str) -> Implementation:
    """Check the name of an implementation."""
    return _choice("implementation", name, get_args(Implementation))


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
    source = "logits" if weight is None else "weight"
    if num_columns == 0:
        raise ValueError(f"{source} must hold at least one token, got V = 0; pass V >= 1")
    if num_rows > MAX_ROWS:
        raise ValueError(
            f"the batch must have at most 2**24 rows, got B = {num_rows}; split it over several calls"
        )
    bound = num_columns if vocab_size is None else _integer("vocab_size", vocab_size)
    if not 1 <= bound <= num_columns:
        raise ValueError(
            f"vocab_size must be in [1, V] with V = {num_columns} (from {source}), got {bound}; "
            "it is the number of ids that may be drawn"
        )
    if head_bias is not None:
        _bias_tensor("head_bias", head_bias, rows, [(held,)])
    bool_mask, bitmask = _masks(mask, rows, num_rows, num_columns, bound)
    dense_bias, sparse_bias = _logit_bias(logit_bias, rows, num_rows, num_columns, bound)
    scale = _number("logit_scale", logit_scale)
    if softcap is not None and not _number("softcap", softcap) > 0:
        raise ValueError(f"softcap must be above 0, got {softcap}; leave it out (None) for no soft-cap")
    samples = _integer("num_samples", num_samples)
    if not 0 <= samples <= 1 << 32:
        raise ValueError(f"num_samples must be in [0, 2**32], got {samples}; 0 returns an empty result")
    return Problem(
        hidden=hidden,
        weight=weight,
        logits=logits,
        temperature=_temperature(temperature, rows, num_rows),
        seed=_seed(seed, rows, num_rows),
        position=_position(position, rows, num_rows),
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
        noise=_choice("noise", noise, get_args(Noise)),
        math=_choice("math", math, get_args(Math)),
        want_logprob=_flag("want_logprob", want_logprob),
        want_lse=_flag("want_lse", want_lse),
        store_logits=_flag("store_logits", store_logits),
    )


def _temperature(value: float | Tensor, rows: Tensor, num_rows: int) -> float | Tensor:
    if isinstance(value, Tensor):
        _per_row("temperature", value, rows, num_rows, FLOATING)
        return value.to(torch.float32).expand(num_rows)
    number = _number("temperature", value)
    if not number >= 0:
        raise ValueError(f"temperature must be 0 (greedy) or above, got {value}")
    # Rounded to fp32, as a tensor's entries are: a number and a tensor of it draw the same tokens.
    single = ctypes.c_float(number).value
    if math.isinf(single):
        raise ValueError(
            f"temperature must be finite in fp32, got {value}; for a flat draw use logit_scale=0"
        )
    return single if single >= MIN_TEMPERATURE else 0.0


def _seed(value: int | Tensor | None, rows: Tensor, num_rows: int) -> int | Tensor:
    if value is None:
        # The device's own generator: torch.manual_seed rules it, and a captured CUDA graph advances it.
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=rows.device)
    if isinstance(value, Tensor):
        _per_row("seed", value, rows, num_rows, (torch.int64,))
        return value
    number = _integer("seed", value)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"seed must fit 64 bits, in [-2**63, 2**64), got {number}; reduce it mod 2**64")
    return number % 2**64


def _position(value: int | Tensor, rows: Tensor, num_rows: int) -> int | Tensor:
    if isinstance(value, Tensor):
        _per_row("position", value, rows, num_rows, (torch.int32, torch.int64))
        return value.to(torch.int64)
    number = _integer("position", value)
    if not 0 <= number < MAX_POSITION:
        raise ValueError(
            f"position must be in [0, 2**32), got {number}; start a new seed instead of wrapping"
        )
    return number


def _masks(
    mask: Tensor | None, rows: Tensor, num_rows: int, num_columns: int, bound: int
) -> tuple[Tensor | None, Tensor | None]:
    """(bool mask, None), (None, packed mask) or (None, None)."""
    if mask is None:
        return None, None
    check_tensor("mask", mask)
    _same_device("mask", mask, rows)
    if mask.dtype == torch.bool:
        widths = sorted({num_columns, bound})
        if not (
            mask.dim() in (1, 2) and mask.shape[-1] in widths and tuple(mask.shape[:-1]) in ((), (num_rows,))
        ):
            raise ValueError(
                f"a bool mask must have shape [V] or [B, V] with B = {num_rows} and {_either(widths)} "
                f"columns (V or vocab_size), got {_shape(mask)}; True allows an id"
            )
        return mask, None
    if mask.dtype == torch.int32:
        widths = sorted({-(-num_columns // 32), -(-bound // 32)})
        if not (mask.dim() == 2 and mask.shape[0] == num_rows and mask.shape[1] in widths):
            raise ValueError(
                f"a packed mask must have shape [B, ceil(V/32)] with B = {num_rows} and {_either(widths)} "
                f"words (for V or vocab_size), got {_shape(mask)}; bit i of word w allows id 32 w + i"
            )
        return None, mask
    raise ValueError(f"mask must be bool or packed int32, got {_short(mask.dtype)}; convert with mask.bool()")


def _logit_bias(
    bias: LogitBias | None, rows: Tensor, num_rows: int, num_columns: int, bound: int
) -> tuple[Tensor | None, tuple[Tensor, Tensor, Tensor] | None]:
    """(dense, None), (None, sparse triple) or (None, None)."""
    if bias is None:
        return None, None
    if isinstance(bias, Tensor):
        _bias_tensor("logit_bias", bias, rows, [(num_columns,), (num_rows, num_columns)])
        return bias, None
    if isinstance(bias, Mapping):
        every_row = [bias] * num_rows
        _check_host_triples([0] * len(bias), list(bias), list(bias.values()), max(num_rows, 1), bound)
        return None, _from_mappings(every_row, rows)
    if isinstance(bias, Sequence) and not isinstance(bias, str):
        if all(isinstance(entry, Mapping) for entry in bias) and (len(bias) or not num_rows):
            if len(bias) != num_rows:
                raise ValueError(
                    f"logit_bias as a sequence of mappings must have one a row, B = {num_rows}, "
                    f"got {len(bias)}; pass one mapping alone to serve every row"
                )
            mappings: list[Mapping[int, float]] = [entry for entry in bias if isinstance(entry, Mapping)]
            for row, mapping in enumerate(mappings):
                _check_host_triples(
                    [row] * len(mapping), list(mapping), list(mapping.values()), num_rows, bound
                )
            return None, _from_mappings(mappings, rows)
        if len(bias) == 3:
            return None, _triple(bias, rows, num_rows, bound)
    raise ValueError(
        "logit_bias must be a tensor [V] or [B, V], a triple (rows, ids, values), a mapping {id: value} "
        f"or a sequence of B mappings, got {type(bias).__name__}"
    )


def _triple(bias: Sequence[object], rows: Tensor, num_rows: int, bound: int) -> tuple[Tensor, Tensor, Tensor]:
    row, ids, values = bias
    if isinstance(row, Tensor) and isinstance(ids, Tensor) and isinstance(values, Tensor):
        for name, tensor, dtypes in (
            ("logit_bias rows", row, (torch.int32, torch.int64)),
            ("logit_bias ids", ids, (torch.int32, torch.int64)),
            ("logit_bias values", values, FLOATING),
        ):
            _same_device(name, tensor, rows)
            if tensor.dtype not in dtypes or tensor.shape != (ids.numel(),):
                raise ValueError(
                    f"{name} must have shape [N] with N = {ids.numel()} (from ids) and dtype "
                    f"{_either(dtypes)}, got {_shape(tensor)} {_short(tensor.dtype)}"
                )
        return row.to(torch.int64), ids.to(torch.int64), values.to(torch.float32)
    for entry in bias:
        if isinstance(entry, (Tensor, str)) or not isinstance(entry, Sequence):
            raise ValueError(
                "logit_bias as a triple must be three tensors or three sequences of numbers, got "
                f"{', '.join(type(part).__name__ for part in bias)}; convert all three"
            )
    host = tuple(list(entry) for entry in bias if isinstance(entry, Sequence))
    if len({len(entry) for entry in host}) != 1:
        raise ValueError(
            "logit_bias rows, ids and values must be equally long, "
            f"got {', '.join(str(len(part)) for part in host)} entries"
        )
    _check_host_triples(host[0], host[1], host[2], num_rows, bound)
    return _upload(host[0], host[1], host[2], rows)


def _from_mappings(mappings: Sequence[Mapping[int, float]], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = [row for row, mapping in enumerate(mappings) for _ in mapping]
    ids = [token for mapping in mappings for token in mapping]
    values = [value for mapping in mappings for value in mapping.values()]
    return _upload(rows, ids, values, like)


def _upload(
    rows: list[int], ids: list[int], values: list[float], like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Host lists on the device, through pinned memory: a copy from pageable memory waits for the stream."""
    pin = like.device.type == "cuda"
    host = (
        torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=pin),
        torch.tensor(ids, dtype=torch.int64, device="cpu", pin_memory=pin),
        torch.tensor(values, dtype=torch.float32, device="cpu", pin_memory=pin),
    )
    row, token, value = (tensor.to(like.device, non_blocking=True) for tensor in host)
    return row, token, value


def _check_host_triples(
    rows: Sequence[object], ids: Sequence[object], values: Sequence[object], num_rows: int, bound: int
) -> None:
    bad_rows = [row for row in rows if not _is_index(row, num_rows)]
    if bad_rows:
        raise ValueError(f"logit_bias rows must be integers in [0, {num_rows}), got {_some(bad_rows)}")
    bad_ids = [token for token in ids if not _is_index(token, bound)]
    bad_values = [value for value in values if not _is_fp32(value)]
    if bad_ids or bad_values:
        wrong = [f"ids {_some(bad_ids)}"] if bad_ids else []
        wrong += [f"values {_some(bad_values)}"] if bad_values else []
        raise ValueError(
            f"logit_bias must have ids in [0, {bound}) and values finite in fp32, got {' and '.join(wrong)}; "
            "to forbid an id use mask"
        )


def _bias_tensor(name: str, bias: Tensor, rows: Tensor, shapes: list[tuple[int, ...]]) -> None:
    check_tensor(name, bias)
    _same_device(name, bias, rows)
    if bias.dtype not in FLOATING:
        raise ValueError(
            f"{name} must have a floating dtype, got {_short(bias.dtype)}; convert with {name}.float()"
        )
    if tuple(bias.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must have shape {wanted}, got {_shape(bias)}")


def _per_row(name: str, value: Tensor, rows: Tensor, num_rows: int, dtypes: tuple[torch.dtype, ...]) -> None:
    _same_device(name, value, rows)
    if value.dtype not in dtypes:
        raise ValueError(f"{name} as a tensor must have dtype {_either(dtypes)}, got {_short(value.dtype)}")
    if tuple(value.shape) not in ((), (num_rows,)):
        raise ValueError(
            f"{name} as a tensor must be 0-d or [B] with B = {num_rows}, got {_shape(value)}; "
            "expand it yourself if one entry is to serve every row"
        )


def _matrix(name: str, tensor: Tensor) -> None:
    check_tensor(name, tensor)
    if tensor.dim() != 2:
        raise ValueError(f"{name} must have two dimensions, got {_shape(tensor)}; reshape it first")
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor with data, got {tensor.layout} on {tensor.device}")


def check_tensor(name: str, value: object) -> None:
    """Raises ValueError for what is no tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name} must be a torch.Tensor, got {type(value).__name__}; convert with torch.as_tensor"
        )


def _same_device(name: str, tensor: Tensor, rows: Tensor) -> None:
    if tensor.device != rows.device:
        raise ValueError(
            f"{name} must be on the device of the first argument, {rows.device}, got {tensor.device}; "
            f"move it with .to({str(rows.device)!r})"
        )


def _is_index(value: object, size: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < size


def _is_fp32(value: object) -> bool:
    number = _finite(value)
    return number is not None and math.isfinite(ctypes.c_float(number).value)


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int beyond any float
        return None
    return number if math.isfinite(number) else None


def _integer(name: str, value: object) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise ValueError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")


def _number(name: str, value: object) -> float:
    number = _finite(value)
    if number is None:
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{name} must be True or False, got {value!r}")


def _choice(name: str, value: object, choices: tuple[Choice, ...]) -> Choice:
    for choice in choices:
        if isinstance(value, str) and choice == value:  # an array would be compared entry by entry
            return choice
    raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _either(options: Sequence[object]) -> str:
    return " or ".join(str(option).removeprefix("torch.") for option in options)


def _some(values: Sequence[object]) -> str:
    shown = ", ".join(map(repr, values[:5]))
    return f"[{shown}{', ...' if len(values) > 5 else ''}]"
