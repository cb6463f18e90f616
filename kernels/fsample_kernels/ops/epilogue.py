"""From a tile of logits to one candidate a row: the transforms and the draws, shared by the kernels.

Row parameters, tables and outputs travel as tuples, in the order in which a kernel lists them.
Loops with a bound from the launch are `while` loops: with numpy 2.4 the interpreter of triton 3.6 (not that
of 3.9) cannot take such a bound in `range`.
"""

import triton
import triton.language as tl

from fsample_kernels import types
from fsample_kernels.ops.device import (
    LOG2_E,
    base2_scale,
    damping,
    element_draw,
    exp2,
    greedy,
    grouped_draw,
    reciprocal,
)

MIN_TEMPERATURE = tl.constexpr(types.MIN_TEMPERATURE)


@triton.jit
def soft_cap(y, softcap, FAST: tl.constexpr):
    """softcap * tanh(y / softcap), within 6e-7 of its own size and 2^-22 of softcap, and never above softcap.

    In z = 2 log2(e) y / softcap, so that one product serves both sides: 1 - 2 / (1 + 2^|z|), which is exact
    to the rounding of the quotient where that is small; and where y / softcap is below 1/2 and this would
    lose digits, a polynomial in z^2 (minimax, 2^-26), whose error is one of the correction to y alone.
    """
    scale = tl.minimum(2.0 * LOG2_E / softcap, 3.0e38)  # a softcap below 2^-126 must not make 0 inf of y = 0
    z = y * scale
    quotient = reciprocal(exp2(tl.abs(z), FAST) + 1.0, FAST)
    outer = softcap - 2.0 * softcap * quotient
    sign = y.to(tl.uint32, bitcast=True) & 0x80000000
    outer = ((outer.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True)
    z2 = z * z
    p = (3.5887103422282962e-06 * z2 - 9.192238212563097e-05) * z2 + 0.0019225503783673048
    inner = y + y * z2 * (p * z2 - 0.040037523955106735)
    return tl.where(tl.abs(z) < LOG2_E, inner, outer)


@triton.jit
def greedy_at(temperature):
    """Whether a row is drawn greedily. The host has rounded a number below the minimum to 0, a tensor not."""
    return (temperature >= 0.0) & (temperature < MIN_TEMPERATURE)


@triton.jit
def load_rows(offs_b, mask_b, rows):
    """Per row: log2(e) / temperature, is greedy, position, row word, key words."""
    (temperature_ptr, temperature_stride, temperature, seed_ptr, seed_stride, seed_low, seed_high,
     position_ptr, position_stride, position, numbered) = rows  # fmt: skip
    if temperature_ptr is None:
        t = tl.zeros_like(offs_b).to(tl.float32) + temperature
    else:
        t = tl.load(temperature_ptr + offs_b * temperature_stride, mask=mask_b, other=1.0)
    is_greedy = greedy_at(t)
    c = tl.where(is_greedy, 1.0, base2_scale(t))
    if seed_ptr is None:
        k0 = tl.zeros_like(offs_b) + seed_low
        k1 = tl.zeros_like(offs_b) + seed_high
    else:
        seed = tl.load(seed_ptr + offs_b * seed_stride, mask=mask_b, other=0)
        k0 = seed.to(tl.int32)
        k1 = (seed >> 32).to(tl.int32)
    if position_ptr is None:
        step = tl.zeros_like(offs_b) + position
    else:
        step = tl.load(position_ptr + offs_b * position_stride, mask=mask_b, other=0).to(tl.int32)
    row = offs_b * numbered  # 0 in every row when each has its own seed
    return (
        c, is_greedy, step.to(tl.uint32, bitcast=True), row.to(tl.uint32, bitcast=True),
        k0.to(tl.uint32, bitcast=True), k1.to(tl.uint32, bitcast=True),
    )  # fmt: skip


@triton.jit
def load_triple(rows_ptr, ids_ptr, values_ptr, i, end):
    live = i < end
    row = tl.load(rows_ptr + i, mask=live, other=0).to(tl.int32)
    id = tl.load(ids_ptr + i, mask=live, other=0)
    return row, id, tl.load(values_ptr + i, mask=live, other=0.0)


@triton.jit
def transform(
    y,  # [BLOCK_B, BLOCK_V] fp32
    offs_b, mask_b,  # [BLOCK_B]
    v0,  # column of W of the tile's first id; negative where a shard starts inside a block of 128
    tile_v,
    tables,
    HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FAST: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Head bias, scale, soft-cap, logit bias, and -inf where forbidden: in this order."""
    (first_id, num_columns, limit, head_bias_ptr, head_bias_stride, logit_scale, softcap,
     bias_ptr, bias_stride_b, bias_stride_v, mask_ptr, mask_stride_b, mask_stride_v,
     bits_ptr, bits_stride_b, bits_stride_w, num_words,
     sparse_rows_ptr, sparse_ids_ptr, sparse_values_ptr, sparse_starts_ptr) = tables  # fmt: skip
    offs_v = v0 + tl.arange(0, BLOCK_V)
    mask_v = (offs_v >= 0) & (offs_v < limit)
    offs_id = (first_id + offs_v).to(tl.int64)  # only the head bias is sharded with W
    if head_bias_ptr is not None:
        offs = offs_v.to(tl.int64) * head_bias_stride
        y += tl.load(head_bias_ptr + offs, mask=mask_v, other=0.0).to(tl.float32)[None, :]
    if HAS_SCALE:
        y *= logit_scale
    if HAS_SOFTCAP:
        y = soft_cap(y, softcap, FAST)
    if bias_ptr is not None:
        offs = offs_b.to(tl.int64)[:, None] * bias_stride_b + offs_id[None, :] * bias_stride_v
        y += tl.load(bias_ptr + offs, mask=mask_b[:, None] & mask_v[None, :], other=0.0).to(tl.float32)
    if sparse_rows_ptr is not None:
        # Sorted by id, so a tile visits its own triples only: a few hundred biases a request are a handful a
        # tile, and each costs every logit a compare and an add.
        end = tl.load(sparse_starts_ptr + tile_v + 1)
        i = tl.load(sparse_starts_ptr + tile_v)
        triple = load_triple(sparse_rows_ptr, sparse_ids_ptr, sparse_values_ptr, i, end)
        while i < end:
            row, id, value = triple
            i += 1  # the next is under way while this one is added
            triple = load_triple(sparse_rows_ptr, sparse_ids_ptr, sparse_values_ptr, i, end)
            hit = (offs_b == row)[:, None] & (offs_id == id)[None, :]
            y += tl.where(hit, value, 0.0)
    if mask_ptr is not None:
        offs = offs_b.to(tl.int64)[:, None] * mask_stride_b + offs_id[None, :] * mask_stride_v
        allowed = tl.load(mask_ptr + offs, mask=mask_b[:, None] & mask_v[None, :], other=0)
        y = tl.where(allowed != 0, y, float("-inf"))
    if bits_ptr is not None:
        y = mask_bits(
            y, offs_b, mask_b, first_id + v0, bits_ptr, bits_stride_b, bits_stride_w, num_words,
            BLOCK_B, BLOCK_V,
        )  # fmt: skip
    if (v0 < 0) | (v0 + BLOCK_V > limit):
        y = tl.where(mask_v[None, :], y, float("-inf"))
    return y


@triton.jit
def mask_bits(
    y, offs_b, mask_b, id0, bits_ptr, bits_stride_b, bits_stride_w, num_words,
    BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """-inf where the bit of the global id is 0. Tiles start at a multiple of 128 ids, so words are whole."""
    offs_w = (id0 >> 5) + tl.arange(0, BLOCK_V // 32)
    offs = offs_b.to(tl.int64)[:, None] * bits_stride_b + offs_w.to(tl.int64)[None, :] * bits_stride_w
    words = tl.load(bits_ptr + offs, mask=mask_b[:, None] & (offs_w < num_words)[None, :], other=0)
    allowed = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    y = tl.where(allowed != 0, tl.reshape(y, (BLOCK_B, BLOCK_V // 32, 32)), float("-inf"))
    return tl.reshape(y, (BLOCK_B, BLOCK_V))


@triton.jit
def tile_mass(y, c, FAST: tl.constexpr):
    """(max, sum of 2^(y c - max)) of the tile in base 2; max = -inf, sum = 0 where nothing is allowed."""
    m = tl.max(y, axis=1) * c
    base = tl.where(m == float("-inf"), 0.0, m)
    damp = damping(base)
    return m, tl.sum(exp2(y * (c * damp)[:, None] - (base * damp)[:, None], FAST), axis=1)


@triton.jit
def finish_tile(
    y,  # [BLOCK_B, BLOCK_V] fp32: H W^T, or logits as given
    tile_b, tile_v, num_rows, num_tiles, num_samples, shift,
    rows, tables, outputs,
    HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, GROUPED: tl.constexpr, SPLIT: tl.constexpr,
    SINGLE: tl.constexpr, FAST: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Transform the tile, draw, and store one candidate a row and sample."""
    score_ptr, id_ptr, logit_ptr, max_ptr, sum_ptr, logits_ptr = outputs
    first_id = tables[0]
    num_columns = tables[1]
    offs_b = tile_b * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    v0 = tile_v * BLOCK_V - shift
    y = transform(y, offs_b, mask_b, v0, tile_v, tables, HAS_SCALE, HAS_SOFTCAP, FAST, BLOCK_B, BLOCK_V)
    if logits_ptr is not None:
        # The tile's first id goes to the scalar, so that a thread holds an address a row, not one a logit.
        row_ptrs = (logits_ptr + v0) + offs_b.to(tl.int64)[:, None] * num_columns
        columns = tl.arange(0, BLOCK_V)
        tl.store(
            row_ptrs + columns[None, :], y,
            mask=mask_b[:, None] & ((columns >= -v0) & (columns < num_columns - v0))[None, :],
        )  # fmt: skip

    c, is_greedy, position, row, k0, k1 = load_rows(offs_b, mask_b, rows)
    # A branch the whole tile takes: batches without greedy rows, and all-greedy ones, pay for one path only.
    any_greedy = tl.max((is_greedy & mask_b).to(tl.int32), axis=0) > 0
    any_sampled = tl.min((is_greedy | (offs_b >= num_rows)).to(tl.int32), axis=0) == 0
    offs_out = offs_b.to(tl.int64) * num_tiles + tile_v  # [K, B, T]
    if max_ptr is not None:
        m, total = tile_mass(y, c, FAST)
        tl.store(max_ptr + offs_out, m, mask=mask_b)
        tl.store(sum_ptr + offs_out, total, mask=mask_b)
    top = tl.full((BLOCK_B,), float("-inf"), tl.float32)
    top_column = tl.zeros((BLOCK_B,), tl.int32)
    if any_greedy:
        top, top_column = greedy(y, BLOCK_V)
    sample = tl.full((), 0, tl.uint32)
    cut = tl.where(tile_v == 0, shift, 0)
    if SINGLE:
        draw_and_store(
            y, c, is_greedy, top, top_column, any_sampled, first_id + v0, position, sample, row, k0, k1, cut,
            score_ptr, id_ptr, logit_ptr, offs_out, mask_b, GROUPED, SPLIT, FAST, BLOCK_B, BLOCK_V,
        )  # fmt: skip
    else:
        stride_k = num_rows.to(tl.int64) * num_tiles
        while sample < num_samples:
            draw_and_store(
                y, c, is_greedy, top, top_column, any_sampled, first_id + v0, position, sample, row, k0, k1,
                cut, score_ptr, id_ptr, logit_ptr, offs_out, mask_b, GROUPED, SPLIT, FAST, BLOCK_B, BLOCK_V,
            )  # fmt: skip
            offs_out += stride_k
            sample += 1


@triton.jit
def draw_and_store(
    y, c, is_greedy, top, top_column, any_sampled, id0, position, sample, row, k0, k1, cut,
    score_ptr, id_ptr, logit_ptr, offs_out, mask_b,
    GROUPED: tl.constexpr, SPLIT: tl.constexpr, FAST: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    score, column, logit = top, top_column, top
    if any_sampled:
        if GROUPED:
            score, column, logit = grouped_draw(
                y, c, id0 >> 5, position, sample, row, k0, k1, cut, BLOCK_B, BLOCK_V, SPLIT, FAST
            )
        else:
            score, column, logit = element_draw(
                y, c, id0 >> 2, position, sample, row, k0, k1, BLOCK_B, BLOCK_V, FAST
            )
        score = tl.where(is_greedy, top, score)
        column = tl.where(is_greedy, top_column, column)
        logit = tl.where(is_greedy, top, logit)
    # +inf: a NaN or +inf logit. The id -1 wins against every other candidate of its row.
    tl.store(score_ptr + offs_out, score, mask=mask_b)
    tl.store(id_ptr + offs_out, tl.where(score < float("inf"), id0 + column, -1), mask=mask_b)
    if logit_ptr is not None:
        tl.store(logit_ptr + offs_out, logit, mask=mask_b)
