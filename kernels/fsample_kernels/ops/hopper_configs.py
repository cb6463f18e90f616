"""Tile shapes of the Hopper kernel by batch class: plain data. Measured choices, see profiles/notes/."""

from __future__ import annotations

from dataclasses import dataclass

from fsample_kernels.types import Noise


@dataclass(frozen=True)
class HopperConfig:
    """One compiled shape. Shared memory holds stages * (bv + bh) * bd values of 2 bytes, at most 227 KiB."""

    bv: int  # ids a tile, 128 or 256
    bh: int  # rows a CTA
    bd: int  # hidden size a stage
    box: int  # rows a TMA box of H: rows past the batch are loaded to the next multiple of it
    mw: int  # rows a consumer warpgroup
    stages: int
    warpgroups: int
    in_flight: int  # wgmma groups left running while the next stage is waited for


# Boxes 256 bytes wide stream best; where D is no multiple of 128 the last would be half empty, so 128 bytes
# there.
UP_TO_64 = HopperConfig(bv=128, bh=64, bd=128, box=16, mw=64, stages=4, warpgroups=1, in_flight=1)
UP_TO_64_NARROW = HopperConfig(bv=128, bh=64, bd=64, box=16, mw=64, stages=9, warpgroups=1, in_flight=1)
LARGE = HopperConfig(bv=256, bh=128, bd=64, box=32, mw=64, stages=4, warpgroups=2, in_flight=0)
# Several samples go over one accumulator again and again, and noise an id needs many words: half the
# accumulator leaves registers for that.
LARGE_HALF = HopperConfig(bv=128, bh=128, bd=64, box=32, mw=64, stages=6, warpgroups=2, in_flight=0)

ALL = (UP_TO_64, UP_TO_64_NARROW, LARGE, LARGE_HALF)


def pick(num_rows: int, size_d: int, num_samples: int, noise: Noise) -> HopperConfig:
    if num_rows <= 64:
        return UP_TO_64 if size_d % 128 == 0 else UP_TO_64_NARROW
    return LARGE if num_samples == 1 and noise == "grouped" else LARGE_HALF
