"""Options of the commands that time something, beside those in `options`."""

from __future__ import annotations

from typing import Annotated

import typer

from fsample_cli.errors import UsageError

TIMERS = ("auto", "cupti", "events", "wall")


def _check_timer(name: str) -> str:
    if name not in TIMERS:
        raise UsageError(f"--timer must be one of {', '.join(TIMERS)}, got {name!r}", "try --timer auto")
    return name


TimerOption = Annotated[
    str,
    typer.Option(
        "--timer",
        help="auto, cupti, events or wall; auto prefers cupti on a GPU.",
        callback=_check_timer,
    ),
]
WarmupOption = Annotated[int, typer.Option("--warmup", min=0, help="Untimed calls of each sampler first.")]
IterationsOption = Annotated[
    int, typer.Option("--iterations", min=1, help="Timed calls, the same number for every sampler.")
]
RunsOption = Annotated[
    int | None,
    typer.Option(
        "--runs", min=1, help="Runs of that many iterations. Default: 1, with --tp 5.", show_default=False
    ),
]
ColdOption = Annotated[bool, typer.Option("--cold/--no-cold", help="Empty the cache before every call.")]
