"""How much is drawn: a level and a device in, sizes out.

Budgets are logits, so a run does not depend on the clock.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

Level = Literal["quick", "standard", "deep"]
ONLINE_VOCAB = 12_288  # three of its blocks
# A logit brings the tail e^-gap expected draws whatever the vocabulary, and over 2,048 ids `grouped` takes
# half as long a logit as over 512. Calls of 2^20 logits stay in the caches: with 2^21 `element` is a tenth
# slower, with 2^19 `grouped`.
CPU_TAIL_VOCAB, CPU_CALL_LOGITS = 2048, 2**20
LEVELS: tuple[Level, ...] = get_args(Level)
P_VALUES = 300  # of one sampler, at most, but for the rows of a model


@dataclass(frozen=True)
class Size:
    """What a level draws on a CPU; the fields are those of `Plan`."""

    vocabs: tuple[int, ...]
    fit_draws: int
    fit_logits: int
    focus_draws: int
    focus: tuple[str, ...]  # the targets that get them
    gaps: tuple[float, ...]
    tail_expected: float
    tail_logits: int
    pair_draws: int
    samples: int


SIZES: dict[Level, Size] = {
    "quick": Size(
        vocabs=(512, 32_000),
        fit_draws=8_000,
        fit_logits=3_000_000,
        focus_draws=60_000,  # sees a temperature off by 1 % at p = 2e-5 with power 0.9996
        focus=("two-scale",),
        gaps=(10.0, 13.0, 17.0, 40.0),
        tail_expected=60.0,
        tail_logits=12_000_000,
        pair_draws=16_384,
        samples=2,
    ),
    "standard": Size(
        vocabs=(512, 32_000, 151_936),
        fit_draws=100_000,
        fit_logits=70_000_000,
        focus_draws=1_000_000,
        focus=("flat", "two-scale"),
        gaps=(10.0, 13.0, 15.0, 18.0, 20.0, 23.0, 30.0, 40.0),
        tail_expected=60.0,
        tail_logits=1_400_000_000,
        pair_draws=131_072,
        samples=8,
    ),
    "deep": Size(
        vocabs=(512, 32_000, 151_936, 262_144),
        fit_draws=5_000_000,
        fit_logits=5_000_000_000,
        focus_draws=20_000_000,
        focus=("flat", "two-scale"),
        gaps=(10.0, 13.0, 15.0, 17.0, 19.0, 21.0, 23.0, 25.0, 30.0, 35.0, 40.0),
        tail_expected=200.0,
        tail_logits=10_000_000_000,
        pair_draws=1_048_576,
        samples=64,
    ),
}


@dataclass(frozen=True)
class OnGpu:
    """What a level draws on a GPU: vocabularies and tails, and of the rest `more` times what a CPU does."""

    vocabs: tuple[int, ...]
    more: float
    gaps: tuple[float, ...]
    tail_expected: float
    tail_logits: int


# Draws of a row of a model's logits: there are few of them, and they are what users draw from.
REAL_ON_GPU: dict[Level, int] = {"quick": 50_000, "standard": 1_000_000, "deep": 5_000_000}
EVERY_VOCAB = SIZES["deep"].vocabs
# Samplers in use lose ever more of the tokens at gaps 15 to 19, and of 26 M draws none goes to those at 19; a
# test that expects a dozen draws there passes them all. 2**34 logits expect 96 at gap 19, and take an H200
# some 5 s for all gaps; 6e10 expect 45 at gap 21; 1.4e11 expect 14 at gap 23.
ON_GPU: dict[Level, OnGpu] = {
    "quick": OnGpu(SIZES["quick"].vocabs, 25, (10.0, 13.0, 15.0, 17.0, 19.0, 40.0), 1000.0, 2**34),
    "standard": OnGpu(
        EVERY_VOCAB, 40, (10.0, 13.0, 15.0, 17.0, 19.0, 21.0, 23.0, 30.0, 40.0), 1000.0, 60_000_000_000
    ),
    "deep": OnGpu(EVERY_VOCAB, 8, SIZES["deep"].gaps, 1000.0, 140_000_000_000),
}
# Samplers there that are no compiled kernel, such as `online` in plain torch, take a hundred times as long a
# draw in calls of large vocabularies, and 12 s for 6e10 logits of a tail.
TORCH_ON_GPU: dict[Level, OnGpu] = {
    "quick": OnGpu(SIZES["quick"].vocabs, 1, SIZES["quick"].gaps, 60.0, SIZES["quick"].tail_logits),
    "standard": OnGpu(
        SIZES["standard"].vocabs,
        1,
        (10.0, 13.0, 15.0, 18.0, 21.0, 23.0, 30.0, 40.0),
        1000.0,
        60_000_000_000,
    ),
    "deep": OnGpu(EVERY_VOCAB, 0.2, SIZES["deep"].gaps, 1000.0, 60_000_000_000),
}


@dataclass(frozen=True)
class Plan:
    """Sizes of every test of the battery."""

    level: Level
    device: str
    dtype: torch.dtype
    seed: int
    alpha: float
    vocabs: tuple[int, ...]  # of the goodness tests
    fit_draws: int  # per target at V = 512
    fit_logits: int  # budget per target at larger V
    focus_draws: int  # for the one-number tests (half, mean id, mean logit) at V = 512
    focus: tuple[str, ...]  # the targets that get them
    gaps: tuple[float, ...]
    tail_vocab: int
    tail_expected: float  # draws grow until a tail expects this many events
    tail_logits: int  # ... or until this budget ends
    pair_draws: int  # per grid of the independence tests
    samples: int  # calls of the small deterministic tests
    call_logits: int  # logits of one call: as many equal rows as fit
    max_rows: int = 16_384  # the Hopper kernel takes 128 an SM; beyond, another kernel would be tested
    only: tuple[str, ...] = ()  # names of targets to keep in the goodness tests; all when empty
    p_values: int = 500  # that the whole run is expected to have
    real_logits: tuple[NDArray[np.float64], ...] = field(default=())
    real_draws: int = 0  # for each of them, where that is more than the budget of its vocabulary

    def rows(self, vocab: int, draws: int) -> int:
        """Rows of one call."""
        return max(1, min(self.call_logits // vocab, self.max_rows, draws))

    def budget(self, vocab: int) -> int:
        """Draws per target at this vocabulary."""
        return self.fit_draws if vocab <= 512 else max(80, min(self.fit_draws, self.fit_logits // vocab))

    def few(self, vocab: int) -> int:
        """Draws per target that only a gross fault needs, in calls of as many rows as `budget` gives."""
        whole = self.budget(vocab)
        return max(80, whole // 4, self.rows(vocab, whole))

    def case_seed(self, case: str) -> int:
        """A seed per case, so that no two cases share noise."""
        return (self.seed * 0x9E3779B97F4A7C15 + zlib.crc32(case.encode())) % 2**62


def make_plan(
    level: Level,
    device: str,
    dtype: torch.dtype,
    seed: int,
    alpha: float,
    real_logits: tuple[NDArray[np.float64], ...] = (),
    compiled: bool = True,
    samplers: int = 1,
) -> Plan:
    """The sizes of a level. A GPU draws about a hundred times more in the same time, but for samplers that
    are no compiled kernel.

    Level deep on a GPU is about 1.8e9 draws a sampler: calls of `max_rows` rows, which the host takes some
    200 us to launch.
    """
    on_gpu = device == "cuda"
    size = SIZES[level]
    drawn = OnGpu(size.vocabs, 1, size.gaps, size.tail_expected, size.tail_logits)
    if on_gpu:
        drawn = (ON_GPU if compiled else TORCH_ON_GPU)[level]
    return Plan(
        level=level,
        device=device,
        dtype=dtype,
        seed=seed,
        alpha=alpha,
        vocabs=drawn.vocabs,
        fit_draws=int(size.fit_draws * drawn.more),
        fit_logits=int(size.fit_logits * drawn.more),
        focus_draws=int(size.focus_draws * drawn.more),
        focus=size.focus,
        gaps=drawn.gaps,
        tail_vocab=512 if on_gpu else CPU_TAIL_VOCAB,
        tail_expected=drawn.tail_expected,
        tail_logits=drawn.tail_logits,
        pair_draws=int(size.pair_draws * drawn.more),
        samples=size.samples,
        call_logits=2**26 if on_gpu else CPU_CALL_LOGITS,
        real_logits=real_logits,
        real_draws=REAL_ON_GPU[level] if on_gpu and compiled else 0,
        p_values=max(500, P_VALUES * samplers),
    )


def for_online(plan: Plan) -> Plan:
    """The plan with vocabularies of several blocks of 4096 ids: within one block `online` is `grouped`."""
    return replace(plan, vocabs=(plan.vocabs[0], ONLINE_VOCAB, *plan.vocabs[2:]), tail_vocab=ONLINE_VOCAB)
