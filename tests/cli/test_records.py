"""Schema 1: what goes out comes back, strictly, and a wrong file is named."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from types import UnionType
from typing import Any, get_args, get_type_hints

import pytest

from fsample_cli.errors import InputError
from fsample_cli.records import Record, without_folders
from fsample_cli.reporters import render
from fsample_cli.results import BenchResult, DoctorResult, Environment, IoModelResult, VerifyResult
from fsample_cli.workloads import PRESETS, Workload

ROW = BenchResult(
    "fused",
    "grouped",
    "triton",
    4,
    "cupti",
    3,
    (3.0, 1.0, 2.0),
    2.0,
    1.2,
    2.8,
    100,
    200,
    1.5,
    1.1,
    1.33,
    1.25,
)
WORKLOAD = PRESETS["gemma2-9b"].workload("fp32")
RECORD = Record(
    "bench", "fsample bench --batch 4", Environment(gpu="NVIDIA H200"), WORKLOAD, (ROW,), {"seed": 1}
)


VERDICT = VerifyResult("fit", "flat", "fi2", None, "x", 2, 1, 9, 1.5, 3, 0.5, 1.0, "pass")


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        replace(RECORD, kind="io-model", results=(IoModelResult(**vars(ROW)),)),
        replace(RECORD, kind="verify", results=(VERDICT,)),
        Record("doctor", "fsample doctor", None, None, (DoctorResult("gpu", "gpu", "missing", "", "buy"),)),
        replace(RECORD, results=()),
    ],
)  # fmt: skip
def test_round_trip(record: Record) -> None:
    assert Record.from_dict(strict(render(record, "json"))) == record


def test_folders_of_the_machine_stay_out() -> None:
    assert RECORD.workload is not None
    workload = replace(RECORD.workload, checkpoint="/any/folder/model", states="runs/states.npy")
    data = strict(render(replace(RECORD, workload=workload), "json"))["workload"]
    assert (data["checkpoint"], data["states"]) == ("model", "runs/states.npy")
    assert without_folders("--output=/any/a.json") == "--output=a.json"
    assert without_folders("/a/b.py:f") == "b.py:f"
    assert without_folders("--batch=1..4") == "--batch=1..4" and without_folders("a/b") == "a/b"


def test_schema_of_the_issue() -> None:
    data = strict(render(RECORD, "json"))
    assert data["schema"] == 1 and data["command"] == "fsample bench --batch 4"
    assert {"gpu", "driver", "torch", "triton", "flashinfer", "python", "commit", "date"} <= set(
        data["environment"]
    )
    assert {"preset", "vocab", "hidden", "dtype", "tp"} <= set(data["workload"])
    asked = (
        "sampler, algorithm, implementation, batch, timer, iterations, samples_us, median_us, p10_us, "
        "p90_us, bytes, flops, roofline_us, ratio_to_gemm, ratio_to_roofline, speedup"
    ).split(", ")
    assert list(data["results"][0])[: len(asked)] == asked


def test_numbers_that_are_not_finite_become_null() -> None:
    odd = replace(
        RECORD, results=(replace(ROW, speedup=math.nan, roofline_us=math.inf),), settings={"a": [-math.inf]}
    )
    data = strict(render(odd, "json"))
    assert (
        data["results"][0]["speedup"] is data["results"][0]["roofline_us"] is data["settings"]["a"][0] is None
    )


def test_frame() -> None:
    other = replace(ROW, sampler="gemm", algorithm=None, batch=8, median_us=None, samples_us=())
    frame = replace(RECORD, results=(ROW, other)).to_frame()
    assert list(frame.columns[:6]) == ["preset", "vocab", "hidden", "dtype", "tp", "sampler"]
    assert frame["batch"].tolist() == [4, 8] and frame["vocab"].tolist() == [256_000, 256_000]
    assert frame["samples_us"].tolist() == [(3.0, 1.0, 2.0), ()]
    assert frame["median_us"].isna().tolist() == [False, True]
    assert frame.attrs["environment"]["gpu"] == "NVIDIA H200"
    assert list(replace(RECORD, results=()).to_frame().columns[5:]) == [f.name for f in fields(BenchResult)]
    presets = Record("presets", "", None, None, ())
    assert list(presets.to_frame().columns)[:3] == ["preset", "vocab", "hidden"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "must have schema 1, got 2"),
        ({"schema": None}, "must have schema 1, got None"),
        ({"kind": "poem"}, "kind must be one of bench"),
        ({"kind": ["bench"]}, "kind must be one of bench"),
        ({"results": {}}, "results must be a list, got dict"),
        ({"results": [1]}, r"results\[0\] must be an object, got int"),
        ({"results": [{}]}, r"results\[0\] lacks the field 'sampler'"),
        ({"command": None}, "command must be text, got NoneType"),
        ({"settings": []}, "settings must be an object, got list"),
        ({"workload": 3}, "workload must be an object"),
        ({"environment": {"gpus": 1}}, "does not know: 'gpus'"),
        ({"environment": {"gpu_count": "1"}}, "environment: gpu_count must be an integer, got '1'"),
        ({"environment": {"power_limit_w": "x"}}, "power_limit_w must be a finite number or null, got 'x'"),
        ({"workload": asdict(WORKLOAD) | {"hidden": None}}, "workload: hidden must be an integer, got None"),
    ],
)
def test_wrong_records_are_named(change: dict[str, Any], words: str) -> None:
    data = {**RECORD.to_dict(), **change}
    with pytest.raises(InputError, match=words) as error:
        Record.from_dict(data, "record a.json")
    assert str(error.value).startswith("record a.json") and error.value.hint
    others: tuple[object, ...] = ([], None, "text", 3)
    for other in others:
        with pytest.raises(InputError, match="one JSON object.*; give a file"):
            Record.from_dict(other)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("samples_us", ["1"], "a list, each item a finite number"),
        ("samples_us", 1.0, "a list, each item a finite number"),
        ("samples_us", [None], "a list, each item a finite number"),
        ("median_us", "x", "a finite number or null"),
        ("median_us", True, "a finite number or null"),
        ("median_us", math.nan, "a finite number or null"),
        ("median_us", 0, "above 0"),
        ("samples_us", [1.0, -2.0], "above 0"),
        ("batch", 4.0, "an integer"),
        ("batch", None, "an integer"),
        ("sampler", 7, "text"),
        ("algorithm", ["grouped"], "text or null"),
        ("throttled", 1, "true or false or null"),
    ],
)
def test_a_field_of_another_type_is_named_with_its_rule_and_value(name: str, value: Any, rule: str) -> None:
    data = RECORD.to_dict() | {"results": [asdict(ROW), asdict(ROW) | {"samples_us": [1, 2.5], name: value}]}
    data["results"][0]["samples_us"] = []
    with pytest.raises(InputError) as error:
        Record.from_dict(data, "record a.json")
    assert error.value.message == f"record a.json: results[1]: {name} must be {rule}, got {value!r}"
    assert error.value.hint


def test_an_annotation_that_cannot_be_checked_is_none_of_a_record() -> None:
    """`build` knows these alone; another one would refuse every value, or let every one pass."""
    known = {str, int, float, bool, type(None), tuple[float, ...]}
    for kind in (Environment, Workload, *Record.KINDS.values()):
        for name, wanted in get_type_hints(kind).items():
            assert {*(get_args(wanted) if isinstance(wanted, UnionType) else (wanted,))} <= known, name
