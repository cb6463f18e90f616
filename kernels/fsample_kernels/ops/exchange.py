"""All ranks' words to all ranks in one kernel, launched after the one that made them; see `link`."""

import triton
import triton.language as tl

from fsample_kernels.ops import arguments
from fsample_kernels.ops.compiling import FUSE, ready
from fsample_kernels.ops.link import EPOCH, clock, end_step, ids_of, send, take

BLOCK = 256  # words a program handles at a time
WARPS = 4
PROGRAMS = 32  # at most: all of them must run at the same time, since each waits for its twin on every peer


@triton.jit(do_not_specialize=["num_words"])
def exchange_kernel(
    words_ptr,  # [N] int64, this rank's
    out_ptr,  # [R, N] int64, every rank's words; with BEST [N], the ids of the largest keys
    link_ptr,  # [6 + R] int64
    num_words,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr, BEST: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    # Inline assembly runs in copies too, where a block is smaller than its threads' registers: here there are
    # none, at one word a thread or at the two of a wide load.
    tl.static_assert(BLOCK >= 2 * 32 * WARPS)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    offs = tl.arange(0, BLOCK)
    epoch = tl.load(link_ptr + EPOCH)
    i = pid * BLOCK
    while i < num_words:
        live = i + offs < num_words
        word = tl.load(words_ptr + i + offs, mask=live, other=0)
        send(link_ptr, epoch, (i + offs).to(tl.int64), word, live, RANKS, ASM)
        i += programs * BLOCK

    spins = tl.full((), 0, tl.int64)
    start = clock(spins, ASM)
    i = pid * BLOCK
    while i < num_words:
        live = i + offs < num_words
        best = tl.full((BLOCK,), -0x7FFFFFFFFFFFFFFF, tl.int64)
        for source in tl.static_range(RANKS):
            word, spins = take(
                link_ptr, epoch, (i + offs).to(tl.int64), source, live, start, spins, RANKS, ASM
            )
            if BEST:
                best = tl.maximum(best, word)
            else:
                tl.store(out_ptr + source * num_words.to(tl.int64) + i + offs, word, mask=live)
        if BEST:
            tl.store(out_ptr + i + offs, ids_of(best), mask=live)
        i += programs * BLOCK

    tl.debug_barrier()
    end_step(link_ptr, epoch, programs)


def exchange(words, out, link, ranks: int, best: bool, only_compile: bool = False) -> None:
    """Fill out [R, N] with the words [N] of every rank, or [N] with the ids of the best; see the kernel."""
    num_words = words.numel()
    grid = (min(PROGRAMS, triton.cdiv(num_words, BLOCK)),)
    named = {
        "words_ptr": words, "out_ptr": out, "link_ptr": link, "num_words": num_words,
        "RANKS": ranks, "BLOCK": BLOCK, "WARPS": WARPS, "BEST": best, "ASM": not arguments.INTERPRETED,
        "num_warps": WARPS, "enable_fp_fusion": FUSE,
    }  # fmt: skip
    with arguments.on_device(words.device):
        if only_compile:
            exchange_kernel.warmup(grid=grid, **named)
        else:
            ready(exchange_kernel)[grid](**named)
