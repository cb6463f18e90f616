"""Tile shapes of the Hopper kernel by batch class: plain data. Measured choices, see profiles/notes/."""

from __future__ import annotations

from dataclasses import dataclass

from fsample_kernels.types import Noise


@dataclass(frozen=True)
class HopperConfig:
    """One compiled shape. Shared memory, 227 KiB at most, holds stages (bv + rows) bd values."""

    bv: int  # ids a tile, 128 or 256
    rows0: int  # of the first consumer warpgroup, 64 or 128
    rows1: int  # of the second; 0: there is none
    bd: int  # hidden size a stage
    box: int  # rows a TMA box of H; the last box ends with the batch, see `hopper_pipeline.last_box`
    stages: int
    in_flight: int  # wgmma groups left running while the next stage is waited for

    @property
    def rows(self) -> int:
        """A CTA's."""
        return self.rows0 + self.rows1


# Boxes 256 bytes wide stream best; where D is no multiple of 128 the last would be half empty, so 128 bytes
# there.
UP_TO_64 = HopperConfig(bv=128, rows0=64, rows1=0, bd=128, box=16, stages=4, in_flight=1)
UP_TO_64_NARROW = HopperConfig(bv=128, rows0=64, rows1=0, bd=64, box=16, stages=9, in_flight=1)
# Above 64 rows many small stages and a wgmma group in flight stream best. Several samples, which go over one
# accumulator again and again, and noise an id, which needs many words, take this for any number of rows: it
# leaves them registers.
UP_TO_128 = HopperConfig(bv=128, rows0=64, rows1=64, bd=64, box=32, stages=6, in_flight=1)
# 129 to 192 rows: one block of rows, where LARGE would multiply two of 128.
UP_TO_192 = HopperConfig(bv=128, rows0=128, rows1=64, bd=64, box=32, stages=5, in_flight=1)
# From two blocks of rows on the tensor cores set the pace, and like wide tiles.
LARGE = HopperConfig(bv=256, rows0=64, rows1=64, bd=64, box=32, stages=4, in_flight=0)

ALL = (UP_TO_64, UP_TO_64_NARROW, UP_TO_128, UP_TO_192, LARGE)


# Largest batch of the class, what D must be a multiple of, and the shape: the first line that fits serves.
CLASSES = (
    (64, 128, UP_TO_64),
    (64, 1, UP_TO_64_NARROW),
    (128, 1, UP_TO_128),
    (192, 1, UP_TO_192),
    (1 << 31, 1, LARGE),
)


def pick(num_rows: int, size_d: int, num_samples: int, noise: Noise) -> HopperConfig:
    if num_samples > 1 or noise == "element":
        num_rows = min(num_rows, 128)
    return next(shape for most, factor, shape in CLASSES if num_rows <= most and size_d % factor == 0)
