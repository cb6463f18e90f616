"""Kernels compiled before their first launch, side by side, by the very launches that will need them.

Inside `compile_only` a launch compiles its kernel on a thread of a pool and does nothing else, so types,
flags and options are those of the launch. Threads are enough: the passes of the compiler release the
interpreter lock, and ptxas is a process of its own.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any

import triton

from fsample_kernels.guard import checked
from fsample_kernels.types import Compiled
from fsample_kernels.warm import compile_workers

# Products may be fused with the sums they meet, in every kernel: what they cost and what they round was
# measured so. Said at each launch, since Triton's own default is about to change.
FUSE = True

_compiling: ContextVar[bool] = ContextVar("fsample_compiling", default=False)


def active() -> bool:
    """Whether launches compile only."""
    return _compiling.get()


def ready(kernel):
    """The kernel to launch; inside `compile_only` one whose launch compiles and starts nothing."""
    return _CompileOnly(kernel) if active() else kernel


class _CompileOnly:
    def __init__(self, kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid):
        if triton.knobs.runtime.interpret:
            return _nothing
        return partial(self._kernel.warmup, grid=grid)


def _nothing(*values, **named) -> None:
    """A launch in the interpreter, which compiles nothing."""


class _Pool:
    """What triton's mode asks of an executor, with each compilation timed and noted."""

    def __init__(self, threads: ThreadPoolExecutor, found: list[Compiled]) -> None:
        self._threads = threads
        self._found = found
        self._cached = threading.local()

    def submit(self, compile_kernel: Callable[[], Any]):
        return self._threads.submit(self._timed, compile_kernel)

    def _timed(self, compile_kernel: Callable[[], Any]):
        self._cached.hit = False
        start = time.perf_counter()
        kernel = compile_kernel()
        seconds = time.perf_counter() - start
        self._found.append(Compiled(kernel.metadata.name, seconds, self._cached.hit))
        return kernel

    @contextlib.contextmanager
    def listening(self):
        """Triton tells a listener whether a kernel came from its cache on disk."""
        knobs = triton.knobs.compilation
        before = knobs.listener

        # The names are those of triton's CompilationListener.
        def listen(*, src, metadata, metadata_group, times, cache_hit) -> None:
            self._cached.hit = cache_hit
            if before is not None:
                before(
                    src=src, metadata=metadata, metadata_group=metadata_group, times=times,
                    cache_hit=cache_hit,
                )  # fmt: skip

        knobs.listener = listen
        try:
            yield
        finally:
            knobs.listener = before


@contextlib.contextmanager
def compile_only(workers: int | None = None) -> Iterator[list[Compiled]]:
    """See `fsample_kernels.compile_only`. Inside another one it adds to that.

    A kernel that does not compile raises at its launch, where its caller can tell which call it was.
    """
    if active():
        yield []
        return
    found: list[Compiled] = []
    token = _compiling.set(True)
    try:
        with ThreadPoolExecutor(workers or compile_workers(), "fsample-compile") as threads:
            pool = _Pool(threads, found)
            # not checked: nothing runs, so nothing is written
            with pool.listening(), triton.AsyncCompileMode(pool, ignore_errors=True), checked(False):
                yield found
    finally:
        _compiling.reset(token)
