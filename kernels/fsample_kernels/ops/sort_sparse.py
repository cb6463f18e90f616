"""Sparse bias triples in the order of their ids, and where each tile's begin, in one launch.

A triple's place is the number of triples before it, counted outright: a stable sort without exchanges, whose
work grows with the square of N. An engine's requests bring up to some thousands of triples a step, which is
microseconds; past `MANY` torch sorts, in a dozen launches.

What takes time is the way to memory and back, so a program reads many triples at a time, the next ones while
it compares the last, and makes few entries, so that the programs fill the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsample_kernels import buffers
from fsample_kernels.ops.compiling import FUSE, ready

BLOCK = 16  # entries a program makes
WIDE = 128  # triples it compares with at a time, a multiple of BLOCK: one a thread
CHUNK = 1024  # triples that are on their way at a time, a multiple of WIDE
MANY = 1 << 15


@triton.jit
def load_ids(ids_ptr, j, num):
    return tl.load(ids_ptr + j, mask=j < num, other=0)


@triton.jit
def key_of(id, live, first_edge, end):
    """The id counted from the first edge, in 32 bits: -1 below that, `end` past the last tile or not live."""
    beyond = first_edge.to(tl.int64) + end
    key = (tl.minimum(tl.maximum(id, first_edge - 1), beyond) - first_edge).to(tl.int32)
    return tl.where(live, key, end)


@triton.jit
def load_chunk(ids_ptr, start, num, WIDE: tl.constexpr, CHUNK: tl.constexpr):
    ids = ()  # type: tuple[tl.tensor, ...]
    for k in tl.static_range(CHUNK // WIDE):
        ids += (load_ids(ids_ptr, start + k * WIDE + tl.arange(0, WIDE), num),)
    return ids


@triton.jit
def count_before(
    key, i, own, ids_ptr, num, first_edge, end, BLOCK: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """[BLOCK] numbers of keys below each key, and of those equal to it in places before i. All i lie among
    the WIDE from `own` on; both are 0 where equal keys do not count."""
    some = tl.arange(0, WIDE)
    j = own + some
    beside = load_ids(ids_ptr, j, num)
    ahead = load_chunk(ids_ptr, 0, num, WIDE, CHUNK)
    before = tl.zeros((BLOCK, WIDE), tl.uint32)
    start = 0
    while start < num:
        ids = ahead
        ahead = load_chunk(ids_ptr, start + CHUNK, num, WIDE, CHUNK)
        for k in tl.static_range(CHUNK // WIDE):
            first = start + k * WIDE
            other = key_of(ids[k], first + some < num, first_edge, end) - (first < own).to(tl.int32)
            # 1 where other < key, from the sign: half of what a compare and a selection take
            before += (other[None, :] - key[:, None]).to(tl.uint32, bitcast=True) >> 31
        start += CHUNK
    same = key_of(beside, j < num, first_edge, end)[None, :] == key[:, None]
    before += (same & (j[None, :] < i[:, None])).to(tl.uint32)
    return tl.sum(before.to(tl.int32), 1)


@triton.jit(
    do_not_specialize=["num", "num_rows", "num_edges", "first_edge", "vocab_size"],
    do_not_specialize_on_alignment=["rows_ptr", "ids_ptr", "values_ptr"],
)
def sort_sparse_kernel(
    rows_ptr, ids_ptr, values_ptr,  # [N] int64, int64, fp32
    sorted_rows_ptr, sorted_ids_ptr, sorted_values_ptr,  # the same, in order of ids
    starts_ptr,  # [T + 1] int32
    spoiled_ptr,  # [B] bool
    num, num_rows, num_edges, first_edge, vocab_size,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program makes BLOCK entries of one of the outputs, and reads all triples for that."""
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    placing = tl.cdiv(num, BLOCK)
    counting = tl.cdiv(num_edges, BLOCK)
    end = (num_edges - 1) * BLOCK_V
    if pid < placing:
        i = pid * BLOCK + offs
        live = i < num
        id = load_ids(ids_ptr, i, num)
        row = tl.load(rows_ptr + i, mask=live, other=0)
        value = tl.load(values_ptr + i, mask=live, other=0.0)
        key = key_of(id, live, first_edge, end)
        own = pid * BLOCK // WIDE * WIDE
        place = count_before(key, i, own, ids_ptr, num, first_edge, end, BLOCK, WIDE, CHUNK)
        tl.store(sorted_rows_ptr + place, row, mask=live)
        tl.store(sorted_ids_ptr + place, id, mask=live)
        tl.store(sorted_values_ptr + place, value, mask=live)
    elif pid < placing + counting:
        e = (pid - placing) * BLOCK + offs
        before = count_before(e * BLOCK_V, e * 0, 0, ids_ptr, num, first_edge, end, BLOCK, WIDE, CHUNK)
        tl.store(starts_ptr + e, before, mask=e < num_edges)
    else:
        r = (pid - placing - counting) * BLOCK + offs
        some = tl.arange(0, CHUNK)
        spoiled = tl.zeros((BLOCK,), tl.int32)
        start = 0
        while start < num:
            j = start + some
            row = tl.load(rows_ptr + j, mask=j < num, other=0)
            id = load_ids(ids_ptr, j, num)
            value = tl.load(values_ptr + j, mask=j < num, other=0.0)
            nowhere = (row < 0) | (row >= num_rows)
            bad = (id < 0) | (id >= vocab_size) | ~(tl.abs(value) < float("inf"))
            if tl.max((bad | nowhere).to(tl.int32), 0) > 0:  # hardly ever: the rows need not be compared then
                here = bad[None, :] & (row.to(tl.int32)[None, :] == r[:, None])
                spoiled |= tl.max((here | nowhere[None, :]).to(tl.int32), 1)
            start += CHUNK
        tl.store(spoiled_ptr + r, spoiled != 0, mask=r < num_rows)


