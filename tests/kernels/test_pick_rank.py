"""The kernel that draws a rank by the shards' masses makes the draws of torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsample_kernels.distributed.merge import _pick_rank
from fsample_kernels.ops import pick_rank as module
from fsample_kernels.ops.compiling import compile_only
from fsample_kernels.ops.pick_rank import pick_rank

pytestmark = pytest.mark.interpreter
WORD = 2**32 - 1


@pytest.mark.parametrize("seed", [3, WORD << 32 | 5, "rows", "scalar"])
@pytest.mark.parametrize("position", [0, WORD, "rows"])
@pytest.mark.parametrize("greedy", [False, True, "rows"])
def test_as_torch_draws(seed: Any, position: Any, greedy: Any) -> None:
    B, R, K = 150, 3, 2
    generator = torch.Generator().manual_seed(1)
    lse = torch.randn(R, B, generator=generator) * 2
    lse[1, :20] = -torch.inf
    lse[:, 20] = 1.0  # greedy rows tie: the lower rank
    if seed == "rows":
        seed = torch.randint(-(2**63), 2**63 - 1, (B,), generator=generator)
    elif seed == "scalar":
        seed = torch.tensor(-7)
    if position == "rows":
        position = torch.randint(0, WORD, (B,), generator=generator)
    if greedy == "rows":
        greedy = torch.arange(B) % 3 == 0
    got = pick_rank(lse, K, seed, position, greedy)
    assert torch.equal(got, _pick_rank(lse, K, seed, position, greedy))
    assert not bool((got[:20] == 1).any())  # no mass, no draw
    if greedy is not True:
        assert set(got.flatten().tolist()) == {0, 1, 2}


def test_more_samples_than_a_second_dimension_of_a_grid_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *values, **named: None

    monkeypatch.setattr(module, "ready", lambda kernel: Kernel())
    pick_rank(torch.zeros(2, 300), 70_000, 1, 0, False)
    assert grids == [(3 * 70_000,)]


def test_where_kernels_are_compiled_only_every_rank_is_one_to_index_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # what is allocated holds the largest integer
    try:
        with compile_only():
            ranks = pick_rank(torch.zeros(2, 3), 4, 1, 0, False)
    finally:
        torch.use_deterministic_algorithms(before)
    assert ranks.tolist() == [[0] * 4] * 3
