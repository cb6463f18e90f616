"""What `fsample tune` measures: a plain list of Hopper shapes, and what a shape must keep to.

A table is held to the same rules when it is read.
"""

from dataclasses import replace

from fsample_kernels.ops.hopper_configs import (
    ALL,
    LARGE,
    UP_TO_64,
    UP_TO_64_NARROW,
    UP_TO_128,
    UP_TO_192,
    HopperConfig,
)

SHARED = 227 * 1024  # bytes a block can have on sm_90
BARRIERS = 1024  # of which are kept for barriers and alignment
CONSUMER_ACCUMULATOR = 160  # registers a thread that the accumulator may take of 240
# What the kernel is written for. Others may compile and draw wrong tokens: a box that does not divide a
# warpgroup's rows leaves some unread, and a third wgmma group in flight reads a stage that was handed back.
VALUES = {"bv": (128, 256), "bd": (64, 128), "box": (16, 32, 64), "in_flight": (0, 1)}

HOPPER: tuple[HopperConfig, ...] = (
    *ALL,
    replace(UP_TO_64, stages=3),
    replace(UP_TO_64, in_flight=0),
    replace(UP_TO_64, box=64),
    replace(UP_TO_64_NARROW, stages=8),
    replace(UP_TO_64_NARROW, in_flight=0),
    replace(UP_TO_128, stages=5),
    replace(UP_TO_128, in_flight=0),
    replace(UP_TO_128, rows0=128, rows1=0, stages=7),
    replace(LARGE, stages=3),
    replace(LARGE, in_flight=1),
    replace(UP_TO_192, in_flight=0),
    replace(UP_TO_192, box=16),
)


def why_not(config: HopperConfig, num_rows: int, size_d: int) -> str:
    """The rule that a shape breaks for a batch of that many rows, "" where it keeps all."""
    for name, allowed in VALUES.items():
        if getattr(config, name) not in allowed:
            return f"{name} must be one of {', '.join(map(str, allowed))}, got {getattr(config, name)}"
    if config.stages <= config.in_flight:
        return f"stages must be {config.in_flight + 1} or more beside {config.in_flight} wgmma in flight"
    shared = config.stages * (config.bv + config.rows) * config.bd * 2
    if shared > SHARED - BARRIERS:
        return f"stages need {shared} bytes of shared memory, a block has {SHARED - BARRIERS}"
    accumulator = config.rows0 * config.bv // 128  # fp32 registers of each of a warpgroup's 128 threads
    if accumulator > CONSUMER_ACCUMULATOR:
        return f"the accumulator needs {accumulator} registers a thread, at most {CONSUMER_ACCUMULATOR}"
    if config.rows0 not in (64, 128) or config.rows1 not in (0, 64, config.rows0):
        return f"warpgroups of {config.rows0} and {config.rows1} rows: 64 or 128, and no more in the second"
    if config.bv > 128 and config.rows1 != config.rows0:
        return (
            f"bv = {config.bv} needs two warpgroups of the same rows, got {config.rows0} and {config.rows1}"
        )
    if config.rows > 64 and num_rows <= config.rows // 2:
        return f"{config.rows} rows a block for a batch of {num_rows}: half of every tile would be empty"
    if size_d % config.bd and config.bd > 64:
        return f"D = {size_d} is no multiple of {config.bd}: the last box would be part empty"
    return ""
