"""Measured tables: read, checked, and followed by the choice of a kernel."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsample_kernels import api, load_table, sample, tables, validation
from fsample_kernels.ops import (
    arguments,
    candidates,
    hopper_configs,
    hopper_sample,
    lm_head_sample,
    logits_sample,
    unfused_sample,
)
from fsample_kernels.testing import assert_same_ids, assert_same_rows
from fsample_kernels.types import Problem, SampleResult

MakeProblem = Callable[..., Problem]
SHAPE = replace(hopper_configs.UP_TO_64_NARROW, stages=8)
HEAD = {"architecture": "sm_90", "vocab": 256, "hidden": 64, "dtype": "bfloat16"}
ROWS: list[dict[str, Any]] = [
    HEAD | {"largest_batch": 256, "choice": "unfused", "config": None, "median_us": 1.0},
    HEAD | {"largest_batch": 16, "choice": "hopper", "config": asdict(SHAPE)},
    HEAD | {"largest_batch": 64, "choice": "triton", "config": None},
]


@pytest.fixture(autouse=True)
def no_table() -> Iterator[None]:
    load_table(None)
    yield
    load_table(None)


def save(folder: Path, rows: list[Any], **changes: Any) -> Path:
    file = folder / "table.json"
    file.write_text(json.dumps({"schema": 2, "kind": "table", "entries": rows} | changes))
    return file


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of a kernel, for tensors on the CPU, is that of an H200."""
    monkeypatch.setattr(arguments, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(api, "device_of", lambda problem: torch.device("cuda"))
    monkeypatch.setattr(hopper_sample, "why_not", lambda problem: None)
    monkeypatch.setattr(unfused_sample, "why_not", lambda problem: None)


@pytest.mark.usefixtures("on_h200")
def test_the_first_class_that_holds_the_batch_rules_and_nothing_else_changes(
    tmp_path: Path, make_problem: MakeProblem
) -> None:
    def made(rows: int, V: int = 256, D: int = 64, dtype: Any = torch.bfloat16, **fields: Any) -> Problem:
        return make_problem(rows, V, D, dtype, **fields)

    def chosen(rows: int, **changes: Any) -> object:
        return api.choose(made(rows, **changes), "auto")

    assert chosen(40) is hopper_sample
    assert load_table(save(tmp_path, ROWS)) == 3
    assert [chosen(rows) for rows in (1, 16, 17, 64, 65, 256, 257)] == [
        hopper_sample, hopper_sample, lm_head_sample, lm_head_sample, unfused_sample, unfused_sample,
        hopper_sample,
    ]  # fmt: skip
    assert hopper_sample.variant(made(16)) == SHAPE
    others: tuple[dict[str, Any], ...] = (
        {"V": 512}, {"D": 128}, {"dtype": torch.float16}, {"noise": "element"}, {"num_samples": 2},
    )  # fmt: skip
    for other in others:
        assert chosen(40, **other) is hopper_sample
        assert hopper_sample.variant(made(16, **other)) != SHAPE
    load_table(None)
    assert chosen(40) is hopper_sample


@pytest.mark.usefixtures("on_h200")
def test_the_environment_names_a_table(
    tmp_path: Path, make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tables.VARIABLE, str(save(tmp_path, ROWS)))
    monkeypatch.setattr(tables, "_entries", None)
    assert api.choose(make_problem(40, 256, 64, torch.bfloat16), "auto") is lm_head_sample


@pytest.mark.usefixtures("on_h200")
def test_an_environment_that_names_no_file_is_told_so_and_an_empty_one_names_none(
    tmp_path: Path, make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(40, 256, 64, torch.bfloat16)
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path / "none.json"))
    monkeypatch.setattr(tables, "_entries", None)
    for _ in range(2):  # the second call must not take the built-in choices in silence
        with pytest.raises(ValueError, match=r"FSAMPLE_TABLE must name a table .*none\.json.*; correct it"):
            api.choose(problem, "auto")
    monkeypatch.setenv(tables.VARIABLE, "")
    assert api.choose(problem, "auto") is hopper_sample


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        (ROWS, {"schema": 1}, "schema 2"),
        (ROWS, {"kind": "bench"}, "kind 'table'"),
        ({}, {}, "entries must be a list"),
        ([{"hidden": 1}], {}, r"entries\[0\] must be an object"),
        ([ROWS[0] | {"choice": "best"}], {}, "choice must be one of hopper"),
        ([ROWS[0] | {"hidden": 0}], {}, "hidden must be an integer"),
        ([ROWS[0] | {"vocab": "all"}], {}, "vocab must be an integer"),
        ([ROWS[0] | {"largest_batch": True}], {}, "largest_batch must be an integer"),
        ([ROWS[0] | {"config": {"bv": 1}}], {}, "config is for choice 'hopper'"),
        ([ROWS[1] | {"config": {"bv": 1}}], {}, "tune again"),
        ([ROWS[0] | {"architecture": 90}], {}, "architecture must be a string"),
        ([ROWS[0] | {"dtype": None}], {}, "dtype must be a string"),
        (
            [ROWS[1] | {"config": asdict(SHAPE) | {"stages": "4"}}],
            {},
            "config stages must be",
        ),
        ([ROWS[1] | {"config": asdict(SHAPE) | {"stages": 10**4299}}], {}, "stages must be .* below"),
        ([ROWS[1] | {"config": asdict(SHAPE) | {"rows1": -1}}], {}, "rows1 must be an integer, 0 or more"),
        (
            [ROWS[0], ROWS[1] | {"config": asdict(SHAPE) | {"stages": 40}}],
            {},
            r"entries\[1\]: config cannot run: stages need 983040 bytes of shared memory, .*'stages': 40"
            ".*; tune again, or give null",
        ),
        ([ROWS[1] | {"hidden": 72, "config": asdict(hopper_configs.UP_TO_64)}], {}, "D = 72 is no multiple"),
        ([ROWS[1] | {"config": asdict(hopper_configs.LARGE)}], {}, "128 rows a block for a batch of 16"),
    ],
)
def test_a_table_that_is_none_is_refused_by_name(
    tmp_path: Path, rows: Any, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as error:
        load_table(save(tmp_path, rows, **changes))
    assert "table.json" in str(error.value)
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ValueError, match="must be JSON"):
        load_table(tmp_path / "text.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bytes\.json must be JSON"):
        load_table(tmp_path / "bytes.json")