def sort_sparse(
    triples: tuple[Tensor, Tensor, Tensor], num_rows: int, vocab_size: int, first_edge: int, num_tiles: int,
    block_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(rows, ids, values) [N] sorted by id, starts [T + 1] int32 of tiles of block_v ids from first_edge on,
    and spoiled [B].

    Triples outside this shard fall into no tile: before the first and after the last, they keep their order.
    A bad id or value spoils its row, a bad row index every row.
    """
    rows, ids, values = (x.contiguous() for x in triples)
    num = ids.numel()
    if num > MANY:
        return sort_many(triples, num_rows, vocab_size, first_edge, num_tiles, block_v)
    ordered = (torch.empty_like(rows), torch.empty_like(ids), torch.empty_like(values))
    starts = buffers.empty((num_tiles + 1,), torch.int32, ids.device)
    spoiled = buffers.empty((num_rows,), torch.bool, ids.device)
    grid = sum(-(-n // BLOCK) for n in (num, num_tiles + 1, num_rows))
    ready(sort_sparse_kernel)[(grid,)](
        rows, ids, values, *ordered, starts, spoiled, num, num_rows, num_tiles + 1, first_edge, vocab_size,
        BLOCK_V=block_v, BLOCK=BLOCK, WIDE=WIDE, CHUNK=CHUNK, num_warps=4, enable_fp_fusion=FUSE,
    )  # fmt: skip
    return *ordered, starts, spoiled


def sort_many(
    triples: tuple[Tensor, Tensor, Tensor], num_rows: int, vocab_size: int, first_edge: int, num_tiles: int,
    block_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same through torch's sort."""
    rows, ids, values = triples
    device = ids.device
    inside = ids.clamp(first_edge - 1, first_edge + num_tiles * block_v)
    keys, order = torch.sort(inside, stable=True)
    edges = torch.arange(num_tiles + 1, device=device) * block_v + first_edge
    starts = torch.searchsorted(keys, edges, out_int32=True)
    bad_row = (rows < 0) | (rows >= num_rows)
    bad = (ids < 0) | (ids >= vocab_size) | ~values.isfinite()
    counts = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
    counts.scatter_add_(0, torch.where(bad_row, num_rows, rows), (bad | bad_row).to(torch.int32))
    spoiled = (counts[:num_rows] + counts[num_rows]) > 0
    return rows[order], ids[order], values[order], starts, spoiled
