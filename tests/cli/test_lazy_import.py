"""`fsample --help` and friends answer at once: no heavy module behind them, on the source and in truth."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

Env = dict[str, str]
HEAVY = (
    "torch",
    "triton",
    "numpy",
    "scipy",
    "pandas",
    "rich",
    "safetensors",
    "flashinfer",
    "nvtx",
    "fsample_kernels",
)
COMMANDS = ("", "verify", "bench", "io-model", "trace", "compare", "replay", "doctor", "presets")
PROBE = """
import sys
sys.argv = ["fsample", *{args!r}]
from fsample_cli.main import main
try:
    main()
except SystemExit as exit:
    code = exit.code
print(code, *sorted(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
"""


def probe(child_env: Env, *args: str) -> str:
    """Exit code, then the heavy modules that the program had imported when it ended."""
    source = PROBE.format(args=list(args), heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", source], env=child_env, capture_output=True, text=True, check=True
    )
    return done.stderr.strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(command: str, child_env: Env) -> None:
    assert probe(child_env, *command.split(), "--help") == "0"


def test_version_and_usage_errors_import_nothing_heavy(child_env: Env) -> None:
    assert probe(child_env, "--version") == "0"
    assert probe(child_env, "bench", "--batch", "256..1").splitlines()[-1] == "2"


def test_json_presets_import_nothing_heavy(child_env: Env) -> None:
    assert probe(child_env, "presets", "--format", "json") == "0"


def test_help_takes_less_than_300_ms(child_env: Env) -> None:
    times = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "fsample_cli", "--help"], env=child_env, capture_output=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # processor time: what a user waits for on a quiet machine, which this one may not be
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if times[-1] < 0.3:
            break
    assert min(times) < 0.3, times


def test_help_names_every_command(shell: Callable[..., Any]) -> None:
    done = shell("--help")
    assert done.code == 0 and done.err == ""
    for command in COMMANDS[1:]:
        assert f"\n  {command} " in done.out
