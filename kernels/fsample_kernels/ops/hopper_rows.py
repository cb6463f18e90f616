"""What the Hopper kernel knows of a row: its parameters, its best so far, and how its winner leaves the CTA.

The state of a consumer warpgroup is (best score, its column, its y, mass maximum, mass sum), [M, 4] each, the
column int32 and the others fp32: one entry a row and lane, in registers over all tiles of the CTA. The last
three only where a mass is asked for. For the shapes of the arguments see the table in `hopper_kernel.py`.
"""

# No `from __future__ import annotations`: Gluon reads the constexpr annotations.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fsample_kernels.ops.device import exp2
from fsample_kernels.ops.gluon_names import cta_barrier
from fsample_kernels.ops.hopper_draw import draw_block, score_block
from fsample_kernels.ops.hopper_keep import keep, load_kept
from fsample_kernels.ops.link import EPOCH, RANK, clock, end_step, ids_of, send, take

# No score yet: the image of -inf (see `publish`).
EMPTY_KEY = gl.constexpr(-0x7F800001 << 32)
LOW = gl.constexpr(-3.4028234663852886e38)  # log-mass of nothing: finite, so that LOW - LOW is no NaN


@gluon.jit
def load_words(rows, live, row_args):
    """Philox counter and key words that belong to a row, uint32 each.

    Read again for every block, and volatile, so that they are not kept: they would not fit beside the
    accumulator.
    """
    (_, _, _, seed_ptr, seed_stride, seed_low, seed_high,
     position_ptr, position_stride, position, numbered, _) = row_args  # fmt: skip
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
        step = gl.load(position_ptr + rows * position_stride, mask=live, other=0, volatile=True)
        step = step.to(gl.uint32)
    return step, (rows * numbered).to(gl.uint32), key0, key1


@gluon.jit
def load_scale(rows, live, row_args):
    """c = log2(e) / temperature per row, 1 in greedy rows, NaN where temperature, position or sparse bias are
    bad; and which rows are greedy."""
    (temperature_ptr, temperature_stride, scale, _, _, _, _,
     position_ptr, position_stride, _, _, spoiled_ptr) = row_args  # fmt: skip
    if temperature_ptr is None:  # the host has divided; 0 says greedy
        c = scale + gl.zeros_like(rows).to(gl.float32)
        greedy = c == 0.0
        good = c == c  # true: the host has checked the number
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
def empty_state(M: gl.constexpr, lay: gl.constexpr):
    best = gl.full([M, 4], float("-inf"), gl.float32, layout=lay)
    zeros = gl.zeros_like(best)
    return best, gl.full([M, 4], 0, gl.int32, layout=lay), zeros, gl.full_like(best, LOW), zeros


@gluon.jit
def draw_into(
    state, xs, row_state, row_args, sample, lane, block, column0, kept_ptr, M: gl.constexpr,
    WANT_MASS: gl.constexpr, GROUPED: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    """Draw in a block of 128 ids, and merge its winners and its mass into the state.

    With kept_ptr the draw inside the groups waits for `draw_kept`: until then best_column is the first of the
    block, best_y nothing, and of the lanes of a row only those count that have led it.
    """
    best, best_column, best_y, mass_m, mass_s = state
    rows, live, c, greedy, any_greedy, _ = row_state
    words = load_words(rows, live, row_args)
    # later blocks have higher ids: a tie stays where it is
    if kept_ptr is not None:
        score, m, total = score_block(xs, c, greedy, any_greedy, words, sample, lane, block, FAST)
        wins = score > gl.expand_dims(gl.max(best, 1), 1)
        keep(kept_ptr, xs, wins, M)
        best_column = gl.where(wins, column0, best_column)
    else:
        score, member, x, m, total = draw_block(
            xs, c, greedy, any_greedy, words, sample, lane, block, GROUPED, FAST
        )
        wins = score > best
        best_column = gl.where(wins, column_of(column0, member, lane), best_column)
        if WANT_MASS:
            best_y = gl.where(wins, x / c, best_y)
    if WANT_MASS:
        mass_m, mass_s = add_mass(mass_m, mass_s, m, total, FAST)
    return gl.where(wins, score, best), best_column, best_y, mass_m, mass_s


@gluon.jit
def column_of(column0, member, lane):
    """Of a member of the lane's group, in the block that begins at column0."""
    return column0 + (member // 2) * 8 + lane * 2 + member % 2


@gluon.jit
def draw_kept(
    state, row_state, row_args, kept_ptr, first_id, M: gl.constexpr, WANT_MASS: gl.constexpr,
    FAST: gl.constexpr,
):  # fmt: skip
    """The state with members drawn in the groups that `draw_into` has kept; their scores are known."""
    best, column0, best_y, mass_m, mass_s = state
    rows, live, c, greedy, any_greedy, _ = row_state
    lane = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, best.type.layout)), 0)
    _, member, x, _, _ = draw_block(
        load_kept(kept_ptr, best, M), c, greedy, any_greedy, load_words(rows, live, row_args),
        gl.to_tensor(0).to(gl.uint32), lane, (first_id + column0) // 128, True, FAST,
    )  # fmt: skip
    if WANT_MASS:
        best_y = x / c
    return best, column_of(column0, member, lane), best_y, mass_m, mass_s


