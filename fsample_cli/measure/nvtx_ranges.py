"""Stages of a traced run as ranges: NVTX for Nsight, `record_function` for the Chrome trace, both at once.

NVTX domain `fsample`, message the stage, category the sampler, payload (B, V, D). Messages and categories are
registered strings, so that a capture triggered by a range name finds them. Without the nvtx package, or
without a tool attached, the NVTX side does nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy
from torch.profiler import record_function

DOMAIN = "fsample"
PREFIX = "fsample: "  # of the ranges in a Chrome trace

PREPARE = "prepare"
WARM_UP = "warm-up"
FUSED = "fused kernel"
REDUCTION = "reduction"
GEMM = "GEMM"
SAMPLER = "sampler"
STAGES = (PREPARE, WARM_UP, FUSED, REDUCTION, GEMM, SAMPLER)


class Ranges:
    """Opens ranges for one sampler at one shape; of several ranks each names itself in the category."""

    def __init__(self, sampler: str, batch: int, vocab: int, hidden: int, rank: int | None = None) -> None:
        self.sampler = sampler
        self._category = sampler if rank is None else f"{sampler}, rank {rank}"
        self.batch = batch
        self._nvtx = _nvtx()
        self._payload = _payload(self._nvtx, batch, vocab, hidden)

    @contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        with self._nvtx_range(stage), record_function(range_name(self.sampler, self.batch, stage)):
            yield

    def _nvtx_range(self, stage: str) -> AbstractContextManager[Any]:
        if self._nvtx is None:
            return nullcontext()
        annotation: AbstractContextManager[Any] = self._nvtx.annotate(
            message=stage, domain=DOMAIN, category=self._category, payload=self._payload
        )
        return annotation

    @contextmanager
    def reductions(self) -> Iterator[None]:
        """Inside, every launch of a Triton kernel whose name says "reduce" is a `reduction` range of its own.

        The library launches both its kernels in one call and knows nothing of NVTX; Triton's launch hooks do.
        """
        if importlib.util.find_spec("triton") is None:
            yield
            return
        runtime = importlib.import_module("triton.knobs").runtime
        opened: list[AbstractContextManager[None]] = []

        def enter(metadata: Any) -> None:
            if "reduce" in metadata.get()["name"]:
                opened.append(self.stage(REDUCTION))
                opened[-1].__enter__()

        def leave(metadata: Any) -> None:
            if "reduce" in metadata.get()["name"] and opened:
                opened.pop().__exit__(None, None, None)

        runtime.launch_enter_hook.add(enter)
        runtime.launch_exit_hook.add(leave)
        try:
            yield
        finally:
            runtime.launch_enter_hook.remove(enter)
            runtime.launch_exit_hook.remove(leave)


def range_name(sampler: str, batch: int, stage: str) -> str:
    """How the range is called in a Chrome trace; `parse_range` reads it back."""
    return f"{PREFIX}{stage} | {sampler} | B={batch}"


def parse_range(name: str) -> tuple[str, str, int] | None:
    """(stage, sampler, batch) of a name that `range_name` made, or None for any other."""
    if not name.startswith(PREFIX):
        return None
    stage, sampler, batch = name.removeprefix(PREFIX).split(" | ")
    return stage, sampler, int(batch.removeprefix("B="))


def _nvtx() -> Any:
    return None if importlib.util.find_spec("nvtx") is None else importlib.import_module("nvtx")


def _payload(nvtx: Any, batch: int, vocab: int, hidden: int) -> Any:
    """(B, V, D) as one structure where this nvtx carries structures (0.2.12 and later), else B alone."""
    if nvtx is None or not hasattr(nvtx, "numpy_dtype"):
        return batch
    fields = numpy.dtype([("B", numpy.int64), ("V", numpy.int64), ("D", numpy.int64)])
    return numpy.array((batch, vocab, hidden), dtype=fields)
