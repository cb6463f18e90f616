"""Draw many times and count on the device: one synchronisation per few million draws, never one a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.subject import Subject, checked_ids
from fsample_cli.exactness.targets import Target

FLUSH_DRAWS = 2**22


@dataclass(frozen=True)
class Drawn:
    """Counts [R, V] of a run over R distinct rows; ids outside [0, V) are counted in `out_of_range` only."""

    counts: NDArray[np.int64]
    out_of_range: int
    example: int | None  # one id that was out of range

    @property
    def draws(self) -> int:
        return int(self.counts.sum()) + self.out_of_range

    @property
    def complaint(self) -> str:
        """Empty, or what is wrong with the range of the ids."""
        if not self.out_of_range:
            return ""
        return f"{self.out_of_range} ids outside [0, {self.counts.shape[1]}), such as {self.example}"


class Histogram:
    """Counts of ids per distinct row, kept on the device. Row b of a call belongs to distinct row b mod R."""

    def __init__(self, vocab: int, distinct: int, device: str) -> None:
        self._vocab, self._distinct = vocab, distinct
        self._counts = torch.zeros(distinct * (vocab + 1), dtype=torch.int64, device=device)
        self._waiting: list[Tensor] = []
        self._waiting_draws = 0
        self._example: int | None = None

    def add(self, ids: Tensor) -> None:
        """ids [B] int64, the same B in every call."""
        self._waiting.append(ids)
        self._waiting_draws += ids.shape[0]
        if self._waiting_draws >= FLUSH_DRAWS:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        width = self._vocab + 1  # the last slot of a row collects ids out of range
        every = torch.stack(self._waiting)  # [calls, B]; a GPU asks for few launches, not for few bytes
        wrong = (every < 0) | (every >= self._vocab)
        slots = torch.where(wrong, self._vocab, every)
        if self._distinct > 1:
            slots += torch.arange(every.shape[1], device=every.device) % self._distinct * width
        self._counts += torch.bincount(slots.view(-1), minlength=len(self._counts))
        if self._example is None and int(self._counts.view(-1, width)[:, -1].sum()):
            self._example = int(every[wrong][0])
        self._waiting, self._waiting_draws = [], 0

    def result(self) -> Drawn:
        self._flush()
        table = self._counts.view(self._distinct, self._vocab + 1).cpu().numpy()
        return Drawn(table[:, :-1].copy(), int(table[:, -1].sum()), self._example)


def count(
    subject: Subject, target: Target, draws: int, case: str, plan: Plan, *, first_position: int = 0
) -> Drawn:
    """At least `draws` draws of one target: equal rows in a call, positions counting up from
    `first_position`.
    """
    rows = plan.rows(target.vocab, draws)
    hidden, weight = target.tensors(rows, plan.device, plan.dtype)
    return count_rows(
        subject,
        hidden,
        weight,
        1,
        -(-draws // rows),
        target.temperature,
        plan.case_seed(case),
        first_position,
    )


def count_rows(
    subject: Subject,
    hidden: Tensor,
    weight: Tensor,
    distinct: int,
    calls: int,
    temperature: float,
    seed: int,
    first_position: int = 0,
    on_call: Callable[[], None] | None = None,
) -> Drawn:
    """Counts over `calls` calls of hidden [B, D], of which row b repeats distinct row b mod R."""
    if subject.prepare is not None:
        subject.prepare(hidden, weight, temperature=temperature)
    histogram = Histogram(weight.shape[0], distinct, str(hidden.device))
    for position in range(first_position, first_position + calls):
        ids = subject.draw(hidden, weight, temperature=temperature, seed=seed, position=position)
        histogram.add(checked_ids(subject, ids, hidden))
        if on_call is not None:
            on_call()
    return histogram.result()


def draw_grid(subject: Subject, target: Target, steps: int, rows: int, seed: int, plan: Plan) -> Tensor:
    """ids [steps, rows] of equal rows at positions 0, 1, ...: what independence is judged on."""
    hidden, weight = target.tensors(rows, plan.device, plan.dtype)
    return draw_steps(subject, hidden, weight, steps, seed, target.temperature)


def draw_steps(
    subject: Subject, hidden: Tensor, weight: Tensor, steps: int, seed: int, temperature: float = 1.0
) -> Tensor:
    """ids [steps, B] of hidden [B, D] at positions 0, 1, ..."""
    if subject.prepare is not None:
        subject.prepare(hidden, weight, temperature=temperature)
    calls = []
    for position in range(steps):
        ids = subject.draw(hidden, weight, temperature=temperature, seed=seed, position=position)
        calls.append(checked_ids(subject, ids, hidden))
    return torch.stack(calls)
