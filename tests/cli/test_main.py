"""The program as a whole: exit codes, one-line failures, pipes, Ctrl-C, completion."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsample_cli import __version__, main
from fsample_cli.errors import BROKEN_PIPE, INTERRUPTED, FsampleError

Fsample = Callable[..., Any]
STUB = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
sys.argv = ["fsample", "presets"]
import fsample_cli.reporters
{body}
from fsample_cli.main import main
main()
"""


def stub(body: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """The program with `render` replaced, so that a command does what the test needs."""
    return subprocess.Popen(
        [sys.executable, "-c", STUB.format(body=body)], env=env, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def test_help_version_and_bare_call(fsample: Fsample) -> None:
    assert fsample("--version").out == f"fsample {__version__}\n"
    assert fsample("--help").code == 0
    bare = fsample()
    assert bare.code == 0 and bare.out == fsample("--help").out


@pytest.mark.parametrize(
    "command", ["verify", "bench", "io-model", "trace", "compare", "replay", "doctor", "presets"]
)
def test_every_command_has_help(fsample: Fsample, command: str) -> None:
    done = fsample(command, "--help")
    assert done.code == 0 and f"fsample {command} [OPTIONS]" in done.out and done.err == ""


def test_version_is_the_distributions() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'\nversion = "{__version__}"\n' in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("benhc",), ("'benhc'", "fsample --help")),
        (("presets", "--hard"), ("--hard", "fsample presets --help")),
        (("presets", "more"), ("more", "fsample presets --help")),
        (("presets", "--format"), ("--format", "fsample presets --help")),
        (("presets", "--hardware=7"), ("--hardware", "fsample presets --help")),
        (("compare",), ("before", "fsample compare --help")),
        (("--nonsense",), ("--nonsense", "fsample --help")),
        (("doctor", "--json", "--format", "csv"), ("--json", "csv")),
    ],
)
def test_usage_errors_are_one_line(
    fsample: Fsample, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = fsample(*arguments)
    assert done.code == 2
    for word in words:
        assert word in done.error


def test_the_message_holds_whatever_the_arguments_hold(fsample: Fsample) -> None:
    done = fsample("presets", "--format", "a\nb\x1b[31m{%s}")
    assert done.code == 2 and len(done.err.splitlines()) == 1


def test_bare_flag_works(fsample: Fsample) -> None:
    assert "H200" in fsample("presets", "--hardware").out


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (FsampleError("no luck", "try again"), 1, "fsample: no luck; try again"),
        (FsampleError("no luck", exit_code=7), 7, "fsample: no luck"),
        (MemoryError(), 2, "fsample: the host ran out of memory; choose a smaller --batch or --preset"),
        (KeyboardInterrupt(), INTERRUPTED, ""),
        (BrokenPipeError(), BROKEN_PIPE, ""),
    ],
)
def test_how_a_run_can_end(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str,
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(main, "app", fail)
    monkeypatch.setattr(main, "_close_stdout", lambda: BROKEN_PIPE)  # the test runner needs its own stdout
    with pytest.raises(SystemExit) as exit:
        main.main()
    assert exit.value.code == code
    assert capfd.readouterr().err.strip() == line


def test_out_of_gpu_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    def fail(**_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nSee documentation")

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as exit:
        main.main()
    assert exit.value.code == 2
    assert capsys.readouterr().err.startswith("fsample: CUDA out of memory. Tried to allocate 9 GiB.; choose")


def test_a_bug_keeps_its_traceback(child_env: dict[str, str]) -> None:
    process = stub("fsample_cli.reporters.to_terminal = None\ndef bug(*_): raise ZeroDivisionError\n"
                   "import fsample_cli.commands.presets as p; p.write_report = bug", child_env)  # fmt: skip
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == ""
    assert "Traceback" in err and "ZeroDivisionError" in err


@pytest.mark.parametrize("size", [1, 10_000_000])  # before and beyond what a pipe holds
def test_a_broken_pipe_ends_quietly(child_env: dict[str, str], size: int) -> None:
    body = (
        "import fsample_cli.commands.presets as p\n"
        "from fsample_cli.reporters import write_stdout\n"
        f"def slow(*_):\n    time.sleep(0.5); write_stdout('x' * {size})\np.write_report = slow"
    )
    process = stub(body, child_env)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == BROKEN_PIPE and error == ""


def test_help_into_a_closed_pipe_is_quiet(child_env: dict[str, str]) -> None:
    fsample = f"{sys.executable} -m fsample_cli"
    command = f"{fsample} presets | head -c 1 && {fsample} --help | true"
    done = subprocess.run(["bash", "-c", command], env=child_env, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_ctrl_c_ends_quietly(child_env: dict[str, str]) -> None:
    body = (
        "import fsample_cli.commands.presets as p\n"
        "def slow(*_):\n    print('ready', flush=True); time.sleep(60)\np.write_report = slow"
    )
    process = stub(body, child_env)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert (process.returncode, out, err) == (INTERRUPTED, "", "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [("fsample ", "io-model"), ("fsample bench --pre", "--preset"),
     ("fsample bench --preset qwen3-8", "qwen3-8b"),
     ("fsample presets --format ", "markdown")],
)  # fmt: skip
def test_shell_completion(child_env: dict[str, str], words: str, offered: str) -> None:
    cword = str(len(words.split(" ")) - 1)
    env = {**child_env, "_FSAMPLE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": cword}
    source = "import sys; sys.argv = ['fsample']; from fsample_cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, check=True)
    assert offered in done.stdout.split() and done.stderr == ""


def test_no_gpu_is_needed_to_import_and_ask(shell: Fsample) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    assert shell("doctor", "--json", **hidden).code == 0
    done = shell("bench", "--device", "cuda", **hidden)
    assert done.code == 2 and "--device cuda" in done.error


@pytest.mark.parametrize("command", ["verify", "bench", "io-model", "trace"])
def test_a_gpu_asked_for_and_not_there(
    fsample: Fsample, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = fsample(command, "--device", "cuda")
    assert done.code == 2 and "--device cuda" in done.error and "--device cpu" in done.error
