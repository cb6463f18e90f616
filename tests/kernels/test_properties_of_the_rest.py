"""Any arguments at all, as in `test_properties`, of what makes ready, loads or switches; and that no public
function and none of its arguments is left out.

FSAMPLE_EXAMPLES=10000 draws half as many calls of each function.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

import fsample_kernels
from fsample_kernels import distributed, guard, load_table, tables, warm_up, warm_up_logits
from fsample_kernels.ops import hopper_configs
from tests.kernels.any_arguments import (
    HEAD_OPTIONS,
    MERGE_WRONG,
    OPTIONS,
    PROFILE,
    SHARD_OPTIONS,
    VALUES,
    WARM_OPTIONS,
    WRONG,
    Call,
    calls,
    check_refusal,
    each_alone,
)


@PROFILE
@given(calls(head=True, more=WARM_OPTIONS, batches=(1,)))
def test_warm_up(call: Call) -> None:
    rest = {name: value for name, value in call.tensors.items() if name != "hidden"}
    event(check_warm(warm_up, Call(rest, call.options, call.broken - {"hidden"})))


@PROFILE
@given(calls(head=False, more=WARM_OPTIONS, batches=(1, 2)))
def test_warm_up_logits(call: Call) -> None:
    event(check_warm(warm_up_logits, call))


def test_each_wrong_value_of_a_warm_up_alone() -> None:
    head = Call({"weight": torch.randn(9, 8)}, {"max_batch": 2}, frozenset())
    for call, wrong in each_alone(head, {"weight", *HEAD_OPTIONS, *WARM_OPTIONS}):
        # Of these another number of rows, or of features, is another example.
        wrong &= not call.broken & {"weight", "temperature", "seed", "position", "logit_bias", "mask"}
        assert check_warm(warm_up, call) == "refused" or not wrong, call
    logits = Call({"logits": torch.randn(2, 9)}, {"max_batch": 2}, frozenset())
    for call, wrong in each_alone(logits, {"logits", *OPTIONS, *WARM_OPTIONS}):
        assert check_warm(warm_up_logits, call) == "refused" or not wrong, call


def check_warm(function: Callable[..., object], call: Call) -> str:
    try:
        found = function(**call.tensors, **call.options)
    except ValueError as error:
        check_refusal(str(error), call)
        return "refused"
    assert found == ()  # on a CPU nothing is compiled
    return "ready"


def test_compile_only() -> None:
    for workers in [*VALUES, 1, 3, numpy.int64(2), *WRONG["workers"]]:
        number = isinstance(workers, (int, numpy.int64)) and not isinstance(workers, bool) and workers >= 1
        if workers is None or number:
            with fsample_kernels.compile_only(workers) as found:
                assert list(found) == []
        else:
            with pytest.raises(ValueError, match="^workers must"):
                fsample_kernels.compile_only(workers)  # at the call, before any `with`


def test_checked() -> None:
    before = guard.active()
    for on in [*VALUES, False, 3, 0, numpy.bool_(True), "x"]:
        if on is True or on is False:
            with fsample_kernels.checked(on):
                assert guard.active() is on
        else:
            with pytest.raises(ValueError, match="^on must be True or False"):
                fsample_kernels.checked(on)  # at the call, before any `with`
        assert guard.active() is before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**30) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
SHAPES = [None, *(asdict(config) for config in hopper_configs.ALL)]
ENTRIES = st.fixed_dictionaries({
    "architecture": st.just("sm_90"), "vocab": st.just(256), "hidden": st.sampled_from([64, 4096]),
    "dtype": st.just("bfloat16"), "largest_batch": st.sampled_from([1, 64, 256]),
    "choice": st.sampled_from(tables.CHOICES), "config": st.sampled_from(SHAPES),
})  # fmt: skip
NO_TABLE = st.binary(max_size=9) | st.sampled_from(
    [b"[" * 99_999, b"1" * 4301, b'{"a":NaN}', b"\xef\xbb\xbf{}"]
)


@st.composite
def files(draw: Callable[..., Any]) -> bytes:
    """A table, or one with a field of any value, or JSON, or none."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        broken: bytes = draw(NO_TABLE)
        return broken
    data: Any = {"schema": 2, "kind": "table", "entries": draw(st.lists(ENTRIES, max_size=3))}
    if kind == 1:
        data = draw(JSON)
    elif kind == 2:
        data[draw(st.sampled_from(sorted(data)))] = draw(JSON)
    elif kind <= 6 and data["entries"]:
        entry = data["entries"][0]
        place = entry
        if entry["config"] and draw(st.booleans()):
            place = entry["config"] = dict(entry["config"])
        name = draw(st.sampled_from(sorted(place)))
        place[name] = draw(JSON | st.integers(0, 300) | st.just(10**4299))
    return json.dumps(data).encode()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("tables") / "one.json"
    load_table(None)


