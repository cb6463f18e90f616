"""`fsample doctor`: truthful with and without a GPU, a tool, a package."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsample_cli import samplers
from fsample_cli.measure import environment, findings
from fsample_cli.records import Record
from fsample_cli.results import Environment

Fsample = Callable[..., Any]


def rows(done: Any) -> dict[tuple[str, str], Any]:
    record = Record.from_dict(json.loads(done.out))
    return {(row.topic, row.name): row for row in record.results}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu(fsample: Fsample) -> None:
    done = fsample("doctor", "--json")
    assert done.code == 0 and done.err == ""
    found = rows(done)
    assert found["gpu", "gpu"].status == "missing" and found["gpu", "gpu"].remedy
    assert {name for topic, name in found if topic == "sampler"} == set(samplers.NAMES)
    assert found["sampler", "fused"].status == found["sampler", "gemm"].status == "ok"
    assert found["sampler", "fi2"].status == "missing" and found["sampler", "fi2"].remedy
    assert found["timer", "wall"].status == "ok" and found["timer", "cupti"].status == "missing"
    assert found["package", "torch"].status == "ok" and found["ranks", "gloo"].status == "ok"
    assert all(row.remedy for row in found.values() if row.status == "missing")


@pytest.mark.usefixtures("no_gpu")
def test_table_and_json_say_the_same(fsample: Fsample) -> None:
    text = fsample("doctor").out
    for (_, name), row in rows(fsample("doctor", "--format", "json")).items():
        assert name in text
        assert row.status in text
    assert "no GPU" in text


@pytest.mark.usefixtures("no_gpu")
def test_a_missing_package_and_tool_are_named_with_their_remedy(
    fsample: Fsample, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    found = rows(fsample("doctor", "--json"))
    assert found["package", "cupti-python"].remedy == "pip install cupti-python"
    assert found["tool", "ncu"].status == "missing"
    assert found["sampler", "race"].status == "missing"  # no C++ compiler for torch.compile


def test_with_two_gpus_without_peer_access(fsample: Fsample, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    properties = SimpleNamespace(major=9, minor=0, total_memory=141e9, uuid="1234", L2_cache_size=60 * 2**20)
    fakes = {
        "is_available": lambda: True, "device_count": lambda: 2, "current_device": lambda: 0,
        "get_device_name": lambda *_: "NVIDIA H200", "get_device_properties": lambda *_: properties,
        "can_device_access_peer": lambda a, b: False, "mem_get_info": lambda *_: (1e11, 1.4e11),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    answer = {"driver_version": "580.1", "clocks.sm": "345", "clocks.max.sm": "1980", "clocks.mem": "[N/A]"}
    monkeypatch.setattr(environment, "nvidia_smi", lambda fields, card: answer)
    found = rows(fsample("doctor", "--json"))
    assert "sm_90" in found["gpu", "NVIDIA H200"].detail and "580.1" in found["gpu", "NVIDIA H200"].detail
    assert "345 of 1980 MHz" in found["gpu", "clocks"].detail
    assert found["gpu", "peer 0-1"].status == "missing" and "nvidia-smi" in found["gpu", "peer 0-1"].remedy
    assert found["gpu", "roofline"].status == "ok"
    assert found["timer", "events"].status == "ok"


def test_a_torch_that_does_not_load_is_a_finding(child_env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    env = {**child_env, "PYTHONPATH": f"{tmp_path}:{child_env['PYTHONPATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "fsample_cli", "doctor", "--json"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and done.stderr == ""
    (row,) = Record.from_dict(json.loads(done.stdout)).results
    assert row.name == "torch" and "libcudart.so.13" in row.detail


def test_environment_without_gpu_git_or_tools(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("FSAMPLE_COMMIT", raising=False)
    found = environment.collect()
    assert (found.gpu, found.driver, found.commit, found.clock_sm_mhz) == (None, None, None, None)
    assert found.gpu_count == 0
    assert found.cpu and found.cpu_count and found.torch and found.python and found.date
    monkeypatch.setenv("FSAMPLE_COMMIT", "abc123")
    assert environment.collect().commit == "abc123"


def test_commit_of_a_tree_with_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FSAMPLE_COMMIT", raising=False)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    clean = environment.collect().commit
    assert clean is not None and len(clean) == 40
    (tmp_path / "file").write_text("2")
    assert environment.collect().commit == f"{clean}+changes"


def test_nvidia_smi_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '580.1, 1980'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert environment.nvidia_smi(("driver_version", "clocks.sm"), "0") == {
        "driver_version": "580.1", "clocks.sm": "1980"
    }  # fmt: skip
    assert environment.nvidia_smi(("driver_version",), "0") == {}  # an answer of another length is no answer
    tool.write_text("#!/bin/sh\necho broken >&2; exit 9\n")
    assert environment.nvidia_smi(("driver_version",), "0") == {}


@pytest.mark.parametrize("has_nccl", [True, False])
def test_what_ranks_need_on_two_gpus(monkeypatch: pytest.MonkeyPatch, has_nccl: bool) -> None:
    import torch

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
    two = cast(Environment, SimpleNamespace(gpu="NVIDIA H200", gpu_count=2))
    found = {row.name: row for row in findings.ranks(two)}
    assert found["nccl"].status == ("ok" if has_nccl else "missing")
    assert found["nccl"].detail.startswith("2.29.3") if has_nccl else found["nccl"].remedy
    assert "p2p" in found["symmetric memory"].detail


ENTRY = {
    "architecture": "sm_90", "vocab": 1000, "hidden": 4096, "dtype": "bfloat16", "largest_batch": 16,
    "choice": "hopper", "config": None,
}  # fmt: skip


@pytest.mark.parametrize(("capability", "status"), [((9, 0), "ok"), ((8, 0), "note"), (None, "note")])
def test_a_table_is_named_with_what_it_is_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int] | None, status: str
) -> None:
    import torch

    if capability is not None:
        properties = SimpleNamespace(major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    file = tmp_path / "table.json"
    entries = [ENTRY, ENTRY | {"largest_batch": 64}, ENTRY | {"hidden": 512}]
    file.write_text(json.dumps({"schema": 2, "kind": "table", "entries": entries}))
    monkeypatch.setenv("FSAMPLE_TABLE", str(file))
    (row,) = findings.table(Environment(gpu="NVIDIA H200" if capability else None))
    assert row.status == status
    assert row.detail.startswith(f"{file}: 3 entries; sm_90 V=1000 D=4096 bfloat16 up to B=16,64; sm_90 V=")
    assert ("none is used here" in row.detail) == (status == "note")
    assert ("fsample tune" in row.remedy) == (capability == (8, 0))


@pytest.mark.usefixtures("no_gpu")
def test_a_table_that_cannot_be_used_is_said_before_the_first_call_fails(
    fsample: Fsample, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "table.json"
    for content, words in ((None, "No such file"), ("{", "must be JSON"), ("[]", "kind 'table'")):
        if content is not None:
            file.write_text(content)
        monkeypatch.setenv("FSAMPLE_TABLE", str(file))
        found = rows(fsample("doctor", "--json"))["table", "FSAMPLE_TABLE"]
        assert found.status == "missing" and str(file) in found.detail and words in found.detail
        assert "unset FSAMPLE_TABLE" in found.remedy
    monkeypatch.setenv("FSAMPLE_TABLE", "")
    assert rows(fsample("doctor", "--json"))["table", "FSAMPLE_TABLE"].detail.startswith("not set")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("value", "status", "words"), [("", "ok", "off"), ("1", "note", "on:"), ("x", "missing", "must be 1")]
)
def test_checked_mode_is_shown(
    fsample: Fsample, monkeypatch: pytest.MonkeyPatch, value: str, status: str, words: str
) -> None:
    from fsample_kernels import guard

    guard._environment.cache_clear()
    monkeypatch.setenv("FSAMPLE_CHECK", value)
    found = rows(fsample("doctor", "--json"))["check", "FSAMPLE_CHECK"]
    guard._environment.cache_clear()
    assert found.status == status and words in found.detail and (status == "ok" or found.remedy)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("command", ["bench", "io-model", "trace", "verify"])
def test_a_value_with_which_every_call_would_fail_is_one_line(
    fsample: Fsample, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    from fsample_kernels import guard

    guard._environment.cache_clear()
    monkeypatch.setenv("FSAMPLE_CHECK", "yes")
    done = fsample(command)
    guard._environment.cache_clear()
    assert done.code == 2 and done.out == ""
    assert done.error == (
        "fsample: FSAMPLE_CHECK must be 1 (check every call) or 0, got 'yes'; correct or unset it"
    )
