"""The samplers of a run, each made once, and what they need compiled before the first test."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor

import fsample_kernels
from fsample_cli import samplers
from fsample_cli.exactness import forms, targets
from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.subject import Subject
from fsample_cli.measure import compile_ahead
from fsample_cli.samplers.fused import Fused
from fsample_cli.samplers.protocol import IDENTITY, Sampler, SamplerUnavailable, ShapeUnsupported, Transform
from fsample_kernels.types import Implementation, Noise


class Loader:
    """Samplers by name and transform. A second request gets the first one's sampler, and with it the shapes
    that torch.compile has compiled for it.
    """

    def __init__(self, device: str, dtype: torch.dtype, ranks: int = 1) -> None:
        self._device, self._dtype, self._ranks = device, dtype, ranks
        self._held: dict[tuple[str, Transform], tuple[Sampler, Subject]] = {}

    def make(self, name: str, transform: Transform) -> Sampler:
        """A new sampler. Raises UsageError for a name that is none, SamplerUnavailable."""
        if self._ranks == 1:
            return samplers.load(name, transform)
        from fsample_cli.samplers import tensor_parallel

        return tensor_parallel.load(name, transform)

    def load(self, name: str, transform: Transform = IDENTITY) -> tuple[Sampler, Subject]:
        """The sampler and what to test of it. Raises SamplerUnavailable, ShapeUnsupported."""
        key = (name, transform)
        if key not in self._held:
            self._held[key] = self._subject(name, self.make(name, transform))
        return self._held[key]

    def _subject(self, name: str, sampler: Sampler) -> tuple[Sampler, Subject]:
        if not sampler.draws:
            raise ShapeUnsupported(f"{name} returns logits and draws nothing")
        if name.partition(":")[0] != "fused" or sampler.algorithm is None:
            # a user's `prepare` only looks at the ids, which the tests do themselves: wrong ones fail and are
            # no usage error
            prepare = None if samplers.is_user_function(name) else sampler.prepare
            slow_shapes = sampler.implementation == "torch.compile"
            return sampler, Subject(name, sampler.sample, prepare, compiles_shapes=slow_shapes)
        assert isinstance(sampler, Fused)
        if self._ranks > 1:
            return sampler, _sharded(name, sampler)
        noise = cast(Noise, sampler.algorithm)
        chosen = cast(Implementation, sampler.implementation)  # before any draw: what was asked for
        if chosen != "auto":  # one that cannot run here is left out, before a test meets its ValueError
            sampler.prepare(*targets.flat(128).tensors(1, self._device, self._dtype), temperature=1.0)
        library = partial(fsample_kernels.sample, noise=noise, math=sampler.math, implementation=chosen)
        reference = partial(fsample_kernels.sample, noise=noise, implementation="reference")
        # on a CPU there is nothing to compile, and each set of counts would begin with a call for nothing
        prepare = None if self._device == "cpu" else sampler.prepare
        return sampler, Subject(name, sampler.sample, prepare, library, noise, reference)

    def compile_all(self, names: tuple[str, ...], hidden: Tensor, weight: Tensor, plan: Plan) -> str:
        """Compile, side by side, what the tests of our own kernels call; samplers of others compile at first
        use. hidden [B, D], weight [V, D]: the workload's, at its largest batch. Returns in words what was.
        """
        with compile_ahead.ahead() as found:
            for name in names:
                if not is_compiled(name):
                    continue
                try:
                    _, subject = self.load(name)
                except (SamplerUnavailable, ShapeUnsupported):
                    continue  # its tests will say why
                if subject.library is not None:
                    forms.each(subject.library, plan)
                    forms.plain(subject.library, hidden, weight, seed=0, position=0)
        return found.text


def is_compiled(name: str) -> bool:
    """Whether the name stands for kernels rather than for plain torch."""
    return not {"online", "reference"} & set(name.split(":")[1:]) or samplers.is_user_function(name)


def _sharded(name: str, sampler: Fused) -> Subject:
    """A subject that all ranks draw for together; exchanged candidates must be one rank's tokens as well."""
    from fsample_cli.samplers.tensor_parallel import ShardedFused, sharded_sample

    if not isinstance(sampler, ShardedFused) or sampler.exchange == "log_mass":
        # other tokens than one rank draws: the tests of the distribution alone
        return Subject(name, sampler.sample, sampler.prepare)
    noise = sampler.noise
    library = partial(sharded_sample, noise=noise, math=sampler.math, exchange=sampler.exchange)
    reference = partial(fsample_kernels.sample, noise=noise, implementation="reference")
    return Subject(name, sampler.sample, sampler.prepare, library, noise, reference)
