"""The fast path on Hopper: LM-head matmul and draw in one launch; where ids are all, it stores a key a row.

At most one persistent CTA per SM. A producer warp streams tiles of W and H through a ring of shared-memory
stages by TMA (`hopper_pipeline.py`); one or two consumer warpgroups run wgmma with batch rows on M and
vocabulary ids on N, transform a tile (`hopper_tile.py`), draw one id in every group of 32 (`hopper_draw.py`)
and keep the best (score, id) of each row in registers over all their tiles (`hopper_rows.py`). At the end one
64-bit atomic max a row and CTA; the last CTA of a block of rows writes the ids and resets the workspace for
the next launch; of a head that is split over ranks it leaves the keys, or exchanges them with the other GPUs
while other blocks of rows still run. Log-probabilities, the log-sum-exp and several samples a row leave
candidates instead, and `reduce_candidates` ends. Where tiles are parted, a CTA also leaves one accumulator to
the next (`hopper_carry.py`), and in such tiles the draw inside a group waits for the end (`hopper_keep.py`).

Values that only travel do so in tuples, none of which holds a constexpr: out of a tuple in a variable it
would come as a tensor. M is MW0 or MW1, the rows of a warpgroup; what has no brackets is one int32 or bool.
In the layout "lanes" (`hopper_tile.lanes_of_rows(M)`) a thread holds one of a block's four groups, of M / 32
rows.

    name       what it holds                                             where             filled by
    ring       w_bufs [STAGES, BV, BD], h0_bufs [STAGES, MW0, BD],
               h1_bufs [STAGES, MW1, BD], or h0_bufs again: bf16, fp16   shared, swizzled  producer
               empty [STAGES, 1], full_bars [STAGES, 1] int64            shared, barriers  accumulate; TMA
    place      units of 128 ids; ctas, cta: of the block of rows; row0   registers         hopper_kernel
    sizes      num_rows, num_columns, num_samples, blocks_d, num_slots   registers         hopper_kernel
    carry      sums_ptr [programs, 2, BV / 8, M, 8] fp32                 global            leave_sum
               flags_ptr [programs, 2] int32, 1 where a sum waits        global            leave_sum
    kept_ptr   [16, M, 4, 2] fp32 a warpgroup: logits of leading groups  global            keep
    row_state  rows [M, 1] int32, live [M, 1] bool, c [M, 1] fp32,
               greedy [M, 1] bool, any_greedy, span (first, end)         lanes             consumer, once
    lane       [1, 4] int32, 0 to 3: the group in its block              lanes             finish_tile
    acc        [M, BV] fp32, the logits of a tile                        wgmma's           accumulate
    xs         32 of [M, 4] fp32: logit of member j of each group        lanes             by_group, transform
    words      four uint32, each [M, 1] or one for all rows              lanes             load_words
    state      five of [M, 4], see `hopper_rows.py`                      lanes             draw_into
"""

# No `from __future__ import annotations`: Gluon reads the annotations of the kernel.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fsample_kernels.ops.gluon_names import cta_barrier
from fsample_kernels.ops.hopper_carry import leave_sum, take_sum
from fsample_kernels.ops.hopper_pipeline import accumulate, last_box, producer, split_work, tile_of
from fsample_kernels.ops.hopper_rows import (
    draw_into,
    draw_kept,
    empty_state,
    load_scale,
    meet_peers,
    publish,
    store_candidates,
    take_keys,
    write_ids,
)
from fsample_kernels.ops.hopper_tile import (
    blocks,
    by_group,
    load_first,
    load_starts,
    store_logits,
    transform,
)

# Numbers that change from call to call must not make new compiled variants, nor must the address of a row
# parameter. The compiler learns whether the number of ids is a multiple of 16, and by PITCH_16 the same of
# the rows of [B, V] tables: neighbours are then loaded and stored at once.
UNSPECIALIZED = (
    "num_rows", "num_samples", "size_d", "units", "num_slots", "first_id",
    "temperature_stride", "seed_stride", "seed_low", "seed_high", "position_stride", "position", "numbered",
    "bias_stride_b", "mask_stride_b", "bits_stride_b", "bits_stride_w", "num_words",
)  # fmt: skip
ANY_ALIGNMENT = (
    "temperature_ptr", "seed_ptr", "position_ptr", "spoiled_ptr",
    "bits_ptr", "sparse_rows_ptr", "sparse_ids_ptr", "sparse_values_ptr", "sparse_starts_ptr",
)  # fmt: skip