def test_unfused_insists_on_a_gpu_and_a_head() -> None:
    with pytest.raises(ValueError, match="implementation='unfused'"):
        sample(torch.zeros(1, 16), torch.zeros(9, 16), implementation="unfused")
    assert validation.implementation_name("unfused") == "unfused"


def test_the_safety_net_makes_fp32_logits_and_draws_over_them(
    make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Problem] = []

    def note(problem: Problem) -> SampleResult:
        seen.append(problem)
        return SampleResult(torch.empty(0))

    monkeypatch.setattr(logits_sample, "run", note)
    monkeypatch.setattr(unfused_sample, "product", lambda hidden, weight: hidden.float() @ weight.float().T)
    problem = make_problem(3, 100, 16, torch.bfloat16, first_id=128, vocab_size=200)
    assert unfused_sample.run(problem).implementation == "unfused"
    (made,) = seen
    assert (
        made.logits is not None and made.logits.dtype == torch.float32 and made.hidden is made.weight is None
    )
    assert (made.num_rows, made.num_columns, made.first_id) == (3, 100, 128)


def test_every_candidate_keeps_the_rules_for_some_batch_and_a_bad_one_does_not() -> None:
    assert len(set(candidates.HOPPER)) == len(candidates.HOPPER) > len(hopper_configs.ALL)
    for config in candidates.HOPPER:
        assert "" in {candidates.why_not(config, rows, 4096) for rows in (1, 64, 128, 256)}
    for rows, D, samples in ((1, 4096, 1), (64, 2880, 1), (128, 4096, 1), (256, 4096, 2)):
        assert candidates.why_not(hopper_configs.pick(rows, D, samples, "grouped"), rows, D) == ""
    large = hopper_configs.LARGE
    for bad, word in (
        (replace(large, stages=9), "shared memory"), (replace(large, rows0=128, rows1=0), "registers"),
        (replace(large, rows1=128), "no more in the second"),
        (replace(large, rows1=0, stages=3), "two warpgroups of the same rows"), (large, "half of every tile"),
        (replace(hopper_configs.UP_TO_64), "no multiple"), (replace(large, box=48), "box must be one of 16"),
        (replace(large, bv=64), "bv must be"), (replace(large, bd=32), "bd must be"),
        (replace(large, in_flight=2), "in_flight must be"), (replace(large, stages=1, in_flight=1), "stages"),
    ):  # fmt: skip
        assert word in candidates.why_not(bad, 1 if word != "registers" else 256, 4096 + 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 65, 256])
def test_the_safety_net_draws_the_tokens_of_the_others(
    rows: int, dtype: torch.dtype, make_problem: MakeProblem
) -> None:
    problem = make_problem(rows, 5003, 256, dtype, "cuda", want_logprob=True)
    for result in (unfused_sample.run(problem), lm_head_sample.run(problem)):
        assert_same_ids(problem, result.ids)
        assert_same_rows(problem, result)
