"""Logits of the groups that lead, kept in memory until the end, when their members are drawn.

The draw inside a group is a third of a draw, and counts in one group a row. So a group that leads its row
leaves its 32 logits here, over those of the one that led before, and `hopper_rows.draw_kept` draws in what is
left with the words of that group: the token that an immediate draw would give. A thread reads what it wrote
itself. Where memory sets the pace the stores cost more than they save: profiles/notes/hopper-keep.md.
For the shapes of the arguments see the table in `hopper_kernel.py`.
"""

# No `from __future__ import annotations`: Gluon reads the constexpr annotations.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def places(kept_ptr, x, M: gl.constexpr):
    """Where members 0 and 1 of each group lie, [M, 4, 2]; the next two lie 8 M on. x: one member, [M, 4]."""
    lay: gl.constexpr = gl.join(x, x).type.layout
    groups: gl.constexpr = gl.SliceLayout(2, lay)
    rows = gl.expand_dims(gl.arange(0, M, layout=gl.SliceLayout(1, groups)), 1)
    lanes = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, groups)), 0)
    pair = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, lay)))
    pair = gl.expand_dims(gl.expand_dims(pair, 0), 0)
    # worked out again for every block: kept over the matmul it would cost registers that there are not
    group = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [rows * 4 + lanes], dtype=gl.int32, is_pure=False, pack=1
    )
    return kept_ptr + (gl.expand_dims(group, 2) * 2 + pair)


@gluon.jit
def keep(kept_ptr, xs, leads, M: gl.constexpr):
    """Keep the logits xs, 32 of [M, 4], of the groups that lead. L2 shall hold them as long as it can."""
    where = places(kept_ptr, xs[0], M)
    lay: gl.constexpr = where.type.layout
    leads = gl.expand_dims(gl.convert_layout(leads, gl.SliceLayout(2, lay)), 2)
    mask = leads & gl.full([M, 4, 2], True, gl.int1, layout=lay)
    for i in gl.static_range(16):
        pair = gl.join(xs[2 * i], xs[2 * i + 1])
        gl.store(where + i * (8 * M), pair, mask=mask, eviction_policy="evict_last")


@gluon.jit
def load_kept(kept_ptr, like, M: gl.constexpr):
    """What `keep` left, in the layout of `like`; anything where no group led."""
    lay: gl.constexpr = like.type.layout
    where = places(kept_ptr, like, M)
    xs = ()  # type: tuple[gl.tensor, ...]
    for i in gl.static_range(16):
        even, odd = gl.load(where + i * (8 * M)).split()
        xs += (gl.convert_layout(even, lay), gl.convert_layout(odd, lay))
    return xs
