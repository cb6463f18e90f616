"""A progress bar on stderr: stdout carries results only, and nothing is drawn where nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Yields (stage, tick): `stage(text)` names what runs now, `tick()` moves the bar by one of `total`.

    Off a terminal, each stage is one plain line; with `quiet`, nothing.
    """
    if quiet:
        yield (lambda text: None), (lambda: None)
        return
    if not sys.stderr.isatty():
        yield (lambda text: print(f"fsample: {text}", file=sys.stderr)), (lambda: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)

        def stage(text: str) -> None:
            bar.update(task, description=text)

        def tick() -> None:
            bar.advance(task)

        yield stage, tick
