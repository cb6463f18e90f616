"""How the Hopper kernel's CTAs share the work of a call: the source of the kernel, run on integers."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace

import pytest
import triton

from fsample_kernels.ops import hopper_configs, hopper_pipeline, hopper_sample

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the source is run as it is, not interpreted"
)


@pytest.mark.parametrize("bv", [128, 256])
def test_every_product_is_dealt_once(monkeypatch: pytest.MonkeyPatch, bv: int) -> None:
    """In order of ids within a CTA, and in two parts at most, the first where nothing comes before it. No CTA
    has more to do than in the best deal: the source of the kernel, run on integers."""
    monkeypatch.setattr(hopper_pipeline, "gl", SimpleNamespace(cdiv=triton.cdiv, maximum=max, minimum=min))
    split_work, tile_of = hopper_pipeline.split_work.fn, hopper_pipeline.tile_of.fn
    for ctas, blocks_d in itertools.product((1, 2, 3, 7, 16, 66, 132), (1, 3, 10, 64, 128)):
        # on many CTAs the edges of a round, half-rounds, real vocabularies and shards of them
        edges = (1, 33, 65, 66, 67, 149, 198, 199, 297, 501, 594, 1002, 1187)
        for units in range(1, 4 * ctas + 3) if ctas < 20 else edges:
            parts: dict[int, list[tuple[int, int, int]]] = {}  # of a tile: from, to, CTA
            work = []
            parted = False
            for cta in range(ctas):
                dealt = split_work(units, ctas, cta, blocks_d, bv)
                mine = [tile_of(n, dealt, ctas, cta, blocks_d) for n in range(dealt[1])]
                assert [tile for tile, _, _ in mine] == sorted({tile for tile, _, _ in mine})
                for n, (tile, d0, d1) in enumerate(mine):
                    assert 0 <= d0 < d1 <= blocks_d
                    assert d1 == blocks_d or (d0 == 0 and n == dealt[0])  # no part waits for one that waits
                    parts.setdefault(tile, []).append((d0, d1, cta))
                    parted |= d1 - d0 < blocks_d
                work.append(sum(d1 - d0 for _, d0, d1 in mine))
            # the launcher, which gives the sums their memory, knows
            assert not parted or hopper_sample.parts_tiles(units, ctas, blocks_d, bv)
            tiles = triton.cdiv(units, bv // 128)
            assert sorted(parts) == list(range(tiles)), (units, ctas)
            for tile, ranges in parts.items():
                first, *rest = sorted(ranges)
                if not rest:
                    assert first[:2] == (0, blocks_d), (units, ctas, tile)
                    continue
                (last,) = rest
                assert first[0] == 0 and first[1] == last[0] and last[1] == blocks_d, (units, ctas, tile)
                assert last[2] == first[2] + 1, (units, ctas, tile)
            whole = triton.cdiv(tiles, ctas) * blocks_d
            evenly = triton.cdiv(tiles * blocks_d, ctas)
            if bv > 128 and tiles > ctas and whole - evenly > 9:
                assert max(work) == evenly, (units, ctas, blocks_d)
            else:
                assert max(work) in ((whole, evenly) if bv > 128 else (whole,)), (units, ctas, blocks_d)


@pytest.mark.parametrize("bv", [128, 256])
def test_no_cta_waits_for_others_where_fewer_would_do(bv: int) -> None:
    """As few CTAs as need no round more; where tiles are parted, all."""
    for most, blocks_d in itertools.product((1, 2, 5, 33, 66, 132), (1, 10, 128)):
        for units in (0, 1, 2, 65, 66, 67, 131, 132, 133, 501, 1002, 1187, 2048):
            ctas = hopper_sample.ctas_for(units, most, blocks_d, bv)
            tiles = triton.cdiv(units, bv // 128)
            assert 1 <= ctas <= most
            if hopper_sample.parts_tiles(units, most, blocks_d, bv):
                assert ctas == most
            elif tiles:
                rounds = triton.cdiv(tiles, most)
                assert triton.cdiv(tiles, ctas) == rounds, (units, most)
                assert ctas == 1 or triton.cdiv(tiles, ctas - 1) > rounds, (units, most)
    assert hopper_sample.ctas_for(1002, 132, 128, 128) == 126  # Llama-3-70B
    assert hopper_sample.ctas_for(1187, 132, 64, 128) == 132  # Qwen3-8B


@pytest.mark.parametrize("config", hopper_configs.ALL, ids=lambda config: f"{config.bv}x{config.rows}")
def test_boxes_of_hidden_hold_every_row_and_end_with_the_batch(
    monkeypatch: pytest.MonkeyPatch, config: hopper_configs.HopperConfig
) -> None:
    """A place in shared memory holds the row that its warpgroup takes it for. TMA is slow where a box ends
    past the batch: only a block of fewer rows than a box has one that does."""
    monkeypatch.setattr(hopper_pipeline, "gl", SimpleNamespace(cdiv=triton.cdiv, maximum=max, minimum=min))
    last_box = hopper_pipeline.last_box.fn
    for num_rows in range(1, 2 * config.rows + 2):
        for row0 in range(0, num_rows, config.rows):
            edge, lower = last_box(num_rows, row0, config.rows, config.box)
            end = min(num_rows, row0 + config.rows)
            boxes = triton.cdiv(end - row0, config.box)
            starts = [row0 + b * config.box - (lower if b == boxes - 1 else 0) for b in range(boxes)]
            loaded = [start + place for start in starts for place in range(config.box)]
            taken = [row - lower if row >= edge else row for row in range(row0, row0 + config.rows)]
            assert taken[: len(loaded)] == loaded
            assert all(row >= end for row in taken[len(loaded) :])  # in no box: not live
            assert set(range(row0, end)) <= set(loaded) and min(loaded) == row0
            if end - row0 >= config.box:
                assert max(loaded) == end - 1
