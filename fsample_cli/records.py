"""A run of a command, and its one JSON form (schema 1).

    {"schema": 1, "kind": "bench", "command": "fsample bench ...", "environment": {...}, "workload": {...},
     "settings": {...}, "results": [{...}, ...]}

JSON is strict: a number that is not finite is written as null.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from fsample_cli.errors import InputError
from fsample_cli.fields import build
from fsample_cli.results import (
    BenchResult,
    CompareResult,
    DoctorResult,
    Environment,
    HardwareResult,
    IoModelResult,
    PresetResult,
    ReplayResult,
    TpModelResult,
    TraceResult,
    VerifyResult,
)
from fsample_cli.workloads import Workload

if TYPE_CHECKING:
    import pandas

SCHEMA = 1
OURS = "give a file of fsample's --format json"
Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"


@dataclass(frozen=True)
class Record:
    """One run of one command. `settings` is the protocol: seed, device, warm-ups, L2, ceilings, baseline."""

    kind: str
    command: str  # the exact command line
    environment: Environment | None
    workload: Workload | None
    results: tuple[Any, ...]  # of KINDS[kind], in the order to show
    settings: Mapping[str, Json] = field(default_factory=dict)
    schema: int = SCHEMA

    KINDS: ClassVar[dict[str, type]] = {
        "bench": BenchResult,
        "io-model": IoModelResult,
        "tp-model": TpModelResult,
        "verify": VerifyResult,
        "trace": TraceResult,
        "compare": CompareResult,
        "replay": ReplayResult,
        "doctor": DoctorResult,
        "presets": PresetResult,
        "hardware": HardwareResult,
    }

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and finite numbers, in the order of the schema."""
        return {
            "schema": self.schema,
            "kind": self.kind,
            "command": self.command,
            "environment": None if self.environment is None else _plain(dataclasses.asdict(self.environment)),
            "workload": None if self.workload is None else _shown(self.workload),
            "settings": _plain(self.settings),
            "results": [_plain(dataclasses.asdict(row)) for row in self.results],
        }

    @classmethod
    def from_dict(cls, data: object, where: str = "record") -> Record:
        """The record that `to_dict` wrote. Raises InputError that names `where`, the field and the rule."""
        if not isinstance(data, dict):
            raise InputError(f"{where} must hold one JSON object, got {type(data).__name__}", OURS)
        if data.get("schema") != SCHEMA:
            raise InputError(
                f"{where} must have schema {SCHEMA}, got {data.get('schema')!r}",
                "write it again with this version of fsample",
            )
        kind = data.get("kind")
        if not isinstance(kind, str) or kind not in cls.KINDS:
            raise InputError(f"{where}: kind must be one of {', '.join(cls.KINDS)}, got {kind!r}", OURS)
        command, settings, rows = data.get("command", ""), data.get("settings", {}), data.get("results")
        if not isinstance(command, str):
            raise InputError(f"{where}: command must be text, got {type(command).__name__}", OURS)
        if not isinstance(settings, dict):
            raise InputError(f"{where}: settings must be an object, got {type(settings).__name__}", OURS)
        if not isinstance(rows, list):
            raise InputError(f"{where}: results must be a list, got {type(rows).__name__}", OURS)
        environment, workload = data.get("environment"), data.get("workload")
        return cls(
            kind,
            command,
            None if environment is None else build(Environment, environment, f"{where}: environment"),
            None if workload is None else build(Workload, workload, f"{where}: workload"),
            tuple(build(cls.KINDS[kind], row, f"{where}: results[{n}]") for n, row in enumerate(rows)),
            settings,
        )

    def to_frame(self) -> pandas.DataFrame:
        """One row a result, beside it preset, vocab, hidden, dtype, tp; the rest of the record in `attrs`.

        `samples_us` holds the raw samples of a row as a tuple.
        """
        import pandas

        fields = [f.name for f in dataclasses.fields(self.KINDS[self.kind])]
        columns = {name: [getattr(row, name) for row in self.results] for name in fields}
        frame = pandas.DataFrame(columns, columns=fields)
        if self.workload is not None:
            for place, name in enumerate(("preset", "vocab", "hidden", "dtype", "tp")):
                if name not in frame.columns:
                    frame.insert(place, name, getattr(self.workload, name))
        whole = self.to_dict()
        frame.attrs = {name: whole[name] for name in ("kind", "command", "environment", "settings")}
        return frame


def without_folders(word: str) -> str:
    """The word as records show it: of an absolute path only the name, for folders are the machine's own.

    `/any/folder/head.safetensors` is `head.safetensors`, `--output=/any/a.json` is `--output=a.json`.
    """
    option, equals, value = word.partition("=")
    if option.startswith("--") and equals:
        return f"{option}={without_folders(value)}"
    return PurePath(word).name if word.startswith("/") else word


def _shown(workload: Workload) -> dict[str, Any]:
    files = {
        name: value if value is None else without_folders(value)
        for name, value in (("checkpoint", workload.checkpoint), ("states", workload.states))
    }
    return dict(_plain({**dataclasses.asdict(workload), **files}))


def _plain(value: Any) -> Any:
    """The value as strict JSON can carry it: tuples as lists, numbers that are not finite as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
