"""The fast path on Hopper: LM-head matmul and grouped draw in one launch, nothing stored but one key a row.

One persistent CTA per SM. A producer warp streams tiles of W and H through a ring of shared-memory stages by TMA; one
or two consumer warpgroups run wgmma with batch rows on M and vocabulary ids on N, draw one id in every group of 32
(`hopper_tile.py`) and keep the best (score, id) of each row in registers over all their tiles. At the end one 64-bit
atomic max a row and CTA; the last CTA of a block of rows writes the ids and resets the state for the next launch.
Log-probabilities, the log-sum-exp and several samples a row leave candidates instead, and `reduce_candidates` ends.
"""

# No `from __future__ import annotations`: Gluon reads the annotations of the kernel.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from fsample_kernels.ops.device import exp2
from fsample_kernels.ops.gluon_names import cta_barrier
from fsample_kernels.ops.hopper_tile import (
    add_mass,
    better,
    blocks,
    by_group,
    draw_block,
    store_logits,
    transform,
)

# No score yet: the image of -inf (see `publish`).
EMPTY_KEY = gl.constexpr(-0x7F800001 << 32)

# Numbers that change from call to call must not make new compiled variants, nor must the address of a row parameter.
UNSPECIALIZED = (
    "num_rows", "num_columns", "num_samples", "size_d", "units", "num_slots", "first_id", "limit", "temperature_stride",
    "seed_stride", "seed_low", "seed_high", "position_stride", "position", "numbered", "head_bias_stride", "bias_stride_b",
    "bias_stride_v", "mask_stride_b", "mask_stride_v", "bits_stride_b", "bits_stride_w", "num_words",
)  # fmt: skip
ANY_ALIGNMENT = (
    "temperature_ptr", "seed_ptr", "position_ptr", "spoiled_ptr", "head_bias_ptr", "bias_ptr", "mask_ptr", "bits_ptr",
    "sparse_rows_ptr", "sparse_ids_ptr", "sparse_values_ptr", "sparse_starts_ptr",
)  # fmt: skip


