"""The noise and the draws inside a tile, as Triton device functions: the twin of `noise.py`.

A tile holds BLOCK_B rows by BLOCK_V ids, its first id at a multiple of 128. FAST picks NVIDIA's three
MUFU instructions by inline PTX; without it log2, exp2 and 1 / x are Triton's, which run in the interpreter
and on other GPUs as well.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
TWO_M24 = tl.constexpr(2.0**-24)
TWO_M32 = tl.constexpr(2.0**-32)
ELEMENT_DOMAIN = tl.constexpr(0 << 24)
GROUP_DOMAIN = tl.constexpr(1 << 24)
SPLIT_DOMAIN = tl.constexpr(128)  # << 24, after first_id % 128 is added
NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def log2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def exp2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def reciprocal(x, FAST: tl.constexpr):
    """1 / x of x >= 1; Triton's division looks at the size of x first."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def base2_scale(temperature):
    """c = log2(e) / temperature, so that y c is in base 2; rounded once, as the reference does."""
    return (tl.full((), LOG2_E, tl.float64) / temperature.to(tl.float64)).to(tl.float32)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10; every word uint32, broadcast together.

    The 64-bit product of two words is one IMAD.WIDE; Triton's `tl.philox` spends a high and a low multiply.
    """
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def uniform64(high, low):
    return (high.to(tl.float32) + (low.to(tl.float32) + 0.5) * TWO_M32) * TWO_M32


@triton.jit
def uniform32(word):
    return (word.to(tl.float32) + 0.5) * TWO_M32


@triton.jit
def log2_exponential(u, FAST: tl.constexpr):
    """log2(E), E = -log1p(-u). Below 2^-6, where draws are won, a series: log2(1 - u) has no digits."""
    u = tl.minimum(u, 1.0 - TWO_M24)
    series = u * (1.0 + u * (0.5 + u * 0.3333333333333333))
    direct = log2(1.0 - u, FAST) * -LN_2
    return log2(tl.where(u < 0.015625, series, direct), FAST)


@triton.jit
def split_uniform(r0, r1, total):
    """u * total as an unevaluated sum hi + lo of 48 bits; see `noise.split_uniform`."""
    hi = (r0 >> 8).to(tl.float32) * TWO_M24
    lo = ((r0 & 255).to(tl.float32) + (r1.to(tl.float32) + 0.5) * TWO_M32) * TWO_M32
    head = hi + lo
    tail = lo - (head - hi)
    # Not `head * total`: compilers contract a product with the sums that it meets, also with the one in
    # `t - product`, so that the error of its rounding, which `low` holds, would count twice. An fma with zero
    # is rounded for good. Times -1 is a sign on an operand; `-product` is 0 - product, an instruction more.
    product = tl.fma(head, total, 0.0)
    low = tl.fma(head, total, product * -1.0) + tail * total
    t = product + low
    return t, low - (t - product)


@triton.jit
def descend(hi, lo, left, right):
    """One node of the tree, lighter side first. Returns what is left of t and the bit: 1 for the right."""
    left_is_light = left <= right
    d = hi - tl.minimum(left, right)
    s = d + lo
    take_light = s < 0.0
    rest = lo - (s - d)
    return tl.where(take_light, hi, s), tl.where(take_light, lo, rest), take_light != left_is_light


@triton.jit
def leaves(x):  # [B, G, 2, 2, 2, 2, 2] -> 32 tensors [B, G], the last axis most significant
    parts = (x,)
    for level in tl.static_range(5):
        halves = tl.split(parts[0])
        for i in tl.static_range(1, 1 << level):
            halves = halves + tl.split(parts[i])
        parts = halves
    return parts


@triton.jit
def halve(sums, HALF: tl.constexpr):  # 2 HALF tensors -> HALF sums, j with j + HALF
    out = (sums[0] + sums[HALF],)  # type: tuple[tl.tensor, ...]
    for j in tl.static_range(1, HALF):
        out = out + (sums[j] + sums[j + HALF],)
    return out


@triton.jit
def pick(sums, bit, HALF: tl.constexpr):  # 2 HALF tensors -> HALF, those whose lowest bit of j is `bit`
    out = (tl.where(bit, sums[1], sums[0]),)  # type: tuple[tl.tensor, ...]
    for j in tl.static_range(1, HALF):
        out = out + (tl.where(bit, sums[2 * j + 1], sums[2 * j]),)
    return out


@triton.jit
def damping(m):
    """A power of two that brings |m| below 2^31; 1 for every logit of a language model.

    x c - m is one fma, which keeps of the largest x what the rounding of m dropped, up to 2^-24 |m|: from
    2^31 on an exponent of 128 or more, and a mass of 0 or inf. The next lower x is as far below, so that no
    member but the largest has a share worth a draw, damped or not.
    """
    exponent = m.to(tl.uint32, bitcast=True) & 0x7F800000
    return tl.minimum(0x8E000000 - exponent, 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def group_mass(
    x,  # 32 tensors of one shape: member j of every group, fp32 logits, -inf where forbidden
    c,  # log2(e) / temperature, broadcast to that shape
    FAST: tl.constexpr,
):  # fmt: skip
    """Mass of every group, total * 2^m, and the tree of its partial sums; elementwise, so in any layout.

    A NaN or +inf logit makes the total NaN.
    """
    top = x[0]
    for j in tl.static_range(1, 32):
        top = tl.maximum(top, x[j])
    m = top * c  # c > 0, so maximum and product commute
    empty = m == float("-inf")
    top = tl.where(empty, 0.0, top)
    m = tl.where(empty, 0.0, m)
    c *= damping(m)
    base = top * c
    s0 = (exp2(x[0] * c - base, FAST),)  # type: tuple[tl.tensor, ...]
    for j in tl.static_range(1, 32):
        s0 = s0 + (exp2(x[j] * c - base, FAST),)
    s1 = halve(s0, 16)
    s2 = halve(s1, 8)
    s3 = halve(s2, 4)
    s4 = halve(s3, 2)
    return m, s4[0] + s4[1], (s0, s1, s2, s3, s4)


@triton.jit
def group_score(m, total, r2, r3, FAST: tl.constexpr):
    """Gumbel-max score of the group in base 2; +inf where its mass is NaN."""
    score = m + log2(total, FAST) - log2_exponential(uniform64(r2, r3), FAST)
    return tl.where(score == score, score, float("inf"))


@triton.jit
def draw_member(sums, total, r0, r1):
    """One member j of every group with probability e_j / total, and its e: down the tree, 64 random bits."""
    s0, s1, s2, s3, s4 = sums
    hi, lo = split_uniform(r0, r1, total)
    hi, lo, b0 = descend(hi, lo, s4[0], s4[1])
    s3 = pick(s3, b0, 2)
    hi, lo, b1 = descend(hi, lo, s3[0], s3[1])
    s2 = pick(pick(s2, b0, 4), b1, 2)
    hi, lo, b2 = descend(hi, lo, s2[0], s2[1])
    s1 = pick(pick(pick(s1, b0, 8), b1, 4), b2, 2)
    hi, lo, b3 = descend(hi, lo, s1[0], s1[1])
    s0 = pick(pick(pick(pick(s0, b0, 16), b1, 8), b2, 4), b3, 2)
    hi, lo, b4 = descend(hi, lo, s0[0], s0[1])
    member = b0.to(tl.int32) + b1.to(tl.int32) * 2 + b2.to(tl.int32) * 4
    member += b3.to(tl.int32) * 8 + b4.to(tl.int32) * 16
    return member, tl.where(b4, s0[1], s0[0])


@triton.jit
def grouped_draw(
    y,  # [BLOCK_B, BLOCK_V] fp32, -inf where forbidden
    c,  # [BLOCK_B] fp32, log2(e) / temperature
    first_group,  # global number of the tile's first group
    position, sample, row, k0, k1,  # uint32: [BLOCK_B], scalar, [BLOCK_B], [BLOCK_B], [BLOCK_B]
    cut,  # int32: first_id % 128 in the tile that such a shard starts in, else 0; read if SPLIT
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Best group and the draw inside it. Returns per row: score, column in the tile, its logit.

    The score is +inf, and the column means nothing, where a logit is NaN or +inf: its group's sum is NaN.
    """
    GROUPS: tl.constexpr = BLOCK_V // 32
    # A column is 128 block + 8 (b4 b3 b2 b1) + 2 q + b0. On a wgmma accumulator q is the lane and every b a
    # register, so all that follows up to the last reduction stays inside a thread.
    x = tl.reshape(y, (BLOCK_B, BLOCK_V // 128, 2, 2, 2, 2, 4, 2))
    x = tl.permute(x, (0, 1, 6, 7, 5, 4, 3, 2))  # [B, block, q, b0, b1, b2, b3, b4]
    x = leaves(tl.reshape(x, (BLOCK_B, GROUPS, 2, 2, 2, 2, 2)))
    local = tl.arange(0, GROUPS)
    group = first_group + local
    word = row[:, None] | GROUP_DOMAIN
    if SPLIT:  # the rank before draws for its own part of the first four groups: not with the same words
        own = (cut + SPLIT_DOMAIN).to(tl.uint32) << 24
        word = row[:, None] | tl.where((local < 4) & (cut > 0), own, GROUP_DOMAIN)[None, :]
    r0, r1, r2, r3 = philox(
        tl.broadcast_to(group.to(tl.uint32)[None, :], (BLOCK_B, GROUPS)),
        position[:, None], sample, word, k0[:, None], k1[:, None],
    )  # fmt: skip
    m, total, sums = group_mass(x, c[:, None], FAST)
    score = group_score(m, total, r2, r3, FAST)
    member, e = draw_member(sums, total, r0, r1)
    local = local[None, :]
    columns = (local >> 2) * 128 + (local & 3) * 2 + (member >> 1) * 8 + (member & 1)
    best, column = argmax(score, columns)
    # From the mass, so that the logits need not outlive it.
    return best, column, value_at(column, columns, m + log2(e, FAST)) / c


@triton.jit
def element_draw(
    y, c, first_unit, position, sample, row, k0, k1,
    BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gumbel-max over the tile, one Philox call for four neighbouring ids. Arguments and results as of
    `grouped_draw`."""
    UNITS: tl.constexpr = BLOCK_V // 4
    # Rows are the inner side here: a thread then draws for a few of them, and holds few keys.
    unit = first_unit + tl.arange(0, UNITS)
    r0, r1, r2, r3 = philox(
        tl.broadcast_to(unit.to(tl.uint32)[:, None], (UNITS, BLOCK_B)),
        position[None, :], sample, row[None, :] | ELEMENT_DOMAIN, k0[None, :], k1[None, :],
    )  # fmt: skip
    # The noise goes to the threads that hold the logits. The other way round, a second copy of the logits
    # lives as long as the first. Odd before even: the last few registers, on sm_89.
    odd = tl.join(log2_exponential(uniform32(r1), FAST), log2_exponential(uniform32(r3), FAST))
    even = tl.join(log2_exponential(uniform32(r0), FAST), log2_exponential(uniform32(r2), FAST))
    noise = tl.reshape(tl.permute(tl.join(even, odd), (1, 0, 2, 3)), (BLOCK_B, BLOCK_V))
    score = y * c[:, None] - noise
    score = tl.where(score < float("inf"), score, float("inf"))  # NaN and +inf alike
    columns = tl.arange(0, BLOCK_V)[None, :]
    best, column = argmax(score, columns)
    return best, column, value_at(column, columns, y)


@triton.jit
def argmax(score, column):  # both [BLOCK_B, N]; no NaN
    """Row maximum and, of equal scores, the lowest column."""
    best = tl.max(score, axis=1)
    return best, tl.min(tl.where(score == best[:, None], column, NO_ID), axis=1)


@triton.jit
def value_at(column, columns, values):  # [BLOCK_B]; both [BLOCK_B, N]
    return tl.max(tl.where(columns == column[:, None], values, float("-inf")), axis=1)


@triton.jit
def greedy(y, BLOCK_V: tl.constexpr):
    """Argmax over the tile, lowest column first; +inf where a logit is NaN or +inf."""
    return argmax(tl.where(y < float("inf"), y, float("inf")), tl.arange(0, BLOCK_V)[None, :])
