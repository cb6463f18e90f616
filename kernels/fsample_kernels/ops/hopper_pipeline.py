"""The matmul of the Hopper kernel: tiles dealt to CTAs, the TMA ring that feeds them, and wgmma on it.

A stage of the ring is one k-block of W and of H. The producer waits on `empty` and fills stages in order; a
consumer warpgroup waits on `full_bars` and hands a stage back when wgmma has read it. Stage i of the whole
run is slot i % STAGES, and i // STAGES gives the phase of its barriers. Both sides walk the same list of
tiles, which `split_work` gives.

One thread hands a stage back for its warpgroup. The compiler puts a barrier of the warpgroup between the wait
and that, so that no warp falls behind by two turns of the ring, whose phases look alike; the tests of the
compiled code hold it to that.
"""

# No `from __future__ import annotations`: Gluon reads the constexpr annotations.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from fsample_kernels.ops.gluon_names import load_box


@gluon.jit
def split_work(units, ctas, cta, blocks_d, BV: gl.constexpr):
    """How the tiles over units of 128 ids are dealt to the CTAs of a block of rows; `tile_of` reads it.

    In turn. What tiles of 256 ids would leave of a round is dealt by k-blocks, where that is more than the
    way of a sum through memory costs (`hopper_carry.py`). A CTA then has a tile's length of it at least, so
    that no tile has three parts. Five tiles of 20 k-blocks on two CTAs: 0, 3[0:10] and 4; 1, 2 and 3[10:20].
    The first leaves its part of tile 3 before the second needs it.
    """
    tiles = gl.cdiv(units, BV // 128)
    full = gl.cdiv(gl.maximum(tiles - cta, 0), ctas)  # tiles dealt in turn
    count = full  # of all tiles
    top = 0  # the first of those that are not dealt in turn
    d_begin = 0  # where the last tile begins
    d_end = blocks_d  # where tile `top` ends
    if BV > 128:
        idle = (gl.cdiv(tiles, ctas) * ctas - tiles) * blocks_d
        if (tiles > ctas) & (idle > 8 * ctas):
            # k-blocks begin to end of the tiles left, in a row with the highest first: so the tiles of a
            # CTA ascend, `top` is the one that may lack its end, and the last lacks what CTA - 1 has done
            full = tiles // ctas - 1
            remaining = (tiles - full * ctas) * blocks_d
            begin = cta * remaining // ctas
            end = (cta + 1) * remaining // ctas
            from_last = gl.cdiv(end, blocks_d)
            top = tiles - from_last
            d_end = end - (from_last - 1) * blocks_d
            d_begin = begin % blocks_d
            count = full + from_last - begin // blocks_d
    return full, count, top, d_begin, d_end


@gluon.jit
def tile_of(n, deal, ctas, cta, blocks_d):
    """Tile n of the CTA, and its k-blocks d0 .. d1 - 1."""
    full, count, top, d_begin, d_end = deal
    tile = n * ctas + cta
    if n >= full:
        tile = top + n - full
    d0 = 0
    if n == count - 1:
        d0 = d_begin
    d1 = blocks_d
    if n == full:
        d1 = d_end
    return tile, d0, d1


@gluon.jit
def last_box(num_rows, row0, BH: gl.constexpr, BOX: gl.constexpr):
    """The first row of the last box of H of a block of rows, and how far that box is pulled back.

    So far that it ends with the batch: of 40 rows in boxes of 32 the second holds rows 8 to 39, not 32 to 63.
    TMA takes longer for rows of zeros past a tensor's end than for data, up to a tenth of a call. The rows
    that then lie in two boxes are drawn twice, with one result. A block of fewer rows than a box stays.
    """
    rows = gl.minimum(num_rows - row0, BH)
    edge = row0 + (rows - 1) // BOX * BOX
    back = edge + BOX - row0 - rows
    if rows < BOX:
        back = 0
    return edge, back


@gluon.jit
def load_stage(
    w, h, w_buf, h0_buf, h1_buf, bar, column0, d0, row0, row_boxes, back,
    WIDE: gl.constexpr, MW0: gl.constexpr, MW1: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """One k-block of W, 128 ids a box, and row_boxes of H, BOX rows each, the last pulled `back`."""
    BOXES: gl.constexpr = (MW0 + MW1) // BOX
    for n in gl.static_range(BOXES + 1):  # the byte count of an expect is a constant: one of these fires
        mbarrier.expect(bar, WIDE * w.block_type.nbytes + n * h.block_type.nbytes, pred=n == row_boxes)
    for v in gl.static_range(WIDE):
        load_box(w, [column0 + v * 128, d0], bar, w_buf.slice(v * 128, 128))
    for b in gl.static_range(BOXES):
        row = row0 + b * BOX
        if b == row_boxes - 1:
            row -= back
        if b < MW0 // BOX:
            load_box(h, [row, d0], bar, h0_buf.slice(b * BOX, BOX), pred=b < row_boxes)
        else:
            load_box(h, [row, d0], bar, h1_buf.slice(b * BOX - MW0, BOX), pred=b < row_boxes)


@gluon.jit
def producer(
    w, h, ring, place, num_rows, blocks_d,
    BV: gl.constexpr, BD: gl.constexpr, BOX: gl.constexpr, MW0: gl.constexpr, MW1: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: every k-block of the CTA's tiles into the ring."""
    w_bufs, h0_bufs, h1_bufs, empty, full_bars = ring
    units, ctas, cta, row0 = place
    deal = split_work(units, ctas, cta, blocks_d, BV)
    row_boxes = gl.minimum(gl.cdiv(num_rows - row0, BOX), (MW0 + MW1) // BOX)
    _, back = last_box(num_rows, row0, MW0 + MW1, BOX)
    i = 0
    for n in range(deal[1]):
        tile, d0, d1 = tile_of(n, deal, ctas, cta, blocks_d)
        for d in range(d0, d1):
            s = i % STAGES
            mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
            load_stage(
                w, h, w_bufs.index(s), h0_bufs.index(s), h1_bufs.index(s), full_bars.index(s),
                tile * BV, d * BD, row0, row_boxes, back, BV // 128, MW0, MW1, BOX,
            )  # fmt: skip
            i += 1


@gluon.jit
def accumulate(
    ring, i, acc, d0, d1,
    WG: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr,
):  # fmt: skip
    """acc plus k-blocks d0 .. d1 - 1 of H W^T of one tile for this warpgroup's rows, [MW, N] fp32, and the
    number of the next stage. What acc holds does not count at d0 = 0.

    IN_FLIGHT wgmma groups run on while the next stage is waited for; a stage is handed back that many stages
    late. With 1 the tensor cores never wait for the issue of the next stage; with 0 no stage that has been
    used up stands idle, which counts where memory sets the pace.
    """
    w_bufs, _, _, empty, full_bars = ring
    h_bufs = ring[1 + WG]
    for d in range(d0, d1):
        s = i % STAGES
        mbarrier.wait(full_bars.index(s), (i // STAGES) & 1)
        w_tile = w_bufs.index(s).slice(0, N).permute((1, 0))
        acc = warpgroup_mma(h_bufs.index(s), w_tile, acc, use_acc=d > 0, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=IN_FLIGHT, deps=(acc,))
        if IN_FLIGHT == 0:
            mbarrier.arrive(empty.index(s), count=1)
        elif d > d0:
            mbarrier.arrive(empty.index((i - 1) % STAGES), count=1)
        i += 1
    if IN_FLIGHT == 1:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((i - 1) % STAGES), count=1)
    return acc, i
