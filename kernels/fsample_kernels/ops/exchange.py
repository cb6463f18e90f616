"""All ranks' words to all ranks in one kernel: stores into the peers' memory that validate themselves.

A 64-bit word travels as two, each a 32-bit half under the 32-bit epoch of its step. An aligned 8-byte store
is seen whole or not at all, so a half with the right epoch is data: no flag, no fence, no barrier. Two
buffers are enough, because a rank ends step e + 1 only with every peer's words of e + 1, which a peer sends
only after it has read those of e (tests/kernels/test_epoch_protocol.py explores every interleaving). The
epoch is on the device and a launch bumps it, so that a replayed CUDA graph goes on counting.
"""

import triton
import triton.language as tl

from fsample_kernels.ops import arguments

BLOCK = 256  # words a program handles at a time
PROGRAMS = 32  # at most: all of them must run at the same time, since each waits for its twin on every peer
# What is put in place of a word that never came: NaN in both halves, and above every score that is one.
POISON = tl.constexpr(0x7FC000007FC00000)
HALF = tl.constexpr(0xFFFFFFFF)


@triton.jit
def send(address, word, live, ASM: tl.constexpr):
    """Store int64 words at int64 addresses, each visible to the whole system at once."""
    if ASM:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.relaxed.sys.global.b64 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,l,r", [address, word, live.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(address.to(tl.pointer_type(tl.int64)), word, mask=live)


@triton.jit
def receive(address, live, ASM: tl.constexpr):
    """Load int64 words past every cache that another device does not see; 0 where not live."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b64 $0, 0; @p ld.relaxed.sys.global.b64 $0, [$1]; }",
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


@triton.jit(do_not_specialize=["num_words", "rank", "capacity", "limit_ns", "status_address"])
def exchange_kernel(
    words_ptr,  # [N] int64, this rank's
    out_ptr,  # [R, N] int64, every rank's words; with BEST [N], the ids of the largest keys
    peers_ptr,  # [R] int64, addresses of the ranks' buffers: [2, R, capacity, 2] int64 each
    state_ptr,  # [2] int64: epoch of this step, programs that have finished it
    status_address,  # of [2] int64 in pinned host memory: 1 + the rank that did not come, its epoch
    num_words, rank, capacity, limit_ns,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, BEST: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    offs = tl.arange(0, BLOCK)
    epoch = tl.load(state_ptr)
    tag = (epoch & HALF) << 32
    slot = epoch & 1
    stride = capacity.to(tl.int64) * 16  # bytes of one rank's words in one slot

    i = pid * BLOCK
    while i < num_words:
        live = i + offs < num_words
        word = tl.load(words_ptr + i + offs, mask=live, other=0)
        at = (slot * RANKS + rank) * stride + (i + offs).to(tl.int64) * 16
        for p in tl.static_range(RANKS):
            base = tl.load(peers_ptr + (rank + p) % RANKS)  # not all ranks to the same peer first
            send(base + at, tag | ((word >> 32) & HALF), live, ASM)
            send(base + at + 8, tag | (word & HALF), live, ASM)
        i += programs * BLOCK

    own = tl.load(peers_ptr + rank)
    spins = tl.full((), 0, tl.int64)
    start = clock(spins, ASM)
    i = pid * BLOCK
    while i < num_words:
        live = i + offs < num_words
        best = tl.full((BLOCK,), -0x7FFFFFFFFFFFFFFF, tl.int64)
        for source in tl.static_range(RANKS):
            at = own + (slot * RANKS + source) * stride + (i + offs).to(tl.int64) * 16
            high = receive(at, live, ASM)
            low = receive(at + 8, live, ASM)
            waits = tl.max(
                (live & (((high ^ tag) >> 32 != 0) | ((low ^ tag) >> 32 != 0))).to(tl.int32), axis=0
            )
            late = 0
            while (waits > 0) & (late == 0):
                high = receive(at, live, ASM)
                low = receive(at + 8, live, ASM)
                waits = tl.max(
                    (live & (((high ^ tag) >> 32 != 0) | ((low ^ tag) >> 32 != 0))).to(tl.int32), axis=0
                )
                spins += 1
                late = (clock(spins, ASM) - start > limit_ns).to(tl.int32)
            came = ((high ^ tag) >> 32 == 0) & ((low ^ tag) >> 32 == 0)
            word = tl.where(came, (high << 32) | (low & HALF), POISON)
            if BEST:
                best = tl.maximum(best, word)
            else:
                tl.store(out_ptr + source * num_words.to(tl.int64) + i + offs, word, mask=live)
            if waits > 0:
                status = status_address.to(tl.pointer_type(tl.int64))
                tl.store(status + 1, epoch)
                tl.store(status, source + 1)
        if BEST:  # as words.key_ids
            score = best >> 32
            ids = 0x7FFFFFFF - (best & HALF)
            nobody = (score >= 0x7F800000) | (score == -0x7F800001)
            tl.store(out_ptr + i + offs, tl.where(nobody, -1, ids), mask=live)
        i += programs * BLOCK

    tl.debug_barrier()
    arrived = tl.atomic_add(state_ptr + 1, 1, sem="acq_rel", scope="gpu")
    if arrived == programs - 1:
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr, epoch + 1)


def exchange(
    words, out, peers, state, status_address: int, rank: int, ranks: int, capacity: int, limit_ns: int,
    best: bool, only_compile: bool = False,
) -> None:  # fmt: skip
    """Fill out [R, N] with the words [N] of every rank, or [N] with the ids of the best; see the kernel."""
    num_words = words.numel()
    grid = (min(PROGRAMS, triton.cdiv(num_words, BLOCK)),)
    named = {
        "words_ptr": words, "out_ptr": out, "peers_ptr": peers, "state_ptr": state,
        "status_address": status_address, "num_words": num_words, "rank": rank, "capacity": capacity,
        "limit_ns": limit_ns, "RANKS": ranks, "BLOCK": BLOCK, "BEST": best,
        "ASM": not arguments.INTERPRETED, "num_warps": 4,
    }  # fmt: skip
    with arguments.on_device(words.device):
        if only_compile:
            exchange_kernel.warmup(grid=grid, **named)
        else:
            exchange_kernel[grid](**named)
