"""A dataclass from JSON, every field held to its annotation: the one check of records that are read."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
import sys
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from fsample_cli.errors import InputError

T = TypeVar("T")
AGAIN = "correct the file, or record it again"
WORDS = {str: "text", int: "an integer", float: "a finite number", bool: "true or false", NoneType: "null"}


def build(kind: Callable[..., T], data: object, where: str) -> T:
    """The dataclass with the fields of a JSON object. Annotations are str, int, float, bool, None, unions of
    them, and tuple[X, ...], which JSON has as a list.

    Raises InputError that names `where`, the field, the rule and the value.
    """
    if not isinstance(data, dict):
        raise InputError(f"{where} must be an object, got {type(data).__name__}", AGAIN)
    wanted, required, positive = _fields(kind)
    for name in data:
        if name not in wanted:
            raise InputError(
                f"{where} has a field that this version of fsample does not know: {name!r}", AGAIN
            )
    for name in required:
        if name not in data:
            raise InputError(f"{where} lacks the field {name!r}", AGAIN)
    for name, value in data.items():
        if not fits(value, wanted[name]):
            raise InputError(
                f"{where}: {name} must be {words(wanted[name])}, got {reprlib.repr(value)}",
                AGAIN,
            )
        numbers = value if isinstance(value, list) else [value]
        if name in positive and any(number is not None and number <= 0 for number in numbers):
            raise InputError(
                f"{where}: {name} must be above 0, got {reprlib.repr(value)}",
                AGAIN,
            )
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """Field -> annotation, the fields without a default, and those whose numbers must be above 0."""
    hints = get_type_hints(kind)
    fields = dataclasses.fields(kind)
    missing = dataclasses.MISSING
    required = (f.name for f in fields if f.default is missing and f.default_factory is missing)
    positive = (f.name for f in fields if f.metadata.get("above_0"))
    return {f.name: hints[f.name] for f in fields}, tuple(required), tuple(positive)


def fits(value: object, wanted: Any) -> bool:
    """Whether a value that JSON gave is of the annotation; true and false are no numbers."""
    if isinstance(wanted, UnionType):
        return any(fits(value, one) for one in get_args(wanted))
    if get_origin(wanted) is tuple:
        return isinstance(value, list) and all(fits(item, get_args(wanted)[0]) for item in value)
    if wanted is float:
        # false of NaN, of inf, and of an integer that no float holds
        return (type(value) is int or isinstance(value, float)) and abs(value) <= sys.float_info.max
    return type(value) is wanted


def words(wanted: Any) -> str:
    """The rule that `fits` checks, for people."""
    if isinstance(wanted, UnionType):
        return " or ".join(map(words, get_args(wanted)))
    if get_origin(wanted) is tuple:
        return f"a list, each item {words(get_args(wanted)[0])}"
    return WORDS[wanted]