@gluon.jit
def finish_tile(
    acc, state, column0, slot, starts, row_state, sizes, row_args, tables, candidates, logits_ptr, kept_ptr,
    M: gl.constexpr, N: gl.constexpr, HAS_SCALE: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    SINGLE: gl.constexpr, WANT_MASS: gl.constexpr, GROUPED: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    """Transforms, logits if asked for, draws. With several samples a tile leaves its candidates at once."""
    rows, live, _, _, _, span = row_state
    first_id = tables[0]
    num_rows, num_columns, num_samples, _, num_slots = sizes
    lay: gl.constexpr = state[0].type.layout
    lane = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, lay)), 0)
    sparse = load_first(tables, starts, N // 128)
    pieces = blocks(acc, M, N)
    # all blocks before the draws: each sample draws in all of them, and they are transformed and stored once
    ready = ()  # type: tuple[tuple[gl.tensor, ...], ...]
    for b in gl.static_range(N // 128):
        xs = transform(
            by_group(pieces[b], M), rows, live, span, lane, column0 + b * 128, sparse[b], tables,
            HAS_SCALE, HAS_SOFTCAP, FAST,
        )  # fmt: skip
        if logits_ptr is not None:
            store_logits(logits_ptr, xs, rows, num_rows, column0 + b * 128, num_columns)
        ready += (xs,)
    first_block = (first_id + column0) // 128
    if SINGLE:
        for b in gl.static_range(N // 128):
            state = draw_into(
                state, ready[b], row_state, row_args, gl.to_tensor(0).to(gl.uint32), lane, first_block + b,
                column0 + b * 128, kept_ptr, M, WANT_MASS, GROUPED, FAST,
            )  # fmt: skip
    else:
        for k in range(num_samples):
            sample = gl.to_tensor(k)
            one = empty_state(M, lay)
            for b in gl.static_range(N // 128):
                one = draw_into(
                    one, ready[b], row_state, row_args, sample.to(gl.uint32), lane, first_block + b,
                    column0 + b * 128, None, M, WANT_MASS, GROUPED, FAST,
                )  # fmt: skip
            store_candidates(
                one, gl.max(rows, 1), num_rows, first_id, slot, num_slots, sample, candidates, WANT_MASS
            )
    return state


@gluon.jit
def consumer(
    ring, place, sizes, carry, kept_ptr, keys_ptr, row_args, tables, candidates, logits_ptr,
    WG: gl.constexpr, BV: gl.constexpr, BOX: gl.constexpr, MW0: gl.constexpr, MW1: gl.constexpr,
    STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr, HAS_SCALE: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    SINGLE: gl.constexpr, WANT_MASS: gl.constexpr, GROUPED: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    """One warpgroup: of every tile of the CTA the MW0 rows from row0 on, or the MW1 rows after these; in the
    last box of H pulled back as `last_box` says."""
    units, ctas, cta, row0 = place
    first_id = tables[0]
    first_row = row0 + WG * MW0
    MW: gl.constexpr = MW0 if WG == 0 else MW1
    num_rows, _, _, blocks_d, num_slots = sizes
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BV, 16]
    )
    block = blocks(gl.zeros((MW, BV), gl.float32, layout=mma), MW, BV)[0]
    lay: gl.constexpr = by_group(block, MW)[0].type.layout
    rows = gl.expand_dims(gl.arange(0, MW, layout=gl.SliceLayout(1, lay)), 1) + first_row
    edge, back = last_box(num_rows, row0, MW0 + MW1, BOX)
    rows -= gl.where(rows >= edge, back, 0)
    live = rows < num_rows
    c, greedy = load_scale(rows, live, row_args)
    any_greedy = gl.max(gl.max((greedy & live).to(gl.int32), 1), 0) > 0
    row_state = (rows, live, c, greedy, any_greedy, (first_row - back, first_row + MW))
    state = empty_state(MW, lay)
    if kept_ptr is not None:
        kept_ptr += (gl.program_id(0) * 2 + WG) * (MW0 * 128)
    row_blocks = gl.cdiv(num_rows, MW0 + MW1)
    deal = split_work(units, ctas, cta, blocks_d, BV)
    i = 0
    for n in range(deal[1]):
        tile, d0, d1 = tile_of(n, deal, ctas, cta, blocks_d)
        starts = load_starts(tables, tile * (BV // 128), BV // 128)  # under way during the matmul
        acc = gl.zeros((MW, BV), gl.float32, layout=mma)
        if BV > 128:
            if d0 > 0:
                acc = take_sum(carry, row_blocks, acc, WG, MW, BV)
        acc, i = accumulate(ring, i, acc, d0, d1, WG, BV, STAGES, IN_FLIGHT)
        if d1 < blocks_d:
            if BV > 128:
                leave_sum(carry, acc, WG, MW, BV)
        else:
            state = finish_tile(
                acc, state, tile * BV, tile * (BV // 128), starts, row_state, sizes, row_args, tables,
                candidates, logits_ptr, kept_ptr, MW, BV, HAS_SCALE, HAS_SOFTCAP, SINGLE, WANT_MASS,
                GROUPED, FAST,
            )  # fmt: skip
    if kept_ptr is not None:
        state = draw_kept(state, row_state, row_args, kept_ptr, first_id, MW, WANT_MASS, FAST)
    if keys_ptr is not None:
        publish(keys_ptr, state, gl.max(rows, 1), num_rows, first_id)
    elif SINGLE:
        store_candidates(
            state, gl.max(rows, 1), num_rows, first_id, cta, num_slots, gl.to_tensor(0), candidates,
            WANT_MASS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def hopper_kernel(
    w, h,  # TMA descriptors of weight [V, D] in boxes [128, BD] and hidden [B, D] in boxes [BOX, BD]
    keys_ptr, counters_ptr, ids_ptr,  # [B] int64, [row blocks] int32, [B, 1] int64; None: leave candidates
    kept_ptr,  # of `hopper_keep`, or None: draw inside every group at once
    sums_ptr, flags_ptr,  # of `hopper_carry`; None where tiles are 128 wide
    link_ptr,  # None, or what `link` says: then ids are those of the best of all ranks' keys
    num_rows: gl.int32, num_columns: gl.int32, num_samples: gl.int32, size_d: gl.int32, units: gl.int32,
    num_slots: gl.int32, first_id: gl.int32, limit: gl.int32,
    temperature_ptr, temperature_stride: gl.int32, scale: gl.float32,
    seed_ptr, seed_stride: gl.int32, seed_low: gl.int32, seed_high: gl.int32,
    position_ptr, position_stride: gl.int32, position: gl.int32, numbered: gl.int32, spoiled_ptr,
    head_bias_ptr, logit_scale: gl.float32, softcap: gl.float32,
    bias_ptr, bias_stride_b: gl.int64,
    mask_ptr, mask_stride_b: gl.int64,
    bits_ptr, bits_stride_b: gl.int64, bits_stride_w: gl.int64, num_words: gl.int32,
    sparse_rows_ptr, sparse_ids_ptr, sparse_values_ptr, sparse_starts_ptr,
    score_ptr, id_ptr, logit_ptr, max_ptr, sum_ptr, logits_ptr,
    HAS_SCALE: gl.constexpr, HAS_SOFTCAP: gl.constexpr, SINGLE: gl.constexpr, WANT_MASS: gl.constexpr,
    GROUPED: gl.constexpr, FAST: gl.constexpr,
    BV: gl.constexpr, BD: gl.constexpr, BOX: gl.constexpr, MW0: gl.constexpr, MW1: gl.constexpr,
    STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
    PITCH_16: gl.constexpr,  # rows of bias and mask lie a multiple of 16 entries apart
    KEYS: gl.constexpr, RANKS: gl.constexpr,  # leave keys in place of ids; ranks of the link
):  # fmt: skip
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, BD], w.dtype)
    h_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([MW0, BD], h.dtype)
    BH: gl.constexpr = MW0 + MW1
    SPAN: gl.constexpr = MW0 + MW0 * (MW1 > 0)  # the power of two that holds a block of rows
    WARPGROUPS: gl.constexpr = 2 if MW1 > 0 else 1
    gl.static_assert((BV == 128) | (MW0 == MW1), "`hopper_carry.places` wants warpgroups of one height")
    w_bufs = gl.allocate_shared_memory(w.dtype, [STAGES, BV, BD], w_layout)
    h0_bufs = gl.allocate_shared_memory(h.dtype, [STAGES, MW0, BD], h_layout)
    h1_bufs = h0_bufs
    if MW1 > 0:
        h1_bufs = gl.allocate_shared_memory(h.dtype, [STAGES, MW1, BD], h_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(empty.index(s), count=WARPGROUPS)
        mbarrier.init(full_bars.index(s), count=1)
    # a CTA keeps one block of rows for the whole kernel, so that a row's best stays in registers
    row_blocks = gl.cdiv(num_rows, BH)
    ctas = gl.num_programs(0) // row_blocks
    row_block = gl.program_id(0) % row_blocks
    cta = gl.program_id(0) // row_blocks
    row0 = row_block * BH
    blocks_d = gl.cdiv(size_d, BD)
    ring = (w_bufs, h0_bufs, h1_bufs, empty, full_bars)
    place = (units, ctas, cta, row0)
    carry = (sums_ptr, flags_ptr)
    sizes = (num_rows, num_columns, num_samples, blocks_d, num_slots)
    row_args = (
        temperature_ptr, temperature_stride, scale, seed_ptr, seed_stride, seed_low, seed_high,
        position_ptr, position_stride, position, numbered, spoiled_ptr,
    )  # fmt: skip
    if PITCH_16:
        bias_stride_b = bias_stride_b >> 4 << 4
        mask_stride_b = mask_stride_b >> 4 << 4
    tables = (
        first_id, limit, head_bias_ptr, logit_scale, softcap,
        bias_ptr, bias_stride_b, mask_ptr, mask_stride_b,
        bits_ptr, bits_stride_b, bits_stride_w, num_words,
        sparse_rows_ptr, sparse_ids_ptr, sparse_values_ptr, sparse_starts_ptr,
    )  # fmt: skip
    candidates = (score_ptr, id_ptr, logit_ptr, max_ptr, sum_ptr)
    # the first partition has the CTA's own 4 warps and gets the registers that the others leave
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (consumer, (
                ring, place, sizes, carry, kept_ptr, keys_ptr, row_args, tables, candidates, logits_ptr,
                gl.constexpr(0), BV, BOX, MW0, MW1, STAGES, IN_FLIGHT,
                HAS_SCALE, HAS_SOFTCAP, SINGLE, WANT_MASS, GROUPED, FAST)),
            (consumer, (
                ring, place, sizes, carry, kept_ptr, keys_ptr, row_args, tables, candidates, logits_ptr,
                gl.constexpr(1), BV, BOX, MW0, MW1, STAGES, IN_FLIGHT,
                HAS_SCALE, HAS_SOFTCAP, SINGLE, WANT_MASS, GROUPED, FAST)),
            (producer, (w, h, ring, place, num_rows, blocks_d, BV, BD, BOX, MW0, MW1, STAGES)),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (
                ring, place, sizes, carry, kept_ptr, keys_ptr, row_args, tables, candidates, logits_ptr,
                gl.constexpr(0), BV, BOX, MW0, MW1, STAGES, IN_FLIGHT,
                HAS_SCALE, HAS_SOFTCAP, SINGLE, WANT_MASS, GROUPED, FAST)),
            (producer, (w, h, ring, place, num_rows, blocks_d, BV, BD, BOX, MW0, MW1, STAGES)),
        ], [1], [PRODUCER_REGS])  # fmt: skip
    if keys_ptr is not None:
        # the barrier orders this CTA's relaxed atomics before the acq_rel counter, so that the last sees all
        cta_barrier()
        arrived = gl.atomic_add(counters_ptr + row_block, 1, sem="acq_rel", scope="gpu")
        if arrived == ctas - 1:
            end = gl.minimum(row0 + BH, num_rows)
            if KEYS:
                r, key = take_keys(keys_ptr, counters_ptr, row0, row_block, end, SPAN)
                gl.store(ids_ptr + r, key, mask=r < end)
            elif link_ptr is not None:
                meet_peers(
                    keys_ptr, counters_ptr, ids_ptr, link_ptr, row0, row_block, row_blocks, end, SPAN, RANKS
                )
            else:
                write_ids(keys_ptr, counters_ptr, ids_ptr, row0, row_block, end, SPAN)
