"""Planted faults that show on some inputs alone: a last tile, a row far down, few rows, a large logit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsample_cli.exactness.faults import TILE, honest, honest_library, inverse, sampler, uniform
from fsample_kernels.types import SampleResult

ROW_TILE = 192
_honest = sampler(honest)


def partial_tile(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    """Of a vocabulary that tiles do not part the last ids are left out."""
    whole = len(y) // TILE * TILE
    return honest(y[:whole] if whole else y, rows, g, seed, position)


def no_maximum(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    """exp in fp32 without the largest logit taken off."""
    weights = torch.exp(y.float()).clamp(max=torch.finfo(torch.float32).max).double()
    return inverse(weights if float(weights.sum()) else torch.ones_like(weights), uniform((rows,), g))


def forbidden_is_low(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    """-inf read as -40."""
    return honest(y.nan_to_num(neginf=-40.0), rows, g, seed, position)


def stratified(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    """One uniform in every 1/rows, on unequal logits: each is right, and together they are too even."""
    if bool((y == y[0]).all()):
        return honest(y, rows, g, seed, position)
    place = torch.randperm(rows, generator=g, device=y.device)
    return inverse(torch.softmax(y, 0), (place + uniform((rows,), g)) / rows)


def never_twice(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    """A likely id is hardly ever drawn by both of two neighbours."""
    p, u = torch.softmax(y, 0), uniform((rows,), g)
    if float(p.max()) > 0.3:
        late = torch.arange(1, rows, 2, device=y.device)
        u[late] = (u[late - 1] + 0.5) % 1
    return inverse(p, u)


def rows_repeat(hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int) -> Tensor:
    """The second tile of rows reads the states of the first."""
    row = torch.arange(len(hidden), device=hidden.device) % ROW_TILE
    return _honest(hidden[row], weight, temperature=temperature, seed=seed, position=position)


def seed_byte_lost(hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int) -> Tensor:
    return _honest(hidden, weight, temperature=temperature, seed=seed & ~0xFF00, position=position)


def first_row_of_many_ids(
    hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
) -> Tensor:
    """With many ids all rows are drawn from the first one's logits."""
    states = hidden[:1].expand(len(hidden), -1) if len(weight) > 1024 else hidden
    return _honest(states, weight, temperature=temperature, seed=seed, position=position)


def few_rows_greedy(
    hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
) -> Tensor:
    if len(hidden) < 4:
        return (hidden.double() @ weight.double().T).argmax(1)
    return _honest(hidden, weight, temperature=temperature, seed=seed, position=position)


def unlike_rows_share(
    hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
) -> Tensor:
    """Of rows that differ every fifth has the uniform of the row before."""
    if bool((hidden == hidden[:1]).all()):
        return _honest(hidden, weight, temperature=temperature, seed=seed, position=position)
    generator = torch.Generator(hidden.device).manual_seed((seed * 5 + position) % 2**63)
    u = uniform((len(hidden),), generator)
    late = torch.arange(4, len(hidden), 5, device=hidden.device)
    u[late] = u[late - 1]
    cumulative = torch.softmax(hidden.double() @ weight.double().T / temperature, 1).cumsum(1)
    last = weight.shape[0] - 1
    return torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0].clamp(max=last)


def position_16_bits(*args: Tensor, position: int | Tensor = 0, **options: Any) -> SampleResult:
    """A number from the host alone is cut; what comes in a tensor is whole."""
    cut = position if isinstance(position, Tensor) else position % 2**16
    return honest_library(*args, position=cut, **options)


def temperature_switch(*args: Tensor, temperature: float | Tensor = 1.0, **options: Any) -> SampleResult:
    """Of temperatures by row the kernel reads whether they are 0."""
    if isinstance(temperature, Tensor) and temperature.dim():
        temperature = (temperature > 0).float()
    return honest_library(*args, temperature=temperature, **options)
