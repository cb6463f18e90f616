"""Shared options: what they mean, and that a bad value ends in one line that names it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsample_cli import options
from fsample_cli.errors import FsampleError, MissingError, UsageError
from fsample_cli.options import Format, check_output, parse_batches
from fsample_cli.request import build_workload, parse_samplers, resolve_device, resolve_dtype
from fsample_cli.workloads import PRESETS, Workload, find_preset
from fsample_kernels import types

SMALL = PRESETS["cpu-small"].workload("fp32")
NOTHING: dict[str, Any] = {
    "preset": None, "vocab": None, "hidden": None, "checkpoint": None, "states": None,
    "device": "cpu", "dtype": "auto", "default": SMALL,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "batches"),
    [
        ("1..256", (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        ("4..16", (4, 8, 16)),
        ("8..8", (8,)),
        ("1,3,7", (1, 3, 7)),
        ("64", (64,)),
        ("1..4,100", (1, 2, 4, 100)),
        ("7, 3,3 ,1", (1, 3, 7)),  # rising, each once
        (str(2**24), (2**24,)),
    ],
)
def test_batches(text: str, batches: tuple[int, ...]) -> None:
    assert parse_batches(text) == batches


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("256..1", ("count up", "'256..1'", "1..256")),
        ("3..12", ("power of two", "'3..12'")),
        ("0", ("1..16777216", "got 0")),
        (str(2**24 + 1), ("1..16777216", "16777217")),
        ("9" * 40, ("1..16777216",)),
        ("0..8", ("1..16777216", "got 0")),
        ("-1", ("whole numbers", "'-1'")),
        ("1_0", ("whole numbers", "'1_0'")),
        ("\u0663", ("whole numbers",)),
        ("", ("whole numbers", "''")),
        ("1,,2", ("whole numbers", "'1,,2'")),
        ("1..", ("whole numbers", "'1..'")),
        ("1..2..4", ("whole numbers", "'1..2..4'")),
        ("1.5", ("whole numbers", "'1.5'")),
        ("many", ("whole numbers", "'many'")),
    ],
)
def test_bad_batches(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        parse_batches(text)
    assert "--batch" in str(error.value) and error.value.hint and error.value.exit_code == 2
    for word in words:
        assert word in str(error.value)


def test_samplers() -> None:
    known = ("fused", "gemm", "race")
    assert parse_samplers(None, known, ("fused",)) == ("fused",)
    assert parse_samplers(["race,gemm", "race"], known, ()) == ("race", "gemm")
    assert parse_samplers(["all"], known, ()) == known
    assert parse_samplers(["fused:element", "my.module:draw"], known, ()) == (
        "fused:element",
        "my.module:draw",
    )
    for bad in ("rase", "", "module:", ":function"):
        with pytest.raises(UsageError, match="--sampler must be one of fused, gemm, race") as error:
            parse_samplers([bad], known, ())
        assert repr(bad) in str(error.value)
    with pytest.raises(UsageError, match="did you mean race"):
        parse_samplers(["rase"], known, ())


def test_workload_by_preset_size_or_default() -> None:
    assert build_workload(**NOTHING) == SMALL
    assert build_workload(**{**NOTHING, "preset": "qwen3-8b"}) == Workload("qwen3-8b", 151_936, 4_096, "fp32")
    on_gpu = build_workload(**{**NOTHING, "preset": "gemma2-9b", "device": "cuda"})
    assert (on_gpu.dtype, on_gpu.softcap) == ("bf16", 30.0)
    both = build_workload(**{**NOTHING, "vocab": 1000, "hidden": 64, "dtype": "fp16"})
    assert both == Workload("custom", 1000, 64, "fp16")
    with pytest.raises(UsageError, match="go together, got --vocab alone; add --hidden, as in --hidden 512"):
        build_workload(**{**NOTHING, "vocab": 1000})
    with pytest.raises(UsageError, match="go together, got --hidden alone; add --vocab"):
        build_workload(**{**NOTHING, "hidden": 64})


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("verify", "V = 512 and D = 64."),
        ("replay", "V = 512 and D = 64."),
        ("bench", "qwen3-8b, on a CPU cpu-small."),
        ("trace", "qwen3-8b, on a CPU cpu-small."),
        ("io-model", "qwen3-8b."),
        ("tune", "qwen3-8b."),
    ],
)
def test_help_names_the_shape_that_serves_without_one(fsample: Any, command: str, default: str) -> None:
    shown = " ".join(fsample(command, "--help").out.split())
    assert f"Without a shape: {default}" in shown
    assert "Vocabulary size V; goes with --hidden." in shown and "Hidden size D; goes with --vocab." in shown


@pytest.mark.parametrize(
    "pair", [{"preset": "qwen3-8b", "vocab": 5}, {"preset": "gpt2", "checkpoint": Path("x")},
             {"hidden": 5, "checkpoint": Path("x")}],
)  # fmt: skip
def test_shapes_exclude_each_other(pair: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        build_workload(**{**NOTHING, **pair})


def test_states_must_fit(tmp_path: Path) -> None:
    file = tmp_path / "states.npy"
    np.save(file, np.zeros((3, 100), np.float32))
    with pytest.raises(UsageError, match=r"--states must be \[N, D\] with D = 512, got \[3, 100\]"):
        build_workload(**{**NOTHING, "states": file})
    fitting = build_workload(**{**NOTHING, "states": file, "vocab": 50, "hidden": 100})
    assert fitting.states == str(file)


def test_dtype_follows_device_and_checkpoint() -> None:
    assert resolve_dtype("auto", "cpu", "bf16") == "fp32"
    assert resolve_dtype("auto", "cuda", "fp16") == "fp16"
    assert resolve_dtype("auto", "cuda") == "bf16"
    assert resolve_dtype("bf16", "cpu") == "bf16"


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("cpu") == resolve_device("auto") == "cpu"
    with pytest.raises(MissingError, match="--device cuda needs a GPU"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == "cuda"
    assert resolve_device("cpu") == "cpu"


def test_output_decides_the_format_and_is_checked_first(tmp_path: Path) -> None:
    for name, format in {
        "a.json": "json",
        "a.csv": "csv",
        "a.md": "markdown",
        "a.txt": "table",
        "A.JSON": "json",
    }.items():
        assert check_output(None, tmp_path / name, False).format == format
    assert check_output(Format.csv, tmp_path / "a.dat", False).format == "csv"
    assert check_output(None, None, False).format == "table"
    assert check_output(Format.json, Path("-"), False).path is None
    existing = tmp_path / "there.json"
    existing.write_text("keep")
    assert check_output(None, existing, True).path == existing
    folder = tmp_path / "folder"
    folder.mkdir()
    bad: dict[str, tuple[Format | None, Path]] = {
        "exists": (None, existing),
        "a folder that exists": (None, tmp_path / "none" / "a.json"),
        "must be a file": (None, folder),
        "must end in": (None, tmp_path / "a.dat"),
        "does not fit the suffix": (Format.json, tmp_path / "a.csv"),
        "can be written": (None, Path("/proc/a.json")),  # refuses new files to root as well
        "needs a folder": (None, existing / "a.json"),
    }
    for words, (asked, path) in bad.items():
        with pytest.raises(UsageError, match=words) as error:
            check_output(asked, path, False)
        assert "--output" in str(error.value) and str(path) in str(error.value) and error.value.exit_code == 2
    assert existing.read_text() == "keep"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "folder",
        "there.json",
    ]  # no probe left behind


def test_presets_have_the_published_shapes() -> None:
    # of the list, from each model's config.json
    shapes = {
        "qwen3-1.7b": (151_936, 2_048),
        "qwen3-8b": (151_936, 4_096),
        "llama3-70b": (128_256, 8_192),
        "gpt-oss-120b": (201_088, 2_880),
        "deepseek-v3": (129_280, 7_168),
        "gemma3-270m": (262_144, 640),
    }
    for name, shape in shapes.items():
        assert (PRESETS[name].vocab, PRESETS[name].hidden) == shape
    assert PRESETS["gemma3-270m"].softcap is None
    with pytest.raises(UsageError, match="did you mean qwen3-8b"):
        find_preset("Qwen3_8b")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--preset", "gpt5"), ("--preset", "'gpt5'", "fsample presets")),
        (("--vocab", "0"), ("--vocab", "got 0", "try")),
        (("--hidden", "-3"), ("--hidden", "got -3")),
        (("--vocab", "x"), ("--vocab", "'x'", "bench --help")),
        (("--batch", "256..1"), ("--batch", "'256..1'", "1..256")),
        (("--temperature", "nan"), ("--temperature", "nan", "greedy")),
        (("--temperature", "-1"), ("--temperature", "-1")),
        (("--temperature", "inf"), ("--temperature", "inf")),
        (("--temperature", "-inf"), ("--temperature", "got -inf")),
        (("--temperature", "1e309"), ("--temperature", "got inf")),
        (("--temperature", "1e300"), ("--temperature", "fp32", "got 1e+300")),
        (("--temperature", "3.403e38"), ("--temperature", "fp32", "got 3.403e+38")),
        (("--temperature", "1e-320"), ("--temperature", "2^-64", "1e-320", "0 is greedy")),
        (("--temperature", "1e-46"), ("--temperature", "2^-64", "got 1e-46")),
        (("--temperature", "5e-20"), ("--temperature", "2^-64", "got 5e-20")),
        (("--seed", "-1"), ("--seed", "got -1")),
        (("--seed", str(2**64)), ("--seed", "2^64-1")),
        (("--format", "xml"), ("--format", "'xml'", "json")),
        (("--device", "tpu"), ("--device", "'tpu'", "cuda")),
        (("--dtype", "fp8"), ("--dtype", "'fp8'", "bf16")),
        (("--sampler", "rase"), ("--sampler", "'rase'", "race")),
        (("--output", "/proc/x.json"), ("--output", "/proc/x.json")),
        (("--checkpoint", "/none"), ("--checkpoint", "/none")),
        (("--states", "/none.npy"), ("--states", "/none.npy")),
        (("--preset", "gpt2", "--vocab", "7"), ("--preset", "--vocab", "exclude")),
        (("--nonsense",), ("--nonsense", "bench --help")),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    fsample: Any, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = fsample("bench", *arguments)
    assert done.code == 2
    for word in words:
        assert word in done.error


def test_minus_zero_is_the_temperature_zero(fsample: Any) -> None:
    def drawn(temperature: str) -> list[str]:
        done = fsample("replay", "--temperature", temperature, "--format", "csv")
        assert done.code == 0 and done.err == "", done.err
        (row,) = csv.DictReader(done.out.splitlines())
        return [row[name] for name in ("token", "runner_up", "margin", "decided")]

    assert drawn("-0.0") == drawn("0") != drawn("1")


def test_the_ends_of_the_temperature_are_drawn(fsample: Any) -> None:
    """Both are numbers to the library, the least of them no greedy one."""
    assert options.MIN_TEMPERATURE == types.MIN_TEMPERATURE
    assert float(np.finfo(np.float32).max) == options.MAX_TEMPERATURE
    for value in (options.MIN_TEMPERATURE, options.MAX_TEMPERATURE):
        done = fsample("replay", "--temperature", value)
        assert done.code == 0 and done.err == "", done.err
    done = fsample(
        "verify", "--test", "rows", "--device", "cpu", "--draws", 300, "--temperature", value, "-q",
        "--sampler", "fused:grouped,multinomial-eager",
    )  # fmt: skip
    assert done.code == 0, done.err


def test_an_error_is_one_line_whatever_the_value() -> None:
    assert "\n" not in str(FsampleError("a\nb", "c\nd"))
    assert json.dumps(str(FsampleError("a", "b"))) == '"a; b"'
