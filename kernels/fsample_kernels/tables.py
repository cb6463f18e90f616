"""Measured choices in the place of built-in ones: a table by architecture, V, D, dtype and batch class.

`fsample tune` writes such a table for a GPU and a shape; nothing is ever tuned while drawing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checks import shown
from .types import Implementation, Problem

SCHEMA = 2
VARIABLE = "FSAMPLE_TABLE"
CHOICES: tuple[Implementation, ...] = ("hopper", "triton", "unfused")


@dataclass(frozen=True)
class Entry:
    """What plain calls of one batch class take: those with noise="grouped" and one sample a row."""

    architecture: str  # "sm_90"
    vocab: int  # V, the rows of weight: of a shard its own. What wins at one V may lose a tenth at another
    hidden: int  # D
    dtype: str  # of hidden and weight: "bfloat16", "float16"
    largest_batch: int  # of the class; it begins above that of the entry before
    choice: Implementation
    config: Mapping[str, int] | None = None  # fields of `HopperConfig`; None: the built-in one


_entries: tuple[Entry, ...] | None = None  # None: the environment has not been looked at


def load_table(source: str | Path | None) -> int:
    """Use the table of a file from now on, in this process; None goes back to the built-in choices.

    The environment variable FSAMPLE_TABLE names a file that is loaded at the first call on a GPU instead; an
    empty one names none. What has no entry stays as built in. An entry's choice rules
    implementation="auto", its config every call of the Hopper kernel. Tokens stay the same but for scores
    that the order of summation decides.

    Returns:
        The number of entries.

    Raises:
        ValueError: source is no path of a file (a folder, "", another type); or the file is none that
            `fsample tune` writes: names the file, the field and the rule.
        OSError: the file is not there, or cannot be read.

    Example:
        >>> from fsample_kernels import load_table
        >>> load_table(None)
        0
    """
    return use(() if source is None else read(_path(source)))


def _path(source: str | Path) -> Path:
    """Check what was given as a path, not yet what lies there."""
    try:
        known = isinstance(source, (str, Path)) and source != "" and b"\0" not in os.fsencode(source)
    except UnicodeEncodeError:  # half of a surrogate pair
        known = False
    if not known:
        raise ValueError(
            f"source must be the path of a table, as `fsample tune` writes it, got {shown(source)}; None is "
            "for the built-in choices"
        )
    return Path(source)


def use(entries: Iterable[Entry]) -> int:
    """Put entries in the place of those in use; returns their number."""
    global _entries
    _entries = tuple(sorted(entries, key=lambda entry: entry.largest_batch))
    return len(_entries)


def read(file: Path) -> list[Entry]:
    """The entries of a file, checked. Raises ValueError, OSError."""
    if file.exists() and not file.is_file():  # reading a pipe or a device need not end
        raise ValueError(f"table {file} must be a file, got a folder or device; `fsample tune` writes one")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of JSON, of its text, of a number too long, too deep
        raise ValueError(f"table {file} must be JSON: {error}; `fsample tune` writes one") from None
    if not isinstance(data, dict) or (data.get("kind"), data.get("schema")) != ("table", SCHEMA):
        raise ValueError(
            f"table {file} must have kind 'table' and schema {SCHEMA}; `fsample tune` writes one"
        )
    rows = data.get("entries")
    if not isinstance(rows, list):
        raise ValueError(f"table {file}: entries must be a list, got {type(rows).__name__}")
    return [_entry(row, f"table {file}: entries[{number}]") for number, row in enumerate(rows)]


def _entry(row: Any, where: str) -> Entry:
    names = ("architecture", "vocab", "hidden", "dtype", "largest_batch", "choice", "config")
    if not isinstance(row, dict) or set(names) - set(row):
        raise ValueError(f"{where} must be an object with {', '.join(names)}, got {shown(row)}")
    entry = Entry(**{name: row[name] for name in names})
    if entry.choice not in CHOICES:
        raise ValueError(f"{where}: choice must be one of {', '.join(CHOICES)}, got {shown(entry.choice)}")
    for name in ("architecture", "dtype"):
        if not isinstance(row[name], str):
            raise ValueError(
                f"{where}: {name} must be a string, got {shown(row[name])}; `fsample tune` writes it"
            )
    for name in ("vocab", "hidden", "largest_batch"):
        value = row[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{where}: {name} must be an integer, 1 or more, got {shown(value)}")
    if entry.config is not None:
        _check_config(entry, where)
    return entry


def _check_config(entry: Entry, where: str) -> None:
    """The config is one that the kernel can run, for the largest batch of the entry's class."""
    from .ops.candidates import why_not
    from .ops.hopper_configs import HopperConfig

    config = entry.config
    wanted = set(HopperConfig.__dataclass_fields__)
    if entry.choice != "hopper" or not isinstance(config, dict) or set(config) != wanted:
        raise ValueError(
            f"{where}: config is for choice 'hopper' and has the fields {', '.join(sorted(wanted))}, "
            f"got {shown(config)}; tune again with this version"
        )
    for name, value in config.items():
        least = 0 if name in ("rows1", "in_flight") else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
            raise ValueError(
                f"{where}: config {name} must be an integer, {least} or more, below 2**31, got {shown(value)}"
            )
    broken = why_not(HopperConfig(**config), entry.largest_batch, entry.hidden)
    if broken:
        raise ValueError(
            f"{where}: config cannot run: {broken}; got {shown(config)}; "
            "tune again, or give null for the built-in one"
        )


def in_use() -> bool:
    """Whether there is an entry at all; looks at the environment the first time. Raises ValueError."""
    if _entries is None:
        named = os.environ.get(VARIABLE) or None
        try:
            load_table(named)
        except OSError as error:  # the caller of `sample` has named no file: say who did
            raise ValueError(
                f"{VARIABLE} must name a table that can be read, got {named!r}: {error.strerror}; "
                "correct it, or unset it for the built-in choices"
            ) from None
    return bool(_entries)


def find(problem: Problem, architecture: str) -> Entry | None:
    """The entry for a call, or None."""
    if not in_use() or problem.noise != "grouped" or problem.num_samples != 1 or problem.weight is None:
        return None
    key = (architecture, *problem.weight.shape, str(problem.weight.dtype).removeprefix("torch."))
    rows = problem.num_rows
    for entry in _entries or ():
        if (
            entry.architecture,
            entry.vocab,
            entry.hidden,
            entry.dtype,
        ) == key and rows <= entry.largest_batch:
            return entry
    return None
