"""Samplers on a head that is split over ranks. Each takes the whole weight, as all do, and uses its part.

So the same gate, battery and stopwatch serve them: every rank makes the same calls and gets the same ids.
"""

from __future__ import annotations

from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from fsample_cli import samplers
from fsample_cli.errors import UsageError
from fsample_cli.samplers.flashinfer import FlashInfer, FlashInferCompiled
from fsample_cli.samplers.fused import Fused
from fsample_cli.samplers.multinomial import Multinomial, MultinomialEager
from fsample_cli.samplers.protocol import IDENTITY, Sampler, Transform
from fsample_cli.samplers.race import Race
from fsample_cli.samplers.unfused import Unfused
from fsample_cli.shards import rows_of, width_of
from fsample_kernels import distributed
from fsample_kernels.types import Implementation, Math, Noise, SampleResult

# The gather that a compiler sees. torch 2.13 renamed it; older ones have the second name alone.
all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
NOISES, MATHS, IMPLEMENTATIONS = get_args(Noise), get_args(Math), get_args(Implementation)
EXCHANGES = ("p2p", "p2p_after", "candidates", "log_mass")


def own_rows(weight: Tensor) -> slice:
    return rows_of(weight.shape[0], dist.get_rank(), dist.get_world_size())


def sharded_sample(hidden: Tensor, weight: Tensor, **options: object) -> SampleResult:
    """`fsample_kernels.sample` by all ranks: weight [V, D] whole, of which each uses its rows.

    Any options of `distributed.sample`; for the battery, which calls a library with all of them.
    """
    rows = own_rows(weight)
    bias = options.get("head_bias")
    if isinstance(bias, Tensor):
        options["head_bias"] = bias[rows]
    return distributed.sample(hidden, weight[rows], first_id=rows.start, **options)  # type: ignore[arg-type]


class ShardedFused(Fused):
    """`fsample_kernels.distributed.sample` with one of its exchanges."""

    def __init__(
        self,
        noise: Noise,
        implementation: Implementation,
        math: Math,
        exchange: distributed.Exchange,
        transform: Transform,
    ) -> None:
        super().__init__(noise, implementation, math, transform=transform)
        self.noise = noise
        self.exchange = exchange
        self.algorithm = exchange if noise == "grouped" else f"{noise}+{exchange}"
        self.description = (
            "fsample_kernels.distributed.sample(hidden, weight_shard, temperature=T, seed=seed, "
            f"position=position, noise={noise!r}, exchange={exchange!r})"
        )

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        result = distributed.sample(
            hidden,
            weight[own_rows(weight)],
            exchange=self.exchange,
            temperature=temperature,
            seed=seed,
            position=position,
            logit_scale=self._transform.logit_scale,
            softcap=self._transform.softcap,
            noise=self._noise,
            math=self.math,
            implementation=self._requested,
        )
        self.implementation = result.implementation
        if self.exchange == "auto":  # by the name of what it came to be
            chosen = result.implementation.rpartition("+")[2]
            self.algorithm = chosen if self.noise == "grouped" else f"{self.noise}+{chosen}"
        return result.ids[:, 0]


class OneRank(Fused):
    """The whole head on every rank, without an exchange: what 1 / R of its time would be is the ideal."""

    def __init__(self, transform: Transform) -> None:
        super().__init__(transform=transform)
        self.name = "one-rank"
        self.description += ", the whole head on every rank"


class ShardDraw(Fused):
    """A draw from a rank's own rows, nothing sent: fused minus this is what the exchange costs."""

    def __init__(self, transform: Transform) -> None:
        super().__init__(transform=transform)
        self.name = "shard"
        self.description = self.description.replace("weight", "weight_shard") + ", no exchange"

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        rows = weight[own_rows(weight)]
        return super().sample(hidden, rows, temperature=temperature, seed=seed, position=position)

    def problem(self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int) -> str:
        """It is no draw from the whole head, so no other sampler's: its ids lie in the shard, that is all."""
        ids = self.sample(hidden, weight, temperature=temperature, seed=seed, position=0)
        rows = own_rows(weight)
        inside = bool(((ids >= 0) & (ids < rows.stop - rows.start)).all())
        return "" if inside else "ids outside of the shard"


class ShardGemm:
    """`hidden @ weight_shard.T`: a rank's part of the product, nothing drawn and nothing sent."""

    name = "gemm"
    algorithm: str | None = None
    implementation = "torch"
    description = "hidden @ weight_shard.T (no draw, no exchange)"
    draws = False

    def __init__(self) -> None:
        self.logits_dtype: str | None = None

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None:
        self.logits_dtype = str(hidden.dtype).removeprefix("torch.")

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        return hidden @ weight[own_rows(weight)].T  # [B, V_r]

    def columns(self, vocab: int) -> slice:
        return rows_of(vocab, dist.get_rank(), dist.get_world_size())


def gathered_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight.T [B, V], each rank making its columns and all ranks gathering all of them."""
    size, vocab, batch = dist.get_world_size(), weight.shape[0], hidden.shape[0]
    width = width_of(vocab, size)
    local = hidden @ weight[own_rows(weight)].T
    padded = torch.nn.functional.pad(local, (0, width - local.shape[1]))  # the last ranks hold less
    group = dist.group.WORLD
    assert group is not None
    whole: Tensor = all_gather(padded, gather_dim=0, group=group)  # [R B, width]
    if isinstance(whole, functional.AsyncCollectiveTensor):  # outside of a compiled graph
        whole = whole.wait()
    return whole.view(size, batch, width).transpose(0, 1).reshape(batch, size * width)[:, :vocab]


def load(name: str, transform: Transform = IDENTITY) -> Sampler:
    """Make the sampler called `name` for ranks. Raises UsageError for one that cannot be split over them."""
    base, *words = name.split(":")
    if base == "fused":
        return _fused(name, words, transform)
    if name == "gemm":
        return ShardGemm()
    if name == "shard":
        return ShardDraw(transform)
    if name == "one-rank":
        return OneRank(transform)
    made: Sampler | None = None
    if name in samplers.COMPILED:
        made = FlashInferCompiled(name, transform)
    elif not samplers.is_user_function(name):
        made = samplers.load(name, transform)
    if isinstance(made, (Multinomial, MultinomialEager, Race, FlashInfer, FlashInferCompiled, Unfused)):
        made.product = gathered_product
        made.description = made.description.replace(
            "hidden @ weight.T", "all_gather(hidden @ weight_shard.T)"
        )
        return made
    raise UsageError(
        f"--tp: {name} does not run on several ranks", f"choose from {', '.join(samplers.TP_NAMES)}"
    )


def _fused(name: str, words: list[str], transform: Transform) -> ShardedFused:
    noise: Noise = "grouped"
    implementation: Implementation = "auto"
    math: Math = "fast"
    exchange: distributed.Exchange | None = None
    known_words = (*NOISES, *EXCHANGES, *MATHS, *IMPLEMENTATIONS)
    for word in words:
        if word in NOISES:
            noise = next(known for known in NOISES if known == word)
        elif word in EXCHANGES:
            exchange = next(known for known in get_args(distributed.Exchange) if known == word)
        elif word in MATHS:
            math = next(known for known in MATHS if known == word)
        elif word in IMPLEMENTATIONS:
            implementation = next(known for known in IMPLEMENTATIONS if known == word)
        else:
            raise UsageError(
                f"--sampler {name}: fused takes {', '.join(known_words)} after the colon, got {word!r}",
                "for example fused:log_mass",
            )
    if exchange is None:
        exchange = "log_mass" if noise == "online" else "auto"
    return ShardedFused(noise, implementation, math, exchange, transform)
