"""Seeding torch's default generator for the samplers that can take their noise from nowhere else.

torch.multinomial and exponential_ accept a generator, but not under torch.compile(fullgraph=True): there the
default generator of the device is the only source.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def call_seed(seed: int, position: int) -> int:
    """The one seed, 63 bits, of a sampler that knows no position: (seed XOR hash(position)) mod 2^63.

    The seed itself is not hashed: seeds that differ in one bit, as an even s and s + 1 do, reach the sampler
    as such, and one that ties their draws is seen. The hash is splitmix64's finaliser.
    """
    word = ((position + 1) * _GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return (seed ^ word ^ (word >> 31)) % 2**63


def seed_default_generator(device: torch.device, seed: int, position: int) -> None:
    """Seed one device's default generator. Host work only: no launch, no synchronisation.

    torch.manual_seed would also walk every other back end, which shows in wall-clock times. While a CUDA
    graph is captured nothing is seeded, since that is an error: replays go on from where the generator is.
    """
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(call_seed(seed, position))
    else:
        torch.default_generator.manual_seed(call_seed(seed, position))