@PROFILE
@given(content=files())
def test_load_table(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    load_table(None)
    before = tables._entries
    try:
        count = load_table(file)
    except ValueError as error:
        assert str(error).startswith(f"table {file}") and "\n" not in str(error), error
        assert tables._entries is before  # a table that is refused changes nothing
        event("refused")
        return
    entries = json.loads(content)["entries"]
    assert count == len(entries) == len(tables._entries or ())
    assert {entry.largest_batch for entry in tables._entries or ()} == {e["largest_batch"] for e in entries}
    event("loaded")


@PROFILE
@given(st.text(max_size=3))
def test_load_table_from_a_name(name: str) -> None:
    check_source(name)


def test_load_table_from_what_is_no_table(tmp_path: Path) -> None:
    folder, missing = tmp_path, tmp_path / "missing.json"
    for source in [
        *VALUES,
        "\0",
        "a\0",
        "\ud800",
        "/dev/zero",
        "x" * 5000,
        folder,
        str(folder),
        missing,
        ".",
    ]:
        check_source(source)


def check_source(source: Any) -> None:
    """None is no table; what is no path at all is an error of `source`, a folder or a device of the table."""
    try:
        count = load_table(source)
    except ValueError as error:
        is_path = isinstance(source, Path) or (
            isinstance(source, str) and re.fullmatch(r"[^\0\ud800]+", source)
        )
        assert str(error).startswith("table " if is_path else "source must be the path of a table"), error
        assert "\n" not in str(error)
    except OSError:
        assert isinstance(source, (str, Path)) and str(source) != "/dev/zero" and not os.path.isdir(source)
    else:
        assert source is None and count == 0


# What the tests of this file and of the two others generate, of each public function
GENERATED: dict[Callable[..., Any], set[str]] = {
    fsample_kernels.sample: {"hidden", "weight", *HEAD_OPTIONS},
    fsample_kernels.sample_logits: {"logits", *OPTIONS},
    fsample_kernels.warm_up: {"weight", *HEAD_OPTIONS, *WARM_OPTIONS},
    fsample_kernels.warm_up_logits: {"logits", *OPTIONS, *WARM_OPTIONS},
    fsample_kernels.compile_only: {"workers"},
    fsample_kernels.compile_workers: set(),
    fsample_kernels.checked: {"on"},
    fsample_kernels.load_table: {"source"},
    distributed.sample: {"hidden", "weight_shard", *HEAD_OPTIONS, *SHARD_OPTIONS},
    distributed.check: {"group"},
    distributed.merge_log_mass: {"ids", "lse", *MERGE_WRONG},
}
NO_FUNCTIONS = {"CheckError", "Compiled", "Exchange", "Merged", "Problem", "RankError", "SampleResult"}


def test_every_argument_of_every_public_function_is_generated() -> None:
    public = {name: getattr(fsample_kernels, name) for name in fsample_kernels.__all__}
    public |= {f"distributed.{name}": getattr(distributed, name) for name in distributed.__all__}
    functions = {value for value in public.values() if inspect.isfunction(value)}
    assert functions == set(GENERATED)
    assert {name.split(".")[-1] for name, value in public.items() if value not in functions} == NO_FUNCTIONS
    for function, names in GENERATED.items():
        assert names == set(inspect.signature(function).parameters), function
