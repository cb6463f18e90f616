"""The definition of the noise, in torch: counter, words, uniform, exponential; and the map of groups.

    key     = the row's 64-bit seed, low word first
    counter = (unit, position, sample, domain << 24 | row)

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11) turns a counter into
r0..r3. `unit` is a global token id // 4 (ELEMENT), a group number (GROUP), a block of 4096 ids (ONLINE) or
a rank (RANK); draws that must be independent never share a domain. `row` is the row index when one scalar
seed serves the batch and 0 when every row has its own seed: a request's tokens then depend on its seed,
position and logits alone. The map from (seed, row, position, sample, unit, domain) to (key, counter) is
injective: B <= 2**24, position < 2**32.

Groups: a fixed partition of global ids, 32 a group, the same for every implementation, tile, device and rank:

    block = id // 128            q = (id % 8) // 2
    group = 4 * block + q        member j = 2 * ((id % 128) // 8) + id % 2

which is what one thread of a Hopper `wgmma` accumulator holds. As a view, 128 ids are [16, 4, 2] = [j // 2,
q, j % 2]. A shard of the vocabulary that starts at a multiple of 128 holds whole groups, so it draws the
same tokens. One that starts inside a block shares that block's groups with the rank before it, and each rank
draws for its own part of them: with the same words, the heavier part would always win. So the groups of the
block that such a shard starts in have a domain of their own, SPLIT + first_id % 128. No two shards start at
the same id, so the map stays injective; the draw is then exact in distribution, with other tokens than the
whole vocabulary gives. ELEMENT gives every id its own word, and with it the same tokens for any shards.

Words are int64 tensors with values in [0, 2**32): torch has no unsigned 32-bit arithmetic on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ELEMENT, GROUP, ONLINE, RANK = 0, 1, 2, 3  # domains
SPLIT = 128  # ... and SPLIT + 1 .. SPLIT + 127: groups of the block that a shard starts inside of

GROUP_SIZE = 32
BLOCK = 128  # ids that hold four whole groups
ONLINE_BLOCK = 4096  # ids that `online` reduces at a time
MAX_ROWS = 1 << 24  # the row shares a counter word with the domain
MAX_POSITION = 1 << 32

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85

Word = int | Tensor
Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(c0: Tensor, c1: Word, c2: Word, c3: Word, k0: Word, k1: Word) -> Words:
    """Philox4x32-10 of the counter (c0, c1, c2, c3) under the key (k0, k1), all broadcast together.

    Every word is an int or an int64 tensor with values in [0, 2**32); the four results are such tensors,
    with the broadcast shape. Source: Salmon et al., SC11; the known-answer vectors of Random123 hold.
    """
    given = [word for word in (c0, c1, c2, c3, k0, k1) if isinstance(word, Tensor)]
    # not `torch.broadcast_shapes`, the first call of which imports sympy: a second of a first draw
    shape = torch.broadcast_tensors(*given)[0].shape  # type: ignore[no-untyped-call]
    words: list[Tensor] = [
        word if isinstance(word, Tensor) else torch.full((), word, dtype=torch.int64, device=c0.device)
        for word in (c0, c1, c2, c3)
    ]
    # Two rounds in the words' own small shapes; after them every word depends on every other.
    for _ in range(2):
        a, b, c, d = words
        p0, p1 = a * _MULTIPLIER_0, c * _MULTIPLIER_1
        words = [((p1 >> 32) ^ b ^ k0) & _MASK, p1, ((p0 >> 32) ^ d ^ k1) & _MASK, p0]
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    a, b, c, d = (word.expand(shape).clone(memory_format=torch.contiguous_format) for word in words)
    high = torch.empty_like(a)
    # A product of two words needs 64 bits. int64 multiplication wraps, which leaves exactly those bits; the
    # sign that the shift drags into the upper half is masked off. b and d may carry a dirty upper half:
    # they are only xored before that mask. All in place, the four buffers rotate.
    for _ in range(8):
        a *= _MULTIPLIER_0
        c *= _MULTIPLIER_1
        b ^= torch.bitwise_right_shift(c, 32, out=high)
        b ^= k0
        b &= _MASK
        d ^= torch.bitwise_right_shift(a, 32, out=high)
        d ^= k1
        d &= _MASK
        a, b, c, d = b, c, d, a
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return a, b.bitwise_and_(_MASK), c, d.bitwise_and_(_MASK)


@dataclass(frozen=True)
class RowStreams:
    """The part of key and counter that belongs to a row: each an int or int64 words, 0-d or [B]."""

    key0: Word
    key1: Word
    position: Word
    row: Word

    def take(self, rows: Tensor) -> RowStreams:
        """The streams of the given rows, int64 of any shape: the new shape of words that differ by row."""
        return RowStreams(
            *(word[rows] if isinstance(word, Tensor) and word.dim() else word for word in self._words())
        )

    def lanes(self) -> RowStreams:
        """With a last dimension of 1, against which units are broadcast."""
        return RowStreams(
            *(word[..., None] if isinstance(word, Tensor) and word.dim() else word for word in self._words())
        )

    def words(self, unit: Tensor, sample: Word, domain: Word) -> Words:
        """Four words for `unit`, `sample` and `domain`, broadcast against the rows."""
        return philox(unit, self.position, sample, self.row | (domain << 24), self.key0, self.key1)

    def _words(self) -> tuple[Word, Word, Word, Word]:
        return self.key0, self.key1, self.position, self.row


def row_streams(
    seed: int | Tensor, position: int | Tensor, num_rows: int, device: torch.device
) -> RowStreams:
    """Split seeds into key words and number the rows.

    seed: int in [0, 2**64), or int64 bits, 0-d (one seed for the batch: the row index enters the counter)
    or [B] (one a row: the row word is 0). position: int in [0, 2**32), or int64, 0-d or [B]; values of a
    tensor outside that range are the caller's to report, here they are reduced mod 2**32.
    """
    per_row = isinstance(seed, Tensor) and seed.dim() == 1
    row: Word = 0 if per_row else torch.arange(num_rows, device=device)
    return RowStreams(seed & _MASK, (seed >> 32) & _MASK, position & _MASK, row)


def uniform64(high: Tensor, low: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """u = (high + (low + 1/2) 2**-32) 2**-32, in (0, 1]; small u keep all digits of `dtype`."""
    return (high.to(dtype) + (low.to(dtype) + 0.5) * 2.0**-32) * 2.0**-32


def uniform32(word: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """u = (word + 1/2) 2**-32, in (0, 1]."""
    return (word.to(dtype) + 0.5) * 2.0**-32


def exponential(u: Tensor) -> Tensor:
    """E = -log1p(-u), unit rate, with full relative precision where E is small, which is where a draw is won.

    u in (0, 1] is cut at 1 - 2**-24 (float64: 1 - 2**-53), so E is never 0, infinite or NaN. The Gumbel
    noise, -ln E, ends at 33 ln 2 = 22.87 with `uniform32` (smallest E 2**-33) and at 65 ln 2 = 45.05 with
    `uniform64`.
    """
    return exponential_(u.clone())


def exponential_(u: Tensor) -> Tensor:
    """`exponential` in the memory of u."""
    top = 1.0 - 2.0**-24 if u.dtype == torch.float32 else 1.0 - 2.0**-53
    return u.clamp_(max=top).neg_().log1p_().neg_()


def log_mass_score(log2_mass: Tensor, exponential: Tensor) -> Tensor:
    """log2(mass / E): the score of a Gumbel-max draw in base 2; -inf without mass."""
    return log2_mass - exponential.log2()


def log_mass_score_(log2_mass: Tensor, exponential: Tensor) -> Tensor:
    """`log_mass_score` in the memory of `exponential`, to whose shape log2_mass is broadcast."""
    return torch.sub(log2_mass, exponential.log2_(), out=exponential)


def group_of(ids: Tensor) -> Tensor:
    """Group number of global token ids."""
    return (ids >> 7) * 4 + ((ids & 7) >> 1)


def group_domain(group: Tensor, first_id: int) -> Word:
    """Domain of the words of group numbers, on a shard that starts at `first_id`."""
    shift = first_id % BLOCK
    return GROUP if shift == 0 else torch.where(group >> 2 == first_id // BLOCK, SPLIT + shift, GROUP)


def member_of(ids: Tensor) -> Tensor:
    """Place j in 0..31 of global token ids in their group."""
    return 2 * ((ids & 127) >> 3) + (ids & 1)


def id_of(group: Tensor, member: Tensor) -> Tensor:
    """Global token id of member j of a group: the inverse of `group_of` and `member_of`."""
    return (group >> 2) * BLOCK + 8 * (member >> 1) + 2 * (group & 3) + (member & 1)


def split_uniform(r0: Tensor, r1: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """t = u * total as an unevaluated fp32 sum hi + lo of about 48 bits, u from the 64 bits of (r0, r1).

    What is left of t after a large subtraction keeps its digits, so that a member rare beside two heavy
    ones is drawn at its right rate. total: fp32. Returns fp32 (hi, lo), |lo| <= ulp(hi) / 2.
    """
    hi = (r0 >> 8).to(torch.float32) * 2.0**-24
    lo = ((r0 & 255).to(torch.float32) + (r1.to(torch.float32) + 0.5) * 2.0**-32) * 2.0**-32
    head = hi + lo
    tail = lo - (head - hi)
    product = head * total
    # torch has no fma; in float64 the product of two fp32 numbers is exact, and so is its difference to
    # `product`.
    error = (head.double() * total.double() - product.double()).to(torch.float32)
    low = error + tail * total
    t = product + low
    return t, low - (t - product)
