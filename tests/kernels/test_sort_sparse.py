"""Sparse bias triples are sorted by id, stably; bad ones spoil their rows: the kernel against torch."""

from __future__ import annotations

import pytest
import torch

from fsample_kernels.ops.sort_sparse import sort_many, sort_sparse

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("num", [0, 1, 127, 128, 300])
@pytest.mark.parametrize("first_edge", [0, 256])
def test_as_torch_sorts(num: int, first_edge: int) -> None:
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
