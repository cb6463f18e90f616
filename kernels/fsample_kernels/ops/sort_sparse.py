"""Sparse bias triples in the order of their ids, and where each tile's begin, in one launch.

A triple's place is the number of triples before it, counted outright: a stable sort without exchanges, whose
work grows with the square of N. An engine's requests bring up to some thousands of triples a step, which is
microseconds; past `MANY` torch sorts, in a dozen launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsample_kernels import buffers
from fsample_kernels.ops.compiling import FUSE, ready

BLOCK = 128  # entries a program makes
CHUNK = 32  # triples it reads at a time
MANY = 1 << 15
LAST = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit(
    do_not_specialize=["num", "num_rows", "num_edges", "first_edge", "vocab_size"],
    do_not_specialize_on_alignment=["rows_ptr", "ids_ptr", "values_ptr"],
)
def sort_sparse_kernel(
    rows_ptr, ids_ptr, values_ptr,  # [N] int64, int64, fp32
    sorted_rows_ptr, sorted_ids_ptr, sorted_values_ptr,  # the same, in order of ids
    starts_ptr,  # [T + 1] int64
    spoiled_ptr,  # [B] bool
    num, num_rows, num_edges, first_edge, vocab_size,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program makes BLOCK entries of one of the outputs, and reads all triples for that."""
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    some = tl.arange(0, CHUNK)
    placing = tl.cdiv(num, BLOCK)
    counting = tl.cdiv(num_edges, BLOCK)
    if pid < placing:
        i = pid * BLOCK + offs
        live = i < num
        id = tl.load(ids_ptr + i, mask=live, other=0)
        place = tl.zeros((BLOCK,), tl.int32)
        start = 0
        while start < num:
            j = start + some
            other = tl.load(ids_ptr + j, mask=j < num, other=LAST)
            equal_before = (other[None, :] == id[:, None]) & (j[None, :] < i[:, None])
            place += tl.sum(((other[None, :] < id[:, None]) | equal_before).to(tl.int32), 1)
            start += CHUNK
        tl.store(sorted_rows_ptr + place, tl.load(rows_ptr + i, mask=live, other=0), mask=live)
        tl.store(sorted_ids_ptr + place, id, mask=live)
        tl.store(sorted_values_ptr + place, tl.load(values_ptr + i, mask=live, other=0.0), mask=live)
    elif pid < placing + counting:
        e = (pid - placing) * BLOCK + offs
        edge = first_edge + e.to(tl.int64) * BLOCK_V
        before = tl.zeros((BLOCK,), tl.int32)
        start = 0
        while start < num:
            j = start + some
            other = tl.load(ids_ptr + j, mask=j < num, other=LAST)
            before += tl.sum((other[None, :] < edge[:, None]).to(tl.int32), 1)
            start += CHUNK
        tl.store(starts_ptr + e, before.to(tl.int64), mask=e < num_edges)
    else:
        r = (pid - placing - counting) * BLOCK + offs
        spoiled = tl.zeros((BLOCK,), tl.int32)
        start = 0
        while start < num:
            j = start + some
            row = tl.load(rows_ptr + j, mask=j < num, other=0)
            id = tl.load(ids_ptr + j, mask=j < num, other=0)
            value = tl.load(values_ptr + j, mask=j < num, other=0.0)
            nowhere = (row < 0) | (row >= num_rows)
            bad = (id < 0) | (id >= vocab_size) | ~(tl.abs(value) < float("inf"))
            here = bad[None, :] & (row[None, :] == r[:, None])
            spoiled |= tl.max((here | nowhere[None, :]).to(tl.int32), 1)
            start += CHUNK
        tl.store(spoiled_ptr + r, spoiled != 0, mask=r < num_rows)


def sort_sparse(
    triples: tuple[Tensor, Tensor, Tensor], num_rows: int, vocab_size: int, first_edge: int, num_tiles: int,
    block_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(rows, ids, values) [N] sorted by id, starts [T + 1] of tiles of block_v ids from first_edge on, and
    spoiled [B].

    Triples outside this shard fall into no tile. A bad id or value spoils its row, a bad row index every row.
    """
    rows, ids, values = (x.contiguous() for x in triples)
    num = ids.numel()
    if num > MANY:
        return sort_many(triples, num_rows, vocab_size, first_edge, num_tiles, block_v)
    ordered = (torch.empty_like(rows), torch.empty_like(ids), torch.empty_like(values))
    starts = buffers.empty((num_tiles + 1,), torch.int64, ids.device)
    spoiled = buffers.empty((num_rows,), torch.bool, ids.device)
    grid = sum(-(-n // BLOCK) for n in (num, num_tiles + 1, num_rows))
    ready(sort_sparse_kernel)[(grid,)](
        rows, ids, values, *ordered, starts, spoiled, num, num_rows, num_tiles + 1, first_edge, vocab_size,
        BLOCK_V=block_v, BLOCK=BLOCK, CHUNK=CHUNK, num_warps=4, enable_fp_fusion=FUSE,
    )  # fmt: skip
    return *ordered, starts, spoiled


def sort_many(
    triples: tuple[Tensor, Tensor, Tensor], num_rows: int, vocab_size: int, first_edge: int, num_tiles: int,
    block_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same through torch's sort."""
    rows, ids, values = triples
    device = ids.device
    sorted_ids, order = torch.sort(ids, stable=True)
    edges = torch.arange(num_tiles + 1, device=device) * block_v + first_edge
    starts = torch.searchsorted(sorted_ids, edges)
    bad_row = (rows < 0) | (rows >= num_rows)
    bad = (ids < 0) | (ids >= vocab_size) | ~values.isfinite()
    counts = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
    counts.scatter_add_(0, torch.where(bad_row, num_rows, rows), (bad | bad_row).to(torch.int32))
    spoiled = (counts[:num_rows] + counts[num_rows]) > 0
    return rows[order], sorted_ids, values[order], starts, spoiled