@gluon.jit
def add_mass(mass_m, mass_s, m, total, FAST: gl.constexpr):
    """Log-mass (m, s), s 2^m, of two disjoint sets together."""
    m = gl.where(total > 0.0, m, LOW)
    top = gl.maximum(mass_m, m)
    return top, mass_s * exp2(mass_m - top, FAST) + total * exp2(m - top, FAST)


@gluon.jit
def join_mass(m_a, s_a, m_b, s_b):
    top = gl.maximum(m_a, m_b)
    return top, s_a * exp2(m_a - top, False) + s_b * exp2(m_b - top, False)


@gluon.jit
def better(score_a, id_a, y_a, score_b, id_b, y_b):
    a_wins = (score_a > score_b) | ((score_a == score_b) & (id_a < id_b))
    return gl.where(a_wins, score_a, score_b), gl.where(a_wins, id_a, id_b), gl.where(a_wins, y_a, y_b)


@gluon.jit
def store_candidates(
    state, rows1, num_rows, first_id, slot, num_slots, sample, candidates, WANT_MASS: gl.constexpr
):
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
def publish(keys_ptr, state, rows1, num_rows, first_id):
    """Raise the rows' keys to this CTA's best: the order-preserving int32 image of the score above the
    complemented id, so that the larger key wins and ties go to the lower id."""
    score, column, _ = gl.reduce((state[0], state[1], state[2]), 1, better)
    image = (score + 0.0).to(gl.int32, bitcast=True)  # -0.0 ties with 0.0
    ordered = image ^ ((image >> 31) & 0x7FFFFFFF)
    key = (ordered.to(gl.int64) << 32) | (0x7FFFFFFF - (column + first_id)).to(gl.int64)
    r = gl.convert_layout(rows1, key.type.layout)
    gl.atomic_max(keys_ptr + r, key, mask=r < num_rows, sem="relaxed", scope="gpu")


@gluon.jit
def take_keys(keys_ptr, counters_ptr, row0, row_block, end, SPAN: gl.constexpr):
    """The last CTA of a block of rows, row0 .. end - 1, SPAN at most: their places and keys, and the
    workspace as the next launch wants it."""
    # A place for every thread: 64 would lie in copies, and the inline assembly of the exchange runs in copies
    # too. One that read its key after another had emptied it would send that; one that saw a peer's word
    # would end the wait of a warp that had not.
    PLACES: gl.constexpr = SPAN if SPAN > 128 else 128
    lay: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    r = gl.arange(0, PLACES, layout=lay) + row0
    key = gl.load(keys_ptr + r, mask=r < end, other=0, volatile=True)
    gl.store(keys_ptr + r, gl.full_like(key, EMPTY_KEY), mask=r < end)
    gl.store(counters_ptr + row_block, 0)
    return r, key


@gluon.jit
def write_ids(keys_ptr, counters_ptr, ids_ptr, row0, row_block, end, SPAN: gl.constexpr):
    """The last CTA of a block of rows: keys to ids, and the workspace as the next launch wants it."""
    lay: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    r = gl.arange(0, SPAN, layout=lay) + row0
    key = gl.load(keys_ptr + r, mask=r < end, other=0, volatile=True)
    image = (key >> 32).to(gl.int32)
    ids = 0x7FFFFFFF - (key & 0xFFFFFFFF)
    # the images of +inf (a row with a NaN) and of -inf (nothing allowed)
    ids = gl.where((image == 0x7F800000) | (image == -0x7F800001), -1, ids)
    gl.store(ids_ptr + r, ids, mask=r < end)
    gl.store(keys_ptr + r, gl.full_like(key, EMPTY_KEY), mask=r < end)
    gl.store(counters_ptr + row_block, 0)


@gluon.jit
def meet_peers(
    keys_ptr, counters_ptr, ids_ptr, link_ptr, row0, row_block, row_blocks, end,
    SPAN: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    """The last CTA of a block of rows sends its keys to the ranks of other shards, and waits for theirs.

    It alone waits: every other CTA of its rows has ended, those of other rows wait for nobody's words before
    they send their own, so the launch ends wherever its peers' do.
    """
    epoch = gl.load(link_ptr + EPOCH)
    r, key = take_keys(keys_ptr, counters_ptr, row0, row_block, end, SPAN)
    live = r < end
    index = r.to(gl.int64)
    send(link_ptr, epoch, index, key, live, RANKS, True)
    spins = epoch * 0
    start = clock(spins, True)
    rank = gl.load(link_ptr + RANK)
    for p in gl.static_range(RANKS - 1):
        word, spins = take(link_ptr, epoch, index, (rank + 1 + p) % RANKS, live, start, spins, RANKS, True)
        key = gl.maximum(key, word)
    gl.store(ids_ptr + r, ids_of(key), mask=live)
    cta_barrier()
    end_step(link_ptr, epoch, row_blocks)
