"""A tile of the Hopper kernel as wgmma leaves it in registers: its blocks and groups, transforms, stores.

With batch rows on M and vocabulary ids on N, lane l of a warp holds the columns 8 j + 2 (l % 4) + {0, 1} of
its rows: 32 ids of every aligned block of 128, which are one group of `noise.py`. Every reshape here renames
registers and moves nothing, and the draw that follows (`hopper_draw.py`) touches one thread's registers.
For the shapes of the arguments see the table in `hopper_kernel.py`.
"""

# No `from __future__ import annotations`: Gluon reads the constexpr annotations.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fsample_kernels.ops.epilogue import soft_cap


@gluon.jit
def blocks(acc, M: gl.constexpr, N: gl.constexpr):
    """[M, N] accumulator -> N / 128 tensors [M, 128], in order."""
    out = (acc,)  # type: tuple[gl.tensor, ...]
    for _ in gl.static_range(N // 256):
        halves = ()  # type: tuple[gl.tensor, ...]
        for j in gl.static_range(len(out)):
            y = out[j]
            a, b = y.reshape(M, 2, y.shape[1] // 2).permute(0, 2, 1).split()
            halves += (a, b)
        out = halves
    return out


@gluon.constexpr_function
def lanes_of_rows(M):
    """The accumulator's layout without the members: a thread holds its groups of M / 32 rows."""
    rows = [[8, 0], [64, 0]][: M // 64]
    lanes, warps = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(rows, lanes, warps, [], [M, 4])


@gluon.jit
def by_group(x, M: gl.constexpr):
    """[M, 128] logits in the accumulator's layout -> 32 tensors [M, 4]: member j of the four groups.

    Their layout is named: triton 3.9 would take slices of the accumulator's, and not see later that two
    neighbours lie beside each other.
    """
    xs = (x.reshape(M, 16, 4, 2).permute(0, 2, 1, 3).reshape(M, 4, 32),)  # type: tuple[gl.tensor, ...]
    for _ in gl.static_range(5):
        halves = ()  # type: tuple[gl.tensor, ...]
        for j in gl.static_range(len(xs)):
            y = xs[j]
            a, b = y.reshape(M, 4, 2, y.shape[2] // 2).permute(0, 1, 3, 2).split()
            halves += (a, b)
        xs = halves
    out = ()  # type: tuple[gl.tensor, ...]
    for j in gl.static_range(32):
        out += (gl.convert_layout(xs[j].reshape(M, 4), lanes_of_rows(M)),)
    return out


@gluon.jit
def places_of(lane, j: gl.constexpr):
    """Place in its block of 128 of member j, per lane [1, 4]."""
    return lane * 2 + (8 * (j // 2) + j % 2)


@gluon.jit
def pair_places(lay: gl.constexpr):
    """Place in eight neighbouring ids, per lane and of its two [1, 4, 2]; see `places_of`."""
    lane = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(0, lay)))
    last = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, lay)))
    return gl.expand_dims(gl.expand_dims(lane, 1), 0) * 2 + gl.expand_dims(gl.expand_dims(last, 0), 0)


@gluon.jit
def use_table(xs, base, place, left, IS_MASK: gl.constexpr):
    """Add the entries base[8 i + place] of a table, or forbid ids where they are 0. There are entries for
    `left` of the block's ids; the others become anything.

    Neighbours come in one load where the compiler knows the table to be aligned.
    """
    lay: gl.constexpr = xs[0].type.layout
    out = ()  # type: tuple[gl.tensor, ...]
    for i in gl.static_range(16):
        entries = gl.load(base + 8 * i, mask=place < left - 8 * i)
        pair = gl.join(xs[2 * i], xs[2 * i + 1])
        if IS_MASK:
            pair = gl.where(entries != 0, pair, float("-inf"))
        else:
            pair += entries.to(gl.float32)
        even, odd = pair.split()
        out += (gl.convert_layout(even, lay), gl.convert_layout(odd, lay))
    return out


@gluon.jit
def use_head_bias(xs, ptr, column0, limit):
    """Of a head_bias [V]."""
    lay: gl.constexpr = gl.join(xs[0], xs[1]).type.layout
    place = pair_places(lay)
    return use_table(xs, ptr + (column0 + place), place, limit - column0, False)


@gluon.jit
def use_rows(xs, ptr, rows, live, stride_b, first_id, column0, limit, IS_MASK: gl.constexpr):
    """Of a [B, V] table of global ids, or [V] with stride_b 0; offsets in int64: B * V can pass 2^31."""
    lay: gl.constexpr = gl.join(xs[0], xs[1]).type.layout
    place = pair_places(lay)
    row = gl.expand_dims(gl.convert_layout(gl.where(live, rows, 0), gl.SliceLayout(2, lay)), 2)
    # first_id is a multiple of 128: the shifts tell the compiler, which then knows of the alignment
    base = ptr + row.to(gl.int64) * stride_b + ((first_id >> 7 << 7) + column0 + place)
    return use_table(xs, base, place, limit - column0, IS_MASK)


@gluon.jit
def load_mask_word(ptr, rows, live, stride_b, word, inside, stride_w):
    """A word of 32 ids of each row of a packed mask [B, W], 0 where it has none; offsets in int64."""
    offsets = rows.to(gl.int64) * stride_b + word.to(gl.int64) * stride_w
    return gl.load(ptr + offsets, mask=live & inside, other=0)


@gluon.jit
def load_starts(tables, block, BLOCKS: gl.constexpr):
    """Where the sparse triples of each block of 128 ids begin, sorted by id, and those of the last end."""
    starts_ptr = tables[16]
    starts = ()  # type: tuple[gl.tensor, ...]
    if starts_ptr is not None:
        for b in gl.static_range(BLOCKS + 1):
            starts += (gl.load(starts_ptr + block + b),)
    return starts


@gluon.jit
def load_triple(tables, i, end):
    """The lower words of row and id: where a row needs more, no row of the call counts."""
    rows_ptr, ids_ptr, values_ptr = tables[13], tables[14], tables[15]
    row = gl.load(rows_ptr + i, mask=i < end, other=0).to(gl.int32)
    id = gl.load(ids_ptr + i, mask=i < end, other=0).to(gl.int32)
    return row, id, gl.load(values_ptr + i, mask=i < end, other=0.0)


@gluon.jit
def load_first(tables, starts, BLOCKS: gl.constexpr):
    """Of each block where its triples begin and end, and the first of them, which is on its way long before
    it is used."""
    out = ()  # type: tuple[tuple[gl.tensor, ...], ...]
    for b in gl.static_range(BLOCKS):
        if len(starts) > 0:
            out += ((starts[b], starts[b + 1], load_triple(tables, starts[b], starts[b + 1])),)
        else:
            out += ((),)
    return out


@gluon.jit
def use_sparse(xs, rows, span, lane, id0, tables, sparse):
    """Add the triples of a block one by one, those of other rows aside; of 32 members a triple can be one of
    the eight in its 32 ids."""
    i, end, triple = sparse
    while i < end:
        row, id, value = triple
        i += 1
        triple = load_triple(tables, i, end)  # under way while this one is added
        if (row >= span[0]) & (row < span[1]):
            local = id - id0
            hit = (rows == row) & (lane == (local & 7) // 2)
            # -0: what any logit can be added to without a change
            nothing = gl.to_tensor(0x80000000).to(gl.uint32).to(gl.float32, bitcast=True)
            added = gl.where(hit, value, nothing)
            member = (local >> 3) * 2 + (local & 1)
            for quarter in gl.static_range(4):
                if member >> 3 == quarter:
                    biased = ()  # type: tuple[gl.tensor, ...]
                    for j in gl.static_range(32):
                        if j // 8 == quarter:
                            biased += (gl.where(member == j, xs[j] + added, xs[j]),)
                        else:
                            biased += (xs[j],)
                    xs = biased
    return xs


@gluon.jit
def transform(
    xs, rows, live, span, lane, column0, sparse, tables,
    HAS_SCALE: gl.constexpr, HAS_SOFTCAP: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    """Head bias, scale, soft-cap, logit bias, -inf where forbidden: in this order (contract section 1).
    sparse is what `load_first` gave; the rows lie in span (first, end)."""
    (first_id, limit, head_bias_ptr, logit_scale, softcap,
     bias_ptr, bias_stride_b, mask_ptr, mask_stride_b,
     bits_ptr, bits_stride_b, bits_stride_w, num_words,
     sparse_rows_ptr, _, _, _) = tables  # fmt: skip
    if bits_ptr is not None:
        words = ()  # type: tuple[gl.tensor, ...]
        for w in gl.static_range(4):
            at = (first_id + column0) // 32 + w
            word = load_mask_word(
                bits_ptr, rows, live, bits_stride_b, at + rows * 0, at < num_words, bits_stride_w
            )
            words += (word >> (lane * 2),)
    if head_bias_ptr is not None:
        xs = use_head_bias(xs, head_bias_ptr, column0, limit)
    out = ()  # type: tuple[gl.tensor, ...]
    for j in gl.static_range(32):
        y = xs[j]
        if HAS_SCALE:
            y *= logit_scale
        if HAS_SOFTCAP:
            y = soft_cap(y, softcap, FAST)
        out += (y,)
    if bias_ptr is not None:
        out = use_rows(out, bias_ptr, rows, live, bias_stride_b, first_id, column0, limit, False)
    if sparse_rows_ptr is not None:
        out = use_sparse(out, rows, span, lane, first_id + column0, tables, sparse)
    if mask_ptr is not None:
        out = use_rows(out, mask_ptr, rows, live, mask_stride_b, first_id, column0, limit, True)
    if bits_ptr is not None:
        masked = ()  # type: tuple[gl.tensor, ...]
        for j in gl.static_range(32):
            allowed = (words[j // 8] >> (8 * ((j // 2) % 4) + j % 2)) & 1
            masked += (gl.where(allowed != 0, out[j], float("-inf")),)
        out = masked
    if column0 + 128 > limit:
        masked = ()
        for j in gl.static_range(32):
            masked += (gl.where(column0 + places_of(lane, j) < limit, out[j], float("-inf")),)
        out = masked
    return out


@gluon.jit
def store_pair(logits_ptr, even, odd, rows, num_rows, column0, num_columns):
    """Ids column0 + 2 lane and the next, [M, 4] each: neighbours, in one store of 8 bytes where V is a
    multiple of 16, so that four lanes fill a sector of 32 bytes; else in two, since a row need not begin at a
    multiple of 8."""
    pair = gl.join(even, odd)  # [M, 4, 2]
    lay: gl.constexpr = pair.type.layout
    lane = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(0, lay)))
    last = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, lay)))
    row = gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(2, lay)), 2)
    lane = gl.expand_dims(gl.expand_dims(lane, 1), 0)
    column = lane * 2 + gl.expand_dims(gl.expand_dims(last, 0), 0) + column0
    ok = (row < num_rows) & (column < num_columns)
    gl.store(logits_ptr + row.to(gl.int64) * num_columns + column, pair, mask=ok)


@gluon.jit
def store_logits(logits_ptr, xs, rows, num_rows, column0, num_columns):
    """y [B, V] fp32."""
    for i in gl.static_range(16):
        store_pair(logits_ptr, xs[2 * i], xs[2 * i + 1], rows, num_rows, column0 + 8 * i, num_columns)
