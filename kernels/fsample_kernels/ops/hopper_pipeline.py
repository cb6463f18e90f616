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
def split_work(units, ctas, cta, BV: gl.constexpr, EVEN: gl.constexpr):
    """How the units of 128 ids are dealt: (full, rounds, whole, steps).

    First `full` tiles of BV ids to every CTA, then units one by one for `rounds` rounds: 593.5 tiles of 256
    on 132 SMs are 4.5 rounds instead of 5. When a last round would keep no more than half of the CTAs busy
    and two warpgroups have as many rows each (EVEN), its units, from number `whole` on, go to two CTAs each,
    one a warpgroup's rows. `steps` counts the CTA's units, that one included.
    """
    full = 0
    if BV > 128:
        full = units // (BV // 128 * ctas)
    dealt = full * (BV // 128) * ctas
    last = (units - dealt) % ctas
    whole = units
    if EVEN:
        if 2 * last <= ctas:
            whole = units - last
    rounds = gl.cdiv(gl.maximum(whole - dealt - cta, 0), ctas)
    steps = rounds
    if cta < 2 * (units - whole):
        steps += 1
    return full, rounds, whole, steps


@gluon.jit
def unit_of(j, full, rounds, whole, ctas, cta, BV: gl.constexpr):
    """Number of the CTA's unit j, and the warpgroup whose rows it is for, -1 for both."""
    unit = full * (BV // 128) * ctas + cta + j * ctas
    only = -1
    if j == rounds:
        unit = whole + cta // 2
        only = cta % 2
    return unit, only


@gluon.jit
def load_stage(
    w, h, w_buf, h0_buf, h1_buf, bar, column0, d0, row0, box0, box1,
    WIDE: gl.constexpr, MW0: gl.constexpr, MW1: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """One k-block of W, 128 ids a box, and boxes box0 .. box1 - 1 of H, BOX rows each: boxes without rows
    would be filled with zeros, which costs as much time as data."""
    BOXES: gl.constexpr = (MW0 + MW1) // BOX
    for n in gl.static_range(BOXES + 1):  # the byte count of an expect is a constant: one of these fires
        mbarrier.expect(bar, WIDE * w.block_type.nbytes + n * h.block_type.nbytes, pred=n == box1 - box0)
    for v in gl.static_range(WIDE):
        load_box(w, [column0 + v * 128, d0], bar, w_buf.slice(v * 128, 128))
    for b in gl.static_range(BOXES):
        wanted = (b >= box0) & (b < box1)
        if b < MW0 // BOX:
            load_box(h, [row0 + b * BOX, d0], bar, h0_buf.slice(b * BOX, BOX), pred=wanted)
        else:
            load_box(h, [row0 + b * BOX, d0], bar, h1_buf.slice(b * BOX - MW0, BOX), pred=wanted)


@gluon.jit
def producer(
    w, h, ring, share, num_rows, blocks_d,
    BV: gl.constexpr, BD: gl.constexpr, BOX: gl.constexpr, MW0: gl.constexpr, MW1: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: every k-block of the CTA's tiles into the ring."""
    w_bufs, h0_bufs, h1_bufs, empty, full_bars = ring
    units, ctas, cta, row0 = share
    full, rounds, whole, steps = split_work(units, ctas, cta, BV, MW0 == MW1)
    row_boxes = gl.minimum(gl.cdiv(num_rows - row0, BOX), (MW0 + MW1) // BOX)
    i = 0
    if BV > 128:
        for n in range(full):
            for d in range(blocks_d):
                s = i % STAGES
                mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
                load_stage(
                    w, h, w_bufs.index(s), h0_bufs.index(s), h1_bufs.index(s), full_bars.index(s),
                    (n * ctas + cta) * BV, d * BD, row0, 0, row_boxes, BV // 128, MW0, MW1, BOX,
                )  # fmt: skip
                i += 1
    for j in range(steps):
        unit, only = unit_of(j, full, rounds, whole, ctas, cta, BV)
        box0 = 0
        box1 = row_boxes
        if only >= 0:
            box0 = gl.minimum(only * (MW0 // BOX), row_boxes)
            box1 = gl.minimum((only + 1) * (MW0 // BOX), row_boxes)
        for d in range(blocks_d):
            s = i % STAGES
            mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
            load_stage(
                w, h, w_bufs.index(s), h0_bufs.index(s), h1_bufs.index(s), full_bars.index(s),
                unit * 128, d * BD, row0, box0, box1, 1, MW0, MW1, BOX,
            )  # fmt: skip
            i += 1


@gluon.jit
def accumulate(
    ring, i, blocks_d,
    WG: gl.constexpr, N: gl.constexpr, MW: gl.constexpr, STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr,
):  # fmt: skip
    """H W^T of one tile for this warpgroup's rows, [MW, N] fp32, and the number of the next stage.

    IN_FLIGHT wgmma groups run on while the next stage is waited for; a stage is handed back that many stages
    late. With 1 the tensor cores never wait for the issue of the next stage; with 0 no stage that has been
    used up stands idle, which counts where memory sets the pace.
    """
    w_bufs, _, _, empty, full_bars = ring
    h_bufs = ring[1 + WG]
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    acc = gl.zeros((MW, N), gl.float32, layout=mma)
    for d in range(blocks_d):
        s = i % STAGES
        mbarrier.wait(full_bars.index(s), (i // STAGES) & 1)
        w_tile = w_bufs.index(s).slice(0, N).permute((1, 0))
        acc = warpgroup_mma(h_bufs.index(s), w_tile, acc, use_acc=d > 0, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=IN_FLIGHT, deps=(acc,))
        if IN_FLIGHT == 0:
            mbarrier.arrive(empty.index(s), count=1)
        elif d > 0:
            mbarrier.arrive(empty.index((i - 1) % STAGES), count=1)
        i += 1
    if IN_FLIGHT == 1:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((i - 1) % STAGES), count=1)
    return acc, i


@gluon.jit
def pass_over(ring, i, blocks_d, STAGES: gl.constexpr):
    """Hand back unread the stages of a tile that is for the other warpgroup's rows."""
    _, _, _, empty, full_bars = ring
    for _ in range(blocks_d):
        mbarrier.wait(full_bars.index(i % STAGES), (i // STAGES) & 1)
        mbarrier.arrive(empty.index(i % STAGES), count=1)
        i += 1
    return i
