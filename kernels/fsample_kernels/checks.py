"""The rules of single arguments: each raises `ValueError` with argument, rule, value and next step."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TypeVar

import torch
from torch import Tensor

HALF_OR_SINGLE = (torch.bfloat16, torch.float16, torch.float32)
FLOATING = (*HALF_OR_SINGLE, torch.float64)

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
    if tensor.device.type == "meta":
        raise ValueError(f"{name} must be a tensor with data, got one on the meta device; load it first")


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
    raise ValueError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")


def number(name: str, value: object) -> float:
    found = finite(value)
    if found is None:
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return found


def single(name: str, value: object) -> float:
    found = number(name, value)
    if not is_fp32(found):
        raise ValueError(f"{name} must be finite in fp32, got {value!r}")
    return found


def flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{name} must be True or False, got {value!r}")


def one_of(name: str, value: object, choices: tuple[Choice, ...]) -> Choice:
    for choice in choices:
        if isinstance(value, str) and choice == value:  # an array would be compared entry by entry
            return choice
    raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def shape_of(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def either(options: Sequence[object]) -> str:
    return " or ".join(str(option).removeprefix("torch.") for option in options)


def first_few(values: Sequence[object]) -> str:
    shown = ", ".join(map(repr, values[:5]))
    return f"[{shown}{', ...' if len(values) > 5 else ''}]"
