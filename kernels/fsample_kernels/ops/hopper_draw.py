"""The draw of the Hopper kernel, and the masses, in a block of 128 ids: a thread draws in groups of its own.

A block comes as 32 tensors [M, 4], one a member of its four groups (`hopper_tile.by_group`). The arithmetic
is `device.py`'s, used as it is. For the shapes of the arguments see the table in `hopper_kernel.py`.
"""

# No `from __future__ import annotations`: Gluon reads the constexpr annotations.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fsample_kernels.ops.device import (
    ELEMENT_DOMAIN,
    GROUP_DOMAIN,
    draw_member,
    group_mass,
    group_score,
    log2,
    log2_exponential,
    philox,
    uniform32,
)


@gluon.jit
def greedy_block(xs, any_greedy):
    """(largest logit, its lowest member) of every group, worked out only where a row of the CTA is greedy."""
    top = xs[0]
    first = gl.zeros_like(top).to(gl.int32)
    if any_greedy:
        for j in gl.static_range(1, 32):
            top = gl.maximum(top, xs[j])
        for j in gl.static_range(31, -1, -1):
            first = gl.where(xs[j] == top, j, first)
    return top, first


@gluon.jit
def group_words(words, sample, lane, block, like):
    """The four words of each of the block's four groups, [M, 4] as `like`; block: of all, or of each."""
    position, row_word, key0, key1 = words
    unit = (block * 4 + lane).to(gl.uint32) + gl.zeros_like(like).to(gl.uint32)
    return philox(unit, position, sample, row_word + GROUP_DOMAIN, key0, key1)


@gluon.jit
def draw_groups(xs, c, words, sample, lane, block, FAST: gl.constexpr):
    """`grouped`: one draw inside each of the block's four groups. Returns score (base 2), member, y c, and
    the log-mass (m, total)."""
    r0, r1, r2, r3 = group_words(words, sample, lane, block, xs[0])
    m, total, sums = group_mass(xs, c, FAST)
    member, e = draw_member(sums, total, r0, r1)
    return group_score(m, total, r2, r3, FAST), member, m + log2(e, FAST), m, total


@gluon.jit
def of_neighbour(word):
    """The word that lane l ^ 1 of the warp holds in the same register."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 1, 31, 0xffffffff;",
        "=r,r",
        [word],
        dtype=gl.uint32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def element_words(row_words, sample, lane, unit, like):
    """Words of four members: two neighbouring ids of `unit`, and the two that lie eight ids on.

    Four neighbouring ids share a Philox call and lie in two lanes. Of two calls that both lanes need, each
    makes one, and they exchange what is the other's.
    """
    position, row_word, key0, key1 = row_words
    upper = (lane % 2) == 1
    own = (unit + 2 * (lane % 2) + lane // 2).to(gl.uint32) + gl.zeros_like(like).to(gl.uint32)
    r0, r1, r2, r3 = philox(own, position, sample, row_word + ELEMENT_DOMAIN, key0, key1)
    a = of_neighbour(gl.where(upper, r0, r2))
    b = of_neighbour(gl.where(upper, r1, r3))
    return gl.where(upper, a, r0), gl.where(upper, b, r1), gl.where(upper, r2, a), gl.where(upper, r3, b)


@gluon.jit
def draw_elements(xs, c, words, sample, lane, block, FAST: gl.constexpr):
    """`element`: Gumbel-max over the 32 ids of each group, a noise value an id. Returns as `draw_groups`."""
    best = gl.full_like(xs[0], float("-inf"))
    best_x = best
    member = gl.zeros_like(best).to(gl.int32)
    for i in gl.static_range(8):
        four = element_words(words, sample, lane, block * 32 + 4 * i, xs[0])
        for j in gl.static_range(4):
            x = xs[4 * i + j] * c
            score = x - log2_exponential(uniform32(four[j]), FAST)
            score = gl.where(score < float("inf"), score, float("inf"))  # NaN and +inf alike
            wins = score > best
            best = gl.where(wins, score, best)
            best_x = gl.where(wins, x, best_x)
            member = gl.where(wins, 4 * i + j, member)
    m, total, _ = group_mass(xs, c, FAST)  # left out by the compiler where no mass is asked for
    return best, member, best_x, m, total


@gluon.jit
def greedy_score(score, top, c, greedy):
    """A greedy row's score is its largest logit. c is 1 in it, NaN where the row's parameters are bad;
    element scores show a NaN logit too."""
    alone = gl.where(score < float("inf"), top * c, float("inf"))
    return gl.where(greedy, gl.where(alone < float("inf"), alone, float("inf")), score)


@gluon.jit
def score_block(xs, c, greedy, any_greedy, words, sample, lane, block, FAST: gl.constexpr):
    """`draw_block` of `grouped` without the draw inside a group: score, and the log-mass (m, total)."""
    top, _ = greedy_block(xs, any_greedy)
    _, _, r2, r3 = group_words(words, sample, lane, block, xs[0])
    m, total, _ = group_mass(xs, c, FAST)
    score = group_score(m, total, r2, r3, FAST)
    if any_greedy:
        score = greedy_score(score, top, c, greedy)
    return score, m, total


@gluon.jit
def draw_block(
    xs, c, greedy, any_greedy, words, sample, lane, block, GROUPED: gl.constexpr, FAST: gl.constexpr
):
    """Best of every (row, lane) of a block, [M, 4]: score, member, y c, and the log-mass (m, total).
    A poisoned row has score +inf.
    """
    top, first = greedy_block(xs, any_greedy)  # before the masses, so that the logits need not outlive them
    if GROUPED:
        score, member, x, m, total = draw_groups(xs, c, words, sample, lane, block, FAST)
    else:
        score, member, x, m, total = draw_elements(xs, c, words, sample, lane, block, FAST)
    if any_greedy:
        score = greedy_score(score, top, c, greedy)
    return score, gl.where(greedy, first, member), gl.where(greedy, top, x), m, total
