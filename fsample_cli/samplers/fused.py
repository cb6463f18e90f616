"""Ours: the LM-head product and the draw in one pass, logits never in memory unless `store` asks for them."""

from __future__ import annotations

from typing import get_args

from torch import Tensor

import fsample_kernels
from fsample_cli.samplers.protocol import IDENTITY, SamplerUnavailable, ShapeUnsupported, Transform
from fsample_kernels.types import Implementation, Math, Noise


class Fused:
    """`fsample_kernels.sample(hidden, weight, temperature=, seed=, position=, noise=, implementation=)`."""

    draws = True

    def __init__(
        self,
        noise: Noise = "grouped",
        implementation: Implementation = "auto",
        math: Math = "fast",
        *,
        store: bool = False,
        transform: Transform = IDENTITY,
    ) -> None:
        self.name = "fused+store" if store else "fused"
        self.algorithm: str | None = noise
        self.implementation: str = implementation
        self.logits_dtype: str | None = "float32" if store else None
        self._noise = noise
        self._requested = implementation
        self.math: Math = math
        self._store = store
        self._transform = transform
        asked = "" if math == "fast" else f", math={math!r}"
        asked += "" if implementation == "auto" else f", implementation={implementation!r}"
        stored = ", store_logits=True" if store else ""
        self.description = (
            "fsample_kernels.sample(hidden, weight, temperature=T, seed=seed, position=position, "
            f"noise={noise!r}{stored}{asked})"
        )

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None:
        """One call: compiles the kernels of this shape and records which implementation runs."""
        try:
            self.sample(hidden, weight, temperature=temperature, seed=0, position=0)
        except ValueError as error:
            raise ShapeUnsupported(f"{self.name}: {error}") from error
        except ModuleNotFoundError as error:
            raise SamplerUnavailable(
                f"{self.name}: module {error.name!r} is missing", hint=f"pip install {error.name}"
            ) from error

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        result = fsample_kernels.sample(
            hidden,
            weight,
            temperature=temperature,
            seed=seed,
            position=position,
            logit_scale=self._transform.logit_scale,
            softcap=self._transform.softcap,
            noise=self._noise,
            math=self.math,
            store_logits=self._store,
            implementation=self._requested,
        )
        self.implementation = result.implementation
        return result.ids[:, 0]  # [B], a view


def make(options: list[str], *, store: bool = False, transform: Transform = IDENTITY) -> Fused:
    """From the words after `fused:` to a sampler: noise, implementation, maths in any order.

    Raises ValueError naming a word that is none of these.
    """
    noise: Noise = "grouped"
    implementation: Implementation = "auto"
    math: Math = "fast"
    for word in options:
        if word in get_args(Noise):
            noise = next(known for known in get_args(Noise) if known == word)
        elif word in get_args(Implementation):
            implementation = next(known for known in get_args(Implementation) if known == word)
        elif word in get_args(Math):
            math = next(known for known in get_args(Math) if known == word)
        else:
            known_words = ", ".join((*get_args(Noise), *get_args(Implementation), *get_args(Math)))
            raise ValueError(f"fused takes {known_words} after the colon, got {word!r}")
    return Fused(noise, implementation, math, store=store, transform=transform)
