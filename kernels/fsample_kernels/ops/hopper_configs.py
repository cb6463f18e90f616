"""Tile shapes of the Hopper kernel by batch class: plain data. Measured choices, see profiles/notes/."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HopperConfig:
    """One compiled shape. Shared memory holds `stages` times (bv + bh) * bd values of 2 bytes, at most 227 KiB."""

    bv: int  # ids a tile, 128 or 256
    bh: int  # rows a CTA
    bd: int  # hidden size a stage
    box: int  # rows a TMA box of H: rows past the batch are loaded to the next multiple of it
    mw: int  # rows a consumer warpgroup
    stages: int
    warpgroups: int
    in_flight: int = 1  # wgmma groups left running while the next stage is waited for
    share_best: bool = False  # read the other CTAs' best and skip draws that cannot win


# Rows of 256 bytes a box stream best; where D is no multiple of 128 the last box would be half empty, so 128 bytes.
UP_TO_64 = HopperConfig(bv=128, bh=64, bd=128, box=16, mw=64, stages=4, warpgroups=1)
UP_TO_64_NARROW = HopperConfig(bv=128, bh=64, bd=64, box=16, mw=64, stages=9, warpgroups=1)
LARGE = HopperConfig(bv=256, bh=128, bd=64, box=32, mw=64, stages=4, warpgroups=2)
# Several samples a row go over one accumulator again and again: half of it leaves registers for that.
LARGE_MANY_SAMPLES = HopperConfig(bv=128, bh=128, bd=64, box=32, mw=64, stages=6, warpgroups=2)

ALL = (UP_TO_64, UP_TO_64_NARROW, LARGE, LARGE_MANY_SAMPLES)


def pick(num_rows: int, size_d: int, num_samples: int) -> HopperConfig:
    if num_rows <= 64:
        return UP_TO_64 if size_d % 128 == 0 else UP_TO_64_NARROW
    return LARGE if num_samples == 1 else LARGE_MANY_SAMPLES
