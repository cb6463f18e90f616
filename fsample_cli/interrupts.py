"""A run that is stopped from outside, by Ctrl-C or by `timeout`, ends with what it has."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from fsample_cli.errors import INTERRUPTED, TERMINATED, FsampleError


class Terminated(KeyboardInterrupt):
    """SIGTERM: handled wherever Ctrl-C is."""


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated` in the main thread instead of ending the process at once.

    Where nothing catches it, the program exits with 143: Typer would take it for Ctrl-C.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except Terminated:
        raise typer.Exit(TERMINATED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def unwrapped() -> Iterator[None]:
    """Inside, an error raised from an interrupt is that interrupt.

    Until Python 3.12 one that arrives in a `__set_name__`, as while a module is imported, leaves it as the
    cause of a RuntimeError.
    """
    try:
        yield
    except (RuntimeError, FsampleError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None


def name_of(stop: KeyboardInterrupt) -> str:
    return "SIGTERM" if isinstance(stop, Terminated) else "SIGINT"


def exit_code(stop: str) -> int:
    """What a shell reports for a program that the signal ended."""
    return TERMINATED if stop == "SIGTERM" else INTERRUPTED
