"""Our kernels compiled side by side before a run, where its first calls would compile them one by one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fsample_kernels
from fsample_cli.samplers.fused import Fused
from fsample_cli.samplers.protocol import Sampler, SamplerUnavailable, ShapeUnsupported
from fsample_cli.samplers.unfused import Unfused
from fsample_kernels.types import Compiled


@dataclass
class Ahead:
    """What was compiled, known when the block ends."""

    kernels: Sequence[Compiled] = ()
    seconds: float = 0.0
    workers: int = field(default_factory=fsample_kernels.compile_workers)

    @property
    def text(self) -> str:
        """ "compiled 12 kernels in 21 s, 8 at a time"; empty where all came from Triton's cache on disk."""
        new = sum(not kernel.cached for kernel in self.kernels)
        if not new:
            return ""
        together = f", {min(new, self.workers)} at a time" if min(new, self.workers) > 1 else ""
        return f"compiled {new} kernel{'s' * (new > 1)} in {self.seconds:.0f} s{together}"


@contextmanager
def ahead() -> Iterator[Ahead]:
    """Calls of our library inside it compile what they need and launch nothing; their results are void."""
    found = Ahead()
    start = time.perf_counter()
    with fsample_kernels.compile_only() as kernels:
        yield found
    found.kernels, found.seconds = kernels, time.perf_counter() - start


def compile_ahead(
    samplers: Iterable[Sampler], weights: Sequence[Tensor], batches: Iterable[int], temperature: float
) -> Ahead:
    """Compile what our samplers need on heads [V, D] at those batch sizes; others prepare themselves later.

    On a CPU nothing is compiled. What a sampler cannot run here its own preparation will say.

    Ranks of a split head make the same calls in the same order: in them they compare what they hold, and open
    the link over which they will write, but no kernel waits for a peer. Each compiles for itself, since no
    rank can make such a call alone; from a cache on disk that they share the slower ones take what is there.
    """
    ours = [sampler for sampler in samplers if isinstance(sampler, (Fused, Unfused))]
    if not any(weight.is_cuda for weight in weights):
        return Ahead()
    with ahead() as found:
        for sampler in ours:
            for weight in weights:
                for batch in batches:
                    hidden = torch.zeros(batch, weight.shape[1], dtype=weight.dtype, device=weight.device)
                    try:
                        sampler.prepare(hidden, weight, temperature=temperature)
                    except (SamplerUnavailable, ShapeUnsupported):
                        continue
    return found
