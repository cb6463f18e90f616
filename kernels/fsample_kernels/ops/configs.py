"""Tile shapes per architecture, dtype class and batch class: plain data, no device query at import."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    """One compiled shape of the LM-head kernel; the groups of 32 ids need block_v to be a multiple of 128."""

    block_b: int
    block_v: int
    block_d: int
    num_warps: int
    num_stages: int
    vocab_on_m: bool = False


# Largest batch of the class -> shape. The last entry serves every larger batch, tile by tile.
# Up to 64 rows two blocks fit an SM: one streams weights while the other draws. Each has 70 KiB or more of
# loads in flight; 4.4 TB/s times the latency of memory is about 35 KiB an SM.
HOPPER = {
    16: Config(16, 128, 128, 4, 3, vocab_on_m=True),
    32: Config(32, 128, 64, 4, 5, vocab_on_m=True),
    64: Config(64, 128, 64, 4, 4),
    128: Config(128, 128, 64, 8, 6),
}
AMPERE = {
    16: Config(16, 128, 64, 4, 4),
    32: Config(32, 128, 64, 4, 4),
    64: Config(64, 128, 64, 4, 3),
    128: Config(128, 128, 32, 8, 3),
}
CDNA = {
    16: Config(16, 128, 64, 4, 2),
    32: Config(32, 128, 64, 4, 2),
    64: Config(64, 128, 64, 4, 2),
    128: Config(128, 128, 32, 8, 2),
}
# fp32 products run on the plain cores, in full precision: small tiles, the accumulator is not what limits.
FP32 = {16: Config(16, 128, 32, 4, 2), 64: Config(32, 128, 32, 8, 2)}

TABLES = {"sm_80": AMPERE, "sm_90": HOPPER, "sm_100": HOPPER, "gfx942": CDNA, "gfx950": CDNA}


def table(dtype: torch.dtype, architecture: str) -> dict[int, Config]:
    """Shapes by batch class. An architecture without its own table takes Ampere's, which ask for least."""
    return FP32 if dtype == torch.float32 else TABLES.get(architecture, AMPERE)


def pick(dtype: torch.dtype, num_rows: int, architecture: str) -> Config:
    shapes = table(dtype, architecture)
    for largest, config in shapes.items():
        if num_rows <= largest:
            return config
    return config


# Over existing logits: (BLOCK_V, warps), one group of 32 ids a thread. Few rows take short tiles, to fill
# the GPU.
STREAMING = {8: (1024, 1), 1 << 24: (4096, 4)}


def pick_streaming(num_rows: int) -> tuple[int, int]:
    return next(shape for largest, shape in STREAMING.items() if num_rows <= largest)
