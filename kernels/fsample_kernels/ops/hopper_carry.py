"""Sums on their way from one CTA of the Hopper kernel to the next, where a tile is parted along D.

501 tiles on 66 CTAs are 8 rounds, the last for 39 of them; parted, they are 7.6 for all. A CTA that does the
first part of a tile leaves its accumulator in global memory, and the next CTA goes on adding to it: the same
products in the same order, so that the logits, and with them the tokens, are to the last bit those of an
undivided tile.
"""

# No `from __future__ import annotations`: Gluon reads the constexpr annotations.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fsample_kernels.ops.gluon_names import cta_barrier


@gluon.jit
def places(program, acc, WG: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """Where a CTA leaves the sums of a warpgroup, [M, N]: eight ids of all rows side by side, so that what a
    warp stores at once is one run of 256 bytes."""
    lay: gl.constexpr = acc.type.layout
    rows = gl.expand_dims(gl.arange(0, M, layout=gl.SliceLayout(1, lay)), 1)
    columns = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, lay)), 0)
    return (program * 2 + WG) * (M * N) + columns // 8 * (M * 8) + rows * 8 + columns % 8


@gluon.jit
def leave_sum(carry, acc, WG: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """Leave the sums over the first part of D to the next CTA."""
    sums_ptr, flags_ptr = carry
    program = gl.program_id(0)
    gl.store(sums_ptr + places(program, acc, WG, M, N), acc)
    cta_barrier()
    gl.atomic_xchg(flags_ptr + program * 2 + WG, 1, sem="release", scope="gpu")


@gluon.jit
def take_sum(carry, row_blocks, acc, WG: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """What the CTA before left, in the layout of acc. Takes the flag down for the next launch.

    No wait is for ever: the CTA before started before this one, and nothing that it does first waits.
    """
    sums_ptr, flags_ptr = carry
    before = gl.program_id(0) - row_blocks
    there = 0
    while there == 0:
        there = gl.atomic_cas(flags_ptr + before * 2 + WG, 1, 0, sem="acquire", scope="gpu")
    return gl.load(sums_ptr + places(before, acc, WG, M, N))
