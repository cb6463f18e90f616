"""`fsample(...)` runs the program in this process, through `main()`; `shell(...)` in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on stderr of a failure; asserts that there is one and nothing on stdout."""
        lines = self.err.splitlines()
        assert self.out == "", self.out
        assert len(lines) == 1 and lines[0].startswith("fsample: "), self.err
        return lines[0]


Fsample = Callable[..., Done]


@pytest.fixture
def fsample(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fsample:
    """Call with the arguments after `fsample`; returns exit code, stdout and stderr."""
    from fsample_cli.main import main

    def run(*args: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["fsample", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main()
        text = capsys.readouterr()
        assert isinstance(exit.value.code, int)
        return Done(exit.value.code, text.out, text.err)

    return run


@pytest.fixture
def child_env() -> dict[str, str]:
    """Environment of a child that imports this tree, without terminal settings of the caller."""
    terminal = ("COLUMNS", "TERM", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    kept = {name: value for name, value in os.environ.items() if name not in terminal}
    return {**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def shell(child_env: dict[str, str]) -> Fsample:
    """Like `fsample`, in a process of its own; keyword arguments are environment variables."""

    def run(*args: object, **environment: str) -> Done:
        command = [sys.executable, "-m", "fsample_cli", *map(str, args)]
        env = {**child_env, **environment}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        return Done(done.returncode, done.stdout, done.stderr)

    return run
