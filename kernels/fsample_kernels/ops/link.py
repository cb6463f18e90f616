"""Words that travel between GPUs: stores into the peers' memory that validate themselves.

A 64-bit word travels as two, each a 32-bit half under the 32-bit epoch of its step. An aligned 8-byte store
is seen whole or not at all, so a half with the right epoch is data: no flag, no fence, no barrier. Two
buffers are enough, because a rank ends step e + 1 only with every peer's words of e + 1, which a peer sends
only after it has read those of e (tests/kernels/test_epoch_protocol.py explores every interleaving). The
epoch is on the device and a step bumps it, so that a replayed CUDA graph goes on counting. Halves hold its
low 32 bits, so the word of a row that no step has had since fits again 2^32 steps later.

Inline assembly also runs in the copies that a tensor has where it is smaller than its threads' registers, so
words must have none: a copy would send what it read later, and end the wait of a warp for another.

A rank's link is an int64 tensor [6 + R]: the fields below, then the addresses of the R ranks' buffers, each
[2 slots, R, capacity, 2] int64. Both users, the exchange kernel and the Hopper kernel, take it as link_ptr.
"""

import triton
import triton.language as tl

EPOCH = tl.constexpr(0)  # of this step
DONE = tl.constexpr(1)  # programs that have ended this step
# Address of an int64 in pinned host memory: 0, or the first word that did not come, see `missed`.
STATUS = tl.constexpr(2)
RANK = tl.constexpr(3)
CAPACITY = tl.constexpr(4)  # words a rank and slot
LIMIT = tl.constexpr(5)  # ns that a word is waited for; 0 once one did not come: later steps end at once
PEERS = tl.constexpr(6)
# What is put in place of a word that never came: NaN in both halves, and above every score that is one.
POISON = tl.constexpr(0x7FC000007FC00000)
HALF = tl.constexpr(0xFFFFFFFF)
RANK_BIT = tl.constexpr(48)  # of a status: 1 + the rank from here on, its epoch below
# How a wait stands.
ALL_CAME = tl.constexpr(0)
WAITING = tl.constexpr(1)
GAVE_UP = tl.constexpr(2)


def missed(status: int) -> tuple[int, int] | None:
    """(rank, epoch) of the word that did not come, or None."""
    return ((status >> RANK_BIT.value) - 1, status % (1 << RANK_BIT.value)) if status else None


@triton.jit
def store_remote(address, word, live, ASM: tl.constexpr):
    """Store int64 words at int64 addresses, each visible to the whole system at once."""
    if ASM:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.relaxed.sys.global.b64 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,l,r", [address, word, live.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(address.to(tl.pointer_type(tl.int64)), word, mask=live)


@triton.jit
def load_remote(address, live, ASM: tl.constexpr):
    """Load int64 words past every cache that another device does not see; 0 where not live."""
    if ASM:
        return tl.inline_asm_elementwise(
            # $0 may be the register of $1, so it is written last.
            "{ .reg .pred p; .reg .b64 t; setp.ne.s32 p, $2, 0; mov.b64 t, 0; "
            "@p ld.relaxed.sys.global.b64 t, [$1]; mov.b64 $0, t; }",
            "=l,l,r", [address, live.to(tl.int32)], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.load(address.to(tl.pointer_type(tl.int64)), mask=live, other=0, volatile=True)


@triton.jit
def clock(spins, ASM: tl.constexpr):
    """Nanoseconds; in the interpreter, which runs one rank at a time, the number of polls."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer; // $1", "=l,l", [spins], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        return spins


@triton.jit
def send(link_ptr, epoch, index, word, live, RANKS: tl.constexpr, ASM: tl.constexpr):
    """Send this rank's words of the step to every rank, itself too; index: their places, int64."""
    rank = tl.load(link_ptr + RANK)
    at = (((epoch & 1) * RANKS + rank) * tl.load(link_ptr + CAPACITY) + index) * 16
    tag = (epoch & HALF) << 32
    high = tag | ((word >> 32) & HALF)
    low = tag | (word & HALF)
    for p in tl.static_range(RANKS):
        base = tl.load(link_ptr + PEERS + (rank + p) % RANKS)  # not all ranks to the same peer first
        store_remote(base + at, high, live, ASM)
        store_remote(base + at + 8, low, live, ASM)


@triton.jit
def has_tag(high, low, tag):
    return ((high ^ tag) >> 32 == 0) & ((low ^ tag) >> 32 == 0)


@triton.jit
def take(link_ptr, epoch, index, source, live, start, spins, RANKS: tl.constexpr, ASM: tl.constexpr):
    """Wait for the words of a rank; start: the clock when the step began to wait.

    Returns (words, POISON where one did not come in time and the host is told of it; polls so far).
    """
    own = tl.load(link_ptr + PEERS + tl.load(link_ptr + RANK))
    at = own + (((epoch & 1) * RANKS + source) * tl.load(link_ptr + CAPACITY) + index) * 16
    limit = tl.load(link_ptr + LIMIT)
    tag = (epoch & HALF) << 32
    high = load_remote(at, live, ASM)
    low = load_remote(at + 8, live, ASM)
    waits = tl.max((live & ~has_tag(high, low, tag)).to(tl.int32) * WAITING, axis=0)
    while waits == WAITING:
        spins += 1
        # Every thread reads a clock of its own, and a maximum has barriers. So it also decides that the limit
        # is past: else a warp that reads it a tick earlier goes back to barriers that the others have left.
        state = tl.where(clock(spins, ASM) - start > limit, GAVE_UP, WAITING)
        high = load_remote(at, live, ASM)
        low = load_remote(at + 8, live, ASM)
        waits = tl.max((live & ~has_tag(high, low, tag)).to(tl.int32) * state, axis=0)
    if waits != ALL_CAME:
        # One word, so that rank and epoch belong together. The first miss stays: it explains the others.
        status = tl.load(link_ptr + STATUS).to(tl.pointer_type(tl.int64))
        first = tl.load(status, volatile=True) == 0
        wide = epoch * 0 + source + 1  # int64; Gluon's own `full` asks for a layout
        tl.store(status, (wide << RANK_BIT) | epoch, mask=first)
        tl.store(link_ptr + LIMIT, 0)
    return tl.where(has_tag(high, low, tag), (high << 32) | (low & HALF), POISON), spins


@triton.jit
def ids_of(key):
    """As `words.key_ids`: -1 for a bad row, a missing word, or where no rank has an allowed id."""
    score = key >> 32
    nobody = (score >= 0x7F800000) | (score == -0x7F800001)
    return tl.where(nobody, -1, 0x7FFFFFFF - (key & HALF))


@triton.jit
def end_step(link_ptr, epoch, programs):
    """Count a program's end; the last one opens the next step. Everything it did must come before."""
    ended = tl.atomic_add(link_ptr + DONE, 1, sem="acq_rel", scope="gpu")
    if ended == programs - 1:
        tl.store(link_ptr + DONE, 0)
        tl.store(link_ptr + EPOCH, epoch + 1)
