"""What a benchmark run is given: its protocol, and where it tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsample_cli.hardware import Gpu


@dataclass(frozen=True)
class Settings:
    """The protocol of one run; the same for every sampler and batch in it."""

    device: str
    timer: str
    warmup: int
    iterations: int
    temperature: float
    seed: int
    baseline: str | None  # sampler name that speed-ups refer to; None picks fi2, else multinomial
    gpu: Gpu | None  # for the roofline
    runs: int = 1  # of that many iterations
    graph: bool = False  # calls are captured once and replayed

    @property
    def timed_by(self) -> str:
        """The timer as rows and records name it: what it timed belongs to it."""
        return f"{self.timer}+graph" if self.graph else self.timer


@dataclass(frozen=True)
class Progress:
    """Where a run tells how far it is. `stage` gets a line of text, `tick` a call a round of iterations."""

    stage: Callable[[str], None] = lambda text: None
    tick: Callable[[], None] = lambda: None
