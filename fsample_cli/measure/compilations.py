"""Counting compilations inside a timed section, where there should be none."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any


class CompilationCounter:
    """Between enter and exit, `events` collects one line for every kernel Triton compiles (or loads from its
    disk cache: a stall as well) and for every frame torch.compile traces anew. Autotuning shows as
    compilations.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self._previous: Callable[..., None] | None = None
        self._knobs: Any = None
        self._frames_before = 0

    def __enter__(self) -> CompilationCounter:
        self._frames_before = _dynamo_frames()
        if importlib.util.find_spec("triton") is not None:
            knobs = importlib.import_module("triton.knobs")
            self._knobs = knobs.compilation
            self._previous = knobs.compilation.listener
            knobs.compilation.listener = self._listen
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._knobs is not None:
            self._knobs.listener = self._previous
        for _ in range(_dynamo_frames() - self._frames_before):
            self.events.append("torch.compile: a frame was traced again")

    # The keyword names are triton's CompilationListener protocol.
    def _listen(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        name = getattr(src, "name", None) or getattr(getattr(src, "fn", None), "__name__", "a kernel")
        self.events.append(f"triton: {name} {'loaded from the disk cache' if cache_hit else 'compiled'}")
        if self._previous is not None:
            self._previous(
                src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit
            )


def _dynamo_frames() -> int:
    """Frames that torch.compile has traced so far in this process; importing dynamo only to ask would take
    seconds.
    """
    module = sys.modules.get("torch._dynamo.utils")
    if module is None:
        return 0
    return int(module.counters["frames"]["total"])
