"""Schema 1: what goes out comes back, strictly, and a wrong file is named."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from fsample_cli.errors import InputError
from fsample_cli.records import (
    BenchResult,
    DoctorResult,
    Environment,
    IoModelResult,
    Record,
    VerifyResult,
    without_folders,
)
from fsample_cli.reporters import render
from fsample_cli.workloads import PRESETS

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
    workload = replace(RECORD.workload, checkpoint="/home/me/model", states="runs/states.npy")
    data = strict(render(replace(RECORD, workload=workload), "json"))["workload"]
    assert (data["checkpoint"], data["states"]) == ("model", "runs/states.npy")
    assert without_folders("--output=/tmp/a.json") == "--output=a.json"
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
        ({"results": [asdict(ROW) | {"samples_us": ["1"]}]}, r"results\[0\]: samples_us must be a list of"),
        ({"settings": []}, "settings must be an object, got list"),
        ({"workload": 3}, "workload must be an object"),
        ({"environment": {"gpus": 1}}, "does not know: 'gpus'"),
    ],
)
def test_wrong_records_are_named(change: dict[str, Any], words: str) -> None:
    data = {**RECORD.to_dict(), **change}
    with pytest.raises(InputError, match=words) as error:
        Record.from_dict(data, "record a.json")
    assert str(error.value).startswith("record a.json")
    others: tuple[object, ...] = ([], None, "text", 3)
    for other in others:
        with pytest.raises(InputError, match="one JSON object"):
            Record.from_dict(other)
