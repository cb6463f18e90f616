"""Sparse bias triples are sorted by id, stably; bad ones spoil their rows: the kernel against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsample_kernels.ops import sort_sparse as sort_sparse_module
from fsample_kernels.ops.sort_sparse import sort_many, sort_sparse

pytestmark = pytest.mark.interpreter


SMALL = {"WIDE": 32, "CHUNK": 64}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of few triples, where whole ones would take minutes."""
    for name, size in SMALL.items():
        monkeypatch.setattr(sort_sparse_module, name, size)


@pytest.mark.parametrize("num", [0, 1, 17, 140])
def test_as_torch_sorts(num: int) -> None:
    check(num, 0)


@pytest.mark.parametrize("num", [64, 65, 200])
@pytest.mark.parametrize("first_edge", [0, 256])
def test_over_several_chunks(num: int, first_edge: int, small_chunks: None) -> None:
    check(num, first_edge)


def check(num: int, first_edge: int) -> None:
    generator = torch.Generator().manual_seed(num)
    rows = torch.randint(0, 5, (num,), generator=generator)
    ids = torch.randint(0, 40, (num,), generator=generator) * 25  # many equal ids, some at an edge of a tile
    values = torch.randn(num, generator=generator)  # tell the order of equal ids
    arguments = (5, 1000, first_edge, 5, 128)
    got = sort_sparse((rows, ids, values), *arguments)
    for mine, wanted in zip(got, sort_many((rows, ids, values), *arguments), strict=True):
        assert torch.equal(mine, wanted)


def test_bad_triples_spoil() -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([0, 1, 2, 3, 4])
    ids = torch.tensor([5, -1, 100, 5, 5])
    values = torch.tensor([1.0, 1.0, 1.0, nan, -inf])
    spoiled = sort_sparse((rows, ids, values), 6, 100, 0, 1, 128)[4]
    assert spoiled.tolist() == [False, True, True, True, True, False]
    for row in (-1, 6):
        rows[0] = row
        assert sort_sparse((rows, ids, values), 6, 100, 0, 1, 128)[4].all()


@pytest.mark.parametrize("block_v", [128, 16])
def test_ids_anywhere(block_v: int, small_chunks: None) -> None:
    """Those in no tile stay in order on their side, also where 64 bits or 32 end."""
    far = [-(1 << 63), (1 << 63) - 1, (1 << 31) - 1, 1 << 32, -1, 0, 255, 256, 257, 767, 768, 769]
    ids = torch.tensor([far[n * 5 % len(far)] for n in range(40)])
    triples = (torch.arange(40) % 3, ids, torch.arange(40.0))
    arguments = (3, 1000, 256, 512 // block_v, block_v)
    got = sort_sparse(triples, *arguments)
    for mine, wanted in zip(got, sort_many(triples, *arguments), strict=True):
        assert torch.equal(mine, wanted)
    begin, end = got[3][0], got[3][-1]
    for part, outside in ((got[2][:begin], ids < 256), (got[2][end:], ids >= 768)):
        assert part.tolist() == torch.arange(40.0)[outside].tolist()
    inside = got[1][begin:end]
    assert torch.equal(inside, ids[(ids >= 256) & (ids < 768)].sort().values)


def test_a_bad_triple_of_a_later_chunk_spoils(small_chunks: None) -> None:
    num = 67
    rows, ids, values = torch.arange(num) % 20, torch.zeros(num, dtype=torch.int64), torch.zeros(num)
    values[-1] = float("nan")
    wanted = [row == (num - 1) % 20 for row in range(20)]
    assert sort_sparse((rows, ids, values), 20, 100, 0, 1, 128)[4].tolist() == wanted
    rows[-1] = 1 << 32  # row 0 to who sees 32 bits
    assert sort_sparse((rows, ids, values), 20, 100, 0, 1, 128)[4].all()


TRIPLES = st.lists(st.tuples(st.integers(-1, 2), st.integers(-2, 6)), max_size=40)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(TRIPLES)
def test_repeats_keep_their_order(pairs: list[tuple[int, int]]) -> None:
    """They are added one after the other, and fp32 sums depend on the order."""
    rows, ids = (torch.tensor([pair[n] for pair in pairs], dtype=torch.int64) for n in (0, 1))
    values = torch.arange(float(len(pairs)))
    with pytest.MonkeyPatch.context() as patch:
        for name, size in SMALL.items():
            patch.setattr(sort_sparse_module, name, size)
        got_rows, got_ids, got_values, starts, spoiled = sort_sparse((rows, ids, values), 3, 6, 0, 2, 4)
    assert starts.tolist() == [sum(id < edge for _, id in pairs) for edge in (0, 4, 8)]
    nowhere = any(row < 0 for row, _ in pairs)
    bad = {row for row, id in pairs if not 0 <= id < 6}
    assert spoiled.tolist() == [nowhere or row in bad for row in range(3)]
    for pair in set(pairs):
        mine = got_values[(got_rows == pair[0]) & (got_ids == pair[1])].tolist()
        assert mine == [n for n, other in enumerate(pairs) if other == pair]
