"""The rules of single arguments: each raises `ValueError` with argument, rule, value and next step."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TypeVar

import torch
from torch import Tensor

from .noise import MAX_POSITION, MAX_ROWS

HALF_OR_SINGLE = (torch.bfloat16, torch.float16, torch.float32)
FLOATING = (*HALF_OR_SINGLE, torch.float64)
MAX_SAMPLES = 1 << 32  # a sample's number is a word of the noise's counter
LONGEST = 200  # characters of a value in a message

Choice = TypeVar("Choice")


def bias_tensor(name: str, bias: Tensor, rows: Tensor, shapes: list[tuple[int, ...]]) -> None:
    """Floating, of one of the shapes, on the device of the rows."""
    check_tensor(name, bias)
    same_device(name, bias, rows)
    if bias.dtype not in FLOATING:
        raise ValueError(
            f"{name} must have a floating dtype, got {dtype_name(bias.dtype)}; convert with {name}.float()"
        )
    if tuple(bias.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must have shape {wanted}, got {shape_of(bias)}")


def per_row(name: str, value: Tensor, rows: Tensor, num_rows: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """A parameter of the rows: 0-d or [B]."""
    check_tensor(name, value)
    same_device(name, value, rows)
    if value.dtype not in dtypes:
        raise ValueError(
            f"{name} as a tensor must have dtype {either(dtypes)}, got {dtype_name(value.dtype)}"
        )
    if tuple(value.shape) not in ((), (num_rows,)):
        raise ValueError(
            f"{name} as a tensor must be 0-d or [B] with B = {num_rows}, got {shape_of(value)}; "
            "expand it yourself if one entry is to serve every row"
        )


def matrix(name: str, tensor: Tensor) -> None:
    """Two dimensions, with data."""
    check_tensor(name, tensor)
    if tensor.dim() != 2:
        raise ValueError(f"{name} must have two dimensions, got {shape_of(tensor)}; reshape it first")
    with_data(name, tensor)


def with_data(name: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise ValueError(f"{name} must be a tensor with data, got one on the meta device; load it first")


def batch_size(num_rows: int) -> None:
    """The row's number shares a word of the noise's counter."""
    if num_rows > MAX_ROWS:
        raise ValueError(
            f"the batch must have at most 2**24 rows, got B = {num_rows}; split it over several calls"
        )


def seed_bits(value: int | Tensor, rows: Tensor, num_rows: int) -> int | Tensor:
    """A seed that is given: its 64 bits as an unsigned number, or int64 0-d or [B]."""
    if isinstance(value, Tensor):
        per_row("seed", value, rows, num_rows, (torch.int64,))
        return value
    return seed_word(value)


def seed_word(value: int) -> int:
    """The 64 bits of a seed, as an unsigned number."""
    word = integer("seed", value)
    if not -(2**63) <= word < 2**64:
        raise ValueError(f"seed must fit 64 bits, in [-2**63, 2**64), got {shown(word)}; reduce it mod 2**64")
    return word % 2**64


def steps(value: int | Tensor, rows: Tensor, num_rows: int) -> int | Tensor:
    """A position: a number, or int64 0-d or [B]."""
    if isinstance(value, Tensor):
        per_row("position", value, rows, num_rows, (torch.int32, torch.int64))
        return value.to(torch.int64)
    return step_number(value)


def step_number(value: int) -> int:
    """Check a position that is a number."""
    step = integer("position", value)
    if not 0 <= step < MAX_POSITION:
        raise ValueError(
            f"position must be in [0, 2**32), got {shown(step)}; start a new seed instead of wrapping"
        )
    return step


def sample_count(value: int) -> int:
    """Check num_samples."""
    samples = integer("num_samples", value)
    if not 0 <= samples <= MAX_SAMPLES:
        raise ValueError(
            f"num_samples must be in [0, 2**32], got {shown(samples)}; 0 returns an empty result"
        )
    return samples


def check_tensor(name: str, value: object) -> None:
    """A tensor at all, and one whose memory holds its values one by one: kernels read it, and know of neither
    layouts nor the negative bit; the address of a tensor that wraps others, or stands for zeros, is 0.
    """
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name} must be a torch.Tensor, got {type(value).__name__}; convert with torch.as_tensor"
        )
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ValueError(
            f"{name} must be a plain torch.Tensor, got {type(value).__name__}, which has operations its own "
            "way; pass the tensor behind it: .to_local() of a DTensor, .wait() of what a functional "
            "collective returned"
        )
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested one" if value.is_nested else value.layout
        raise ValueError(f"{name} must be a dense tensor, got {kind}; convert with .to_dense()")
    if value.is_neg() or value._is_zerotensor():
        raise ValueError(
            f"{name} must not be a view with torch's negative bit, nor zeros without memory; pass its "
            ".resolve_neg(), or its .clone()"
        )


def same_device(name: str, tensor: Tensor, rows: Tensor) -> None:
    if tensor.device != rows.device:
        raise ValueError(
            f"{name} must be on the device of the first argument, {rows.device}, got {tensor.device}; "
            f"move it with .to({str(rows.device)!r})"
        )


def is_index(value: object, size: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < size


def is_fp32(value: object) -> bool:
    found = finite(value)
    return found is not None and math.isfinite(ctypes.c_float(found).value)


def finite(value: object) -> float | None:
    """The number in double precision, or None for what is none there."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        found = float(value)
    except OverflowError:  # an int beyond any float
        return None
    return found if math.isfinite(found) else None


def integer(name: str, value: object) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise ValueError(f"{name} must be an integer, got {shown(value)} ({type(value).__name__})")


def number(name: str, value: object) -> float:
    found = finite(value)
    if found is None:
        raise ValueError(f"{name} must be a finite number, got {shown(value)}")
    return found


def single(name: str, value: object) -> float:
    found = number(name, value)
    if not is_fp32(found):
        raise ValueError(f"{name} must be finite in fp32, got {shown(value)}")
    return found


def flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{name} must be True or False, got {shown(value)}")


def one_of(name: str, value: object, choices: tuple[Choice, ...]) -> Choice:
    for choice in choices:
        if isinstance(value, str) and choice == value:  # an array would be compared entry by entry
            return choice
    raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {shown(value)}")


def shown(value: object) -> str:
    """A value in one line of a message. Of a tensor its form alone: its values may be on a GPU."""
    if isinstance(value, Tensor):
        return f"a tensor with {value.dim()} dimensions, {dtype_name(value.dtype)}"
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # of an int with more digits than Python converts
        return f"one of very many digits ({type(value).__name__})"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def shape_of(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def either(options: Sequence[object]) -> str:
    return " or ".join(str(option).removeprefix("torch.") for option in options)


def first_few(values: Sequence[object]) -> str:
    some = ", ".join(map(shown, values[:5]))
    return f"[{some}{', ...' if len(values) > 5 else ''}]"