@gluon.jit
def split_work(units, ctas, cta, BV: gl.constexpr, WARPGROUPS: gl.constexpr):
    """How the units of 128 ids are dealt: (full, rounds, whole, steps).

    First `full` tiles of BV ids to every CTA, then units one by one for `rounds` rounds: 593.5 tiles of 256 on 132 SMs
    are 4.5 rounds instead of 5. When a last round would keep less than half of the CTAs busy, its units, from number
    `whole` on, go to two CTAs each, one a warpgroup's rows. `steps` counts the CTA's units, that one included.
    """
    full = 0
    if BV > 128:
        full = units // (BV // 128 * ctas)
    dealt = full * (BV // 128) * ctas
    last = (units - dealt) % ctas
    whole = units
    if WARPGROUPS == 2:
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
def load_stage(w, h, w_buf, h_buf, bar, column0, d0, row0, box0, box1, WIDE: gl.constexpr, BH: gl.constexpr,
               BOX: gl.constexpr):  # fmt: skip
    """One k-block of W, 128 ids a box, and boxes box0 .. box1 - 1 of H, BOX rows each: boxes without rows would be
    filled with zeros, which costs as much time as data."""
    for n in gl.static_range(BH // BOX + 1):  # the byte count of an expect is a constant: one of these fires
        mbarrier.expect(bar, WIDE * w.block_type.nbytes + n * h.block_type.nbytes, pred=n == box1 - box0)
    for v in gl.static_range(WIDE):
        tma.async_copy_global_to_shared(w, [column0 + v * 128, d0], bar, w_buf.slice(v * 128, 128))
    for b in gl.static_range(BH // BOX):
        wanted = (b >= box0) & (b < box1)
        tma.async_copy_global_to_shared(h, [row0 + b * BOX, d0], bar, h_buf.slice(b * BOX, BOX), pred=wanted)


@gluon.jit
def producer(w, h, w_bufs, h_bufs, empty, full_bars, units, ctas, cta, row0, num_rows, blocks_d, BV: gl.constexpr, BH: gl.constexpr,
             BD: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr):  # fmt: skip
    full, rounds, whole, steps = split_work(units, ctas, cta, BV, WARPGROUPS)
    row_boxes = gl.minimum(gl.cdiv(num_rows - row0, BOX), BH // BOX)
    i = 0
    if BV > 128:
        for n in range(full):
            for d in range(blocks_d):
                s = i % STAGES
                mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
                load_stage(w, h, w_bufs.index(s), h_bufs.index(s), full_bars.index(s), (n * ctas + cta) * BV, d * BD, row0,
                           0, row_boxes, BV // 128, BH, BOX)  # fmt: skip
                i += 1
    for j in range(steps):
        unit, only = unit_of(j, full, rounds, whole, ctas, cta, BV)
        box0 = 0
        box1 = row_boxes
        if only >= 0:
            box0 = gl.minimum(only * (BH // BOX // 2), row_boxes)
            box1 = gl.minimum((only + 1) * (BH // BOX // 2), row_boxes)
        for d in range(blocks_d):
            s = i % STAGES
            mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
            load_stage(w, h, w_bufs.index(s), h_bufs.index(s), full_bars.index(s), unit * 128, d * BD, row0, box0, box1, 1, BH,
                       BOX)  # fmt: skip
            i += 1


@gluon.jit
def accumulate(w_bufs, h_bufs, empty, full_bars, i, blocks_d, WG: gl.constexpr, N: gl.constexpr, MW: gl.constexpr,
               STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr):  # fmt: skip
    """H W^T of one tile for this warpgroup's rows, [MW, N] fp32, and the number of the next stage.

    IN_FLIGHT wgmma groups run on while the next stage is waited for; a stage is handed back that many stages late.
    With 1 the tensor cores never wait for the issue of the next stage; with 0 no stage that has been used up stands
    idle, which counts where memory sets the pace.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    acc = gl.zeros((MW, N), gl.float32, layout=mma)
    for d in range(blocks_d):
        s = i % STAGES
        mbarrier.wait(full_bars.index(s), (i // STAGES) & 1)
        h_tile = h_bufs.index(s).slice(WG * MW, MW)
        acc = warpgroup_mma(h_tile, w_bufs.index(s).slice(0, N).permute((1, 0)), acc, use_acc=d > 0, is_async=True)
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
def pass_over(empty, full_bars, i, blocks_d, STAGES: gl.constexpr):
    """Hand back unread the stages of a tile that is for the other warpgroup's rows."""
    for _ in range(blocks_d):
        mbarrier.wait(full_bars.index(i % STAGES), (i // STAGES) & 1)
        mbarrier.arrive(empty.index(i % STAGES), count=1)
        i += 1
    return i


@gluon.jit
def load_words(rows, live, row_args):
    """Philox counter and key words that belong to a row, uint32 each.

    Read again for every block, and volatile, so that they are not kept: they would not fit beside the accumulator.
    """
    (_, _, _, seed_ptr, seed_stride, seed_low, seed_high, position_ptr, position_stride, position, numbered, _) = row_args  # fmt: skip
    if seed_ptr is None:
        key0 = seed_low.to(gl.uint32, bitcast=True)
        key1 = seed_high.to(gl.uint32, bitcast=True)
    else:
        seed = gl.load(seed_ptr + rows * seed_stride, mask=live, other=0, volatile=True)
        key0 = seed.to(gl.uint32)
        key1 = (seed >> 32).to(gl.uint32)
    if position_ptr is None:
        step = position.to(gl.uint32, bitcast=True)
    else:
        step = gl.load(position_ptr + rows * position_stride, mask=live, other=0, volatile=True).to(gl.uint32)
    return step, (rows * numbered).to(gl.uint32), key0, key1


@gluon.jit
def load_scale(rows, live, row_args):
    """c = log2(e) / temperature per row, 1 in greedy rows, NaN where temperature, position or sparse bias are bad."""
    (temperature_ptr, temperature_stride, scale, _, _, _, _, position_ptr, position_stride, _, _, spoiled_ptr) = row_args  # fmt: skip
    if temperature_ptr is None:  # the host has divided; 0 says greedy
        c = scale + gl.zeros_like(rows).to(gl.float32)
        greedy = c == 0.0
        good = c == c
    else:
        t = gl.load(temperature_ptr + rows * temperature_stride, mask=live, other=1.0)
        greedy = (t >= 0.0) & (t < 2.0**-64)  # `types.MIN_TEMPERATURE`
        good = (t >= 0.0) & (t < float("inf"))
        # rounded once, as the reference does
        c = (1.4426950408889634 / gl.where(greedy, 1.0, t).to(gl.float64)).to(gl.float32)
    if position_ptr is not None:
        step = gl.load(position_ptr + rows * position_stride, mask=live, other=0).to(gl.int64)
        good = good & (step >= 0) & (step < 4294967296)
    if spoiled_ptr is not None:
        good = good & (gl.load(spoiled_ptr + rows, mask=live, other=0) == 0)
    return gl.where(good, gl.where(greedy, 1.0, c), float("nan")), greedy


@gluon.jit
def draw_into(state, xs, rows, live, c, greedy, any_greedy, row_args, sample, lane, block, column0, WANT_MASS: gl.constexpr,
              GROUPED: gl.constexpr, FAST: gl.constexpr):  # fmt: skip
    """Merge a block's draws into the running best per (row, lane): score, column, y; and the running log-mass."""
    best, best_column, best_y, mass_m, mass_s = state
    words = load_words(rows, live, row_args)
    score, member, x, m, total = draw_block(xs, c, greedy, any_greedy, words, sample, lane, block, GROUPED, FAST)
    wins = score > best  # later blocks have higher ids: a tie stays where it is
    best = gl.where(wins, score, best)
    best_column = gl.where(wins, column0 + (member // 2) * 8 + lane * 2 + member % 2, best_column)
    if WANT_MASS:
        best_y = gl.where(wins, x / c, best_y)
        mass_m, mass_s = add_mass(mass_m, mass_s, m, total, FAST)
    return best, best_column, best_y, mass_m, mass_s


@gluon.jit
def store_candidates(state, rows1, num_rows, first_id, slot, num_slots, sample, candidates, WANT_MASS: gl.constexpr):
    """One candidate a row into [K, B, T]; rows1 [M] in the layout of a reduction over lanes."""
    score_ptr, id_ptr, logit_ptr, max_ptr, sum_ptr = candidates
    best, best_column, best_y, mass_m, mass_s = state
    score, column, y = gl.reduce((best, best_column, best_y), 1, better)
    lay: gl.constexpr = score.type.layout
    rows = gl.convert_layout(rows1, lay)
    offsets = rows.to(gl.int64) * num_slots + slot
    at = offsets + sample.to(gl.int64) * num_rows * num_slots
    live = rows < num_rows
    gl.store(score_ptr + at, score, mask=live)
    gl.store(id_ptr + at, gl.where(score < float("inf"), first_id + column, -1), mask=live)
    if WANT_MASS:
        m, total = gl.reduce((mass_m, mass_s), 1, join_mass)
        gl.store(logit_ptr + at, y, mask=live)
        gl.store(max_ptr + offsets, gl.where(total > 0.0, m, float("-inf")), mask=live)
        gl.store(sum_ptr + offsets, total, mask=live)


@gluon.jit
def join_mass(m_a, s_a, m_b, s_b):
    top = gl.maximum(m_a, m_b)
    return top, s_a * exp2(m_a - top, False) + s_b * exp2(m_b - top, False)


@gluon.jit
def empty_state(M: gl.constexpr, lay: gl.constexpr):
    best = gl.full([M, 4], float("-inf"), gl.float32, layout=lay)
    zeros = gl.zeros_like(best)
    return best, gl.full([M, 4], 0, gl.int32, layout=lay), zeros, gl.full_like(best, -1.0e38), zeros


@gluon.jit
def finish_tile(acc, state, first_row, column0, slot, num_slots, rows, live, c, greedy, any_greedy, num_rows, num_columns, num_samples, row_args,
                tables, candidates, logits_ptr, M: gl.constexpr, N: gl.constexpr, HAS_SCALE: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
                SINGLE: gl.constexpr, WANT_MASS: gl.constexpr, GROUPED: gl.constexpr, FAST: gl.constexpr):  # fmt: skip
    """Transforms, logits if asked for, draws. With several samples a row each tile leaves its candidates at once."""
    lay: gl.constexpr = state[0].type.layout
    lane = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, lay)), 0)
    pieces = blocks(acc, M, N)
    ready = ()
    for b in gl.static_range(N // 128):
        xs = transform(
            by_group(pieces[b], M), rows, live, lane, column0 + b * 128, column0 // 128 + b, tables, HAS_SCALE, HAS_SOFTCAP
        )
        if logits_ptr is not None:
            store_logits(logits_ptr, xs, first_row, num_rows, column0 + b * 128, num_columns, M)
        ready += (xs,)
    first_block = (tables[0] + column0) // 128
    if SINGLE:
        for b in gl.static_range(N // 128):
            state = draw_into(
                state, ready[b], rows, live, c, greedy, any_greedy, row_args, gl.to_tensor(0).to(gl.uint32), lane, first_block + b, column0 + b * 128,
                WANT_MASS, GROUPED, FAST,
            )  # fmt: skip
    else:
        for k in range(num_samples):
            one = empty_state(M, lay)
            for b in gl.static_range(N // 128):
                one = draw_into(
                    one, ready[b], rows, live, c, greedy, any_greedy, row_args, k.to(gl.uint32), lane, first_block + b, column0 + b * 128,
                    WANT_MASS, GROUPED, FAST,
                )  # fmt: skip
            store_candidates(one, gl.max(rows, 1), num_rows, tables[0], slot, num_slots, k, candidates, WANT_MASS)
    return state


@gluon.jit
def publish(keys_ptr, state, row0, num_rows, first_id, M: gl.constexpr):
    """Raise the rows' keys to this CTA's best: the order-preserving int32 image of the score above the complemented id,
    so that the larger key wins and ties go to the lower id."""
    score, column, _ = gl.reduce((state[0], state[1], state[2]), 1, better)
    image = score.to(gl.int32, bitcast=True)
    ordered = image ^ ((image >> 31) & 0x7FFFFFFF)
    key = (ordered.to(gl.int64) << 32) | (0x7FFFFFFF - (column + first_id)).to(gl.int64)
    r = gl.arange(0, M, layout=key.type.layout) + row0
    gl.atomic_max(keys_ptr + r, key, mask=r < num_rows, sem="relaxed", scope="gpu")


@gluon.jit
def consumer(w_bufs, h_bufs, empty, full_bars, keys_ptr, units, ctas, cta, row0, num_rows, num_columns, num_samples, blocks_d,
             num_slots, row_args, tables, candidates, logits_ptr, WG: gl.constexpr, BV: gl.constexpr, MW: gl.constexpr,
             STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr, WARPGROUPS: gl.constexpr, HAS_SCALE: gl.constexpr,
             HAS_SOFTCAP: gl.constexpr, SINGLE: gl.constexpr, WANT_MASS: gl.constexpr, GROUPED: gl.constexpr, FAST: gl.constexpr):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BV, 16])
    lay: gl.constexpr = by_group(blocks(gl.zeros((MW, BV), gl.float32, layout=mma), MW, BV)[0], MW)[0].type.layout
    rows = gl.expand_dims(gl.arange(0, MW, layout=gl.SliceLayout(1, lay)), 1) + row0 + WG * MW
    live = rows < num_rows
    c, greedy = load_scale(rows, live, row_args)
    any_greedy = gl.max(gl.max((greedy & live).to(gl.int32), 1), 0) > 0
    state = empty_state(MW, lay)
    full, rounds, whole, steps = split_work(units, ctas, cta, BV, WARPGROUPS)
    i = 0
    if BV > 128:
        for n in range(full):
            acc, i = accumulate(
                w_bufs, h_bufs, empty, full_bars, i, blocks_d, WG, BV, MW, STAGES, IN_FLIGHT
            )  # fmt: skip
            tile = n * ctas + cta
            state = finish_tile(
                acc, state, row0 + WG * MW, tile * BV, tile * (BV // 128), num_slots, rows, live, c, greedy, any_greedy,
                num_rows, num_columns, num_samples, row_args, tables, candidates, logits_ptr, MW, BV, HAS_SCALE, HAS_SOFTCAP,
                SINGLE, WANT_MASS, GROUPED, FAST,
            )  # fmt: skip
    for j in range(steps):
        unit, only = unit_of(j, full, rounds, whole, ctas, cta, BV)
        if (only == -1) | (only == WG):
            acc, i = accumulate(
                w_bufs, h_bufs, empty, full_bars, i, blocks_d, WG, 128, MW, STAGES, IN_FLIGHT
            )  # fmt: skip
            state = finish_tile(
                acc, state, row0 + WG * MW, unit * 128, unit, num_slots, rows, live, c, greedy, any_greedy,
                num_rows, num_columns, num_samples, row_args, tables, candidates, logits_ptr, MW, 128, HAS_SCALE, HAS_SOFTCAP,
                SINGLE, WANT_MASS, GROUPED, FAST,
            )  # fmt: skip
        else:
            i = pass_over(empty, full_bars, i, blocks_d, STAGES)
    if keys_ptr is not None:
        publish(keys_ptr, state, row0 + WG * MW, num_rows, tables[0], MW)
    elif SINGLE:
        store_candidates(state, gl.max(rows, 1), num_rows, tables[0], cta, num_slots, gl.to_tensor(0), candidates, WANT_MASS)


@gluon.jit
def write_ids(keys_ptr, counters_ptr, ids_ptr, row0, row_block, num_rows, BH: gl.constexpr):
    """The last CTA of a block of rows: keys to ids, and the state as the next launch wants it."""
    lay: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    r = gl.arange(0, BH, layout=lay) + row0
    key = gl.load(keys_ptr + r, mask=r < num_rows, other=0, volatile=True)
    image = (key >> 32).to(gl.int32)
    ids = 0x7FFFFFFF - (key & 0xFFFFFFFF)
    # the images of +inf (a row with a NaN) and of -inf (nothing allowed)
    ids = gl.where((image == 0x7F800000) | (image == -0x7F800001), -1, ids)
    gl.store(ids_ptr + r, ids, mask=r < num_rows)
    gl.store(keys_ptr + r, gl.full_like(key, EMPTY_KEY), mask=r < num_rows)
    gl.store(counters_ptr + row_block, 0)


@gluon.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def hopper_kernel(
    w, h,  # TMA descriptors of weight [V, D] in boxes [128, BD] and hidden [B, D] in boxes [BOX, BD]
    keys_ptr, counters_ptr, ids_ptr,  # [B] int64, [row blocks] int32, [B, 1] int64; None: leave candidates instead
    num_rows: gl.int32, num_columns: gl.int32, num_samples: gl.int32, size_d: gl.int32, units: gl.int32, num_slots: gl.int32,
    first_id: gl.int32, limit: gl.int32,
    temperature_ptr, temperature_stride: gl.int32, scale: gl.float32,
    seed_ptr, seed_stride: gl.int32, seed_low: gl.int32, seed_high: gl.int32,
    position_ptr, position_stride: gl.int32, position: gl.int32, numbered: gl.int32, spoiled_ptr,
    head_bias_ptr, head_bias_stride: gl.int32, logit_scale: gl.float32, softcap: gl.float32,
    bias_ptr, bias_stride_b: gl.int64, bias_stride_v: gl.int64, mask_ptr, mask_stride_b: gl.int64, mask_stride_v: gl.int64,
    bits_ptr, bits_stride_b: gl.int64, bits_stride_w: gl.int64, num_words: gl.int32,
    sparse_rows_ptr, sparse_ids_ptr, sparse_values_ptr, sparse_starts_ptr,
    score_ptr, id_ptr, logit_ptr, max_ptr, sum_ptr, logits_ptr,
    HAS_SCALE: gl.constexpr, HAS_SOFTCAP: gl.constexpr, SINGLE: gl.constexpr, WANT_MASS: gl.constexpr, GROUPED: gl.constexpr, FAST: gl.constexpr,
    BV: gl.constexpr, BH: gl.constexpr, BD: gl.constexpr, BOX: gl.constexpr, MW: gl.constexpr, STAGES: gl.constexpr,
    WARPGROUPS: gl.constexpr, IN_FLIGHT: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, BD], w.dtype)
    h_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BH, BD], h.dtype)
    w_bufs = gl.allocate_shared_memory(w.dtype, [STAGES, BV, BD], w_layout)
    h_bufs = gl.allocate_shared_memory(h.dtype, [STAGES, BH, BD], h_layout)
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
    row_args = (temperature_ptr, temperature_stride, scale, seed_ptr, seed_stride, seed_low, seed_high,
                position_ptr, position_stride, position, numbered, spoiled_ptr)  # fmt: skip
    tables = (first_id, limit, head_bias_ptr, head_bias_stride, logit_scale, softcap, bias_ptr, bias_stride_b, bias_stride_v,
              mask_ptr, mask_stride_b, mask_stride_v, bits_ptr, bits_stride_b, bits_stride_w, num_words,
              sparse_rows_ptr, sparse_ids_ptr, sparse_values_ptr, sparse_starts_ptr)  # fmt: skip
    candidates = (score_ptr, id_ptr, logit_ptr, max_ptr, sum_ptr)
    # the first partition has the CTA's own 4 warps and gets the registers that the others leave
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (consumer, (w_bufs, h_bufs, empty, full_bars, keys_ptr, units, ctas, cta, row0, num_rows, num_columns, num_samples,
                        blocks_d, num_slots, row_args, tables, candidates, logits_ptr, gl.constexpr(0), BV, MW, STAGES,
                        IN_FLIGHT, WARPGROUPS, HAS_SCALE, HAS_SOFTCAP, SINGLE, WANT_MASS, GROUPED, FAST)),
            (consumer, (w_bufs, h_bufs, empty, full_bars, keys_ptr, units, ctas, cta, row0, num_rows, num_columns, num_samples,
                        blocks_d, num_slots, row_args, tables, candidates, logits_ptr, gl.constexpr(1), BV, MW, STAGES,
                        IN_FLIGHT, WARPGROUPS, HAS_SCALE, HAS_SOFTCAP, SINGLE, WANT_MASS, GROUPED, FAST)),
            (producer, (w, h, w_bufs, h_bufs, empty, full_bars, units, ctas, cta, row0, num_rows, blocks_d, BV, BH, BD, BOX,
                        STAGES, WARPGROUPS)),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (w_bufs, h_bufs, empty, full_bars, keys_ptr, units, ctas, cta, row0, num_rows, num_columns, num_samples,
                        blocks_d, num_slots, row_args, tables, candidates, logits_ptr, gl.constexpr(0), BV, MW, STAGES,
                        IN_FLIGHT, WARPGROUPS, HAS_SCALE, HAS_SOFTCAP, SINGLE, WANT_MASS, GROUPED, FAST)),
            (producer, (w, h, w_bufs, h_bufs, empty, full_bars, units, ctas, cta, row0, num_rows, blocks_d, BV, BH, BD, BOX,
                        STAGES, WARPGROUPS)),
        ], [1], [PRODUCER_REGS])  # fmt: skip
    if keys_ptr is not None:
        # the barrier orders this CTA's relaxed atomics before the acq_rel counter; the last of the row block sees all
        cta_barrier()
        arrived = gl.atomic_add(counters_ptr + row_block, 1, sem="acq_rel", scope="gpu")
        if arrived == ctas - 1:
            write_ids(keys_ptr, counters_ptr, ids_ptr, row0, row_block, num_rows, BH)
