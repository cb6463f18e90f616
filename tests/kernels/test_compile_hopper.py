"""The Hopper kernel compiles without a GPU as it is launched, and its machine code is as it was tuned to be.

The launcher runs on CPU tensors with the launch itself replaced, so the types, flags and options are its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import triton

from fsample_kernels.ops import (
    arguments,
    candidates,
    hopper_configs,
    hopper_sample,
    hopper_workspace,
    sort_sparse,
)
from fsample_kernels.ops.hopper_configs import (
    LARGE,
    UP_TO_64,
    UP_TO_64_NARROW,
    UP_TO_128,
    UP_TO_192,
    HopperConfig,
)
from fsample_kernels.types import Problem
from tests.kernels.hopper_launch import NAMES, SIZES, TYPES, Launch, Launched, V, fields
from tests.kernels.machine_code import Code, Job, compile_job, summary

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

MakeProblem = Callable[..., Problem]
SHARED = 227 * 1024  # bytes a block can have on sm_90


@pytest.fixture
def make_job(make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """make_job(config, variant, dtype): the launch of a call, as a job."""
    launch = Launch()
    monkeypatch.setattr(hopper_sample, "hopper_kernel", launch)
    monkeypatch.setattr(hopper_sample, "sm_count", lambda device: 132)
    monkeypatch.setattr(arguments, "on_device", contextlib.nullcontext)
    monkeypatch.setattr(arguments, "sort_sparse", sort_sparse.sort_many)  # no launch
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def make(config: HopperConfig, variant: str, dtype: torch.dtype = torch.bfloat16) -> Job:
        B, D = SIZES[config]
        changes = fields(B)[variant]
        problem = make_problem(B, V, D, dtype, **changes)
        with pytest.raises(Launched):
            if variant == "keys":
                hopper_sample.candidates(problem)
            elif variant.startswith("linked"):
                ranks = int(variant.removeprefix("linked "))
                hopper_sample.run_linked(problem, torch.zeros(6 + ranks, dtype=torch.int64), ranks)
            else:
                hopper_sample.run(problem)
        return launch.job(f"{NAMES[config]}, {TYPES[dtype]}, {variant}")

    return make


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("fork")) as executor:
        yield executor
    del os.environ["TRITON_CACHE_DIR"]
    if before is not None:
        os.environ["TRITON_CACHE_DIR"] = before


EARLY = triton.__version__.startswith("3.6.")
# Loads and stores of local memory that a variant may hold where half of a thread's registers or more are the
# accumulator: what is loaded from a mask or a bias has to wait somewhere, and a mass is kept for four rows.
# None is in the loop over D, and what the tables read costs more. triton 3.9 also keeps some of the kernel's
# numbers in local memory, and reads them once a tile, up to three of them once a block of D.
MAY_SPILL_IN_LOOP = 0 if EARLY else 3
MAY_SPILL = {
    LARGE: {},
    UP_TO_192: {"rows": 32, "mask": 64},
    UP_TO_128: {},
}
MAY_SPILL_LATER = {
    LARGE: {"transforms": 96, "bias": 192, "mask": 512},
    UP_TO_192: {"plain": 128, "mask": 256, "bits": 128, "mass": 256, "stored": 128},
    UP_TO_128: {},
}


# Instructions of the whole kernel with triton 3.6, as measured; the scheduler may add 2 %.
INSTRUCTIONS = {
    (UP_TO_64, "plain"): 1936,
    (UP_TO_64_NARROW, "plain"): 1936,
    (UP_TO_128, "plain"): 3424,
    (UP_TO_192, "plain"): 4240,
    (LARGE, "plain"): 5976,
    (UP_TO_64, "element"): 3400,
    (UP_TO_128, "element"): 6264,
}
SLACK = 1.02


def spills_allowed(config: HopperConfig, variant: str) -> int:
    if config not in MAY_SPILL:  # a shape that tune measures, without any transform
        if config.rows0 == 128:  # four rows a thread beside m64n128 are the most
            return 64 if EARLY else 192
        # at 256 ids the accumulator takes half, and may come from memory
        return 0 if config.bv == 128 else 32 if EARLY else 80
    if EARLY:
        return MAY_SPILL[config].get(variant, 40 if config is LARGE else 0)
    return MAY_SPILL_LATER[config].get(variant, 80 if config is LARGE else 32)


def check(pool: ProcessPoolExecutor, jobs: list[tuple[HopperConfig, Job]]) -> list[Code]:
    """Compile, print a table, and check what holds for every variant."""
    codes = list(pool.map(compile_job, [job for _, job in jobs]))
    print(*map(summary, codes), sep="\n")
    for (config, job), code in zip(jobs, codes, strict=True):
        line, variant = summary(code), code.label.rpartition(", ")[2]
        assert job.constants["BV"] == config.bv and job.constants["STAGES"] == config.stages
        assert code.registers == hopper_sample.MAX_REGISTERS, line  # else the split of setmaxnreg is ignored
        assert code.shared <= SHARED, line
        assert code.spills_in_loop <= MAY_SPILL_IN_LOOP, line
        assert code.early == 0, line
        assert code.spills <= spills_allowed(config, variant), line
        if EARLY and (config, variant) in INSTRUCTIONS:
            assert code.opcodes.total() <= SLACK * INSTRUCTIONS[config, variant], line
        assert code.shapes == {f"64x{config.bv}x16"}, line
        assert code.loads >= 1 + config.rows // config.box, line
    return codes


def test_every_sum_has_its_place(make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, whatever torch makes of a tensor without a dtype."""
    rows, whole = 256, hopper_workspace.workspace
    row_blocks = triton.cdiv(rows, LARGE.rows)
    asked: list[int] = []

    def workspace(num_rows: int, num_scratch: int, *others: Any) -> hopper_workspace.Workspace:
        asked.append(num_scratch)
        return whole(num_rows, num_scratch, *others)

    monkeypatch.setattr(hopper_sample, "workspace", workspace)
    monkeypatch.setattr(hopper_sample, "sm_count", lambda device: 3 * row_blocks)  # for four tiles
    monkeypatch.setitem(SIZES, LARGE, (rows, 2048))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        job = make_job(LARGE, "plain")
    finally:
        torch.set_default_dtype(before)
    last = (3 * row_blocks - 1) * 2 + 1  # `hopper_carry.places` counts two warpgroups a CTA
    # and `hopper_keep` 128 logits a row behind them
    assert asked == [(last + 1) * LARGE.rows0 * (LARGE.bv + 128)]
    assert job.signature["sums_ptr"] == job.signature["kept_ptr"] == "*fp32"
    # nine whole tiles a CTA
    assert not hopper_sample.parts_tiles(triton.cdiv(151936, 128), 66, 64, 256)


def test_a_call_without_state_of_its_own_fills_none(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured call would keep it for good."""
    made: list[int] = []
    whole = hopper_workspace.workspace

    def workspace(num_rows: int, num_scratch: int, *others: Any) -> hopper_workspace.Workspace:
        made.append(num_scratch)
        return whole(num_rows, num_scratch, *others)

    monkeypatch.setattr(hopper_sample, "workspace", workspace)
    for config, variant in ((UP_TO_64, "mass"), (UP_TO_128, "samples")):
        job = make_job(config, variant)
        assert job.constants["flags_ptr"] is None and job.constants["keys_ptr"] is None
    assert made == []
    make_job(LARGE, "mass")  # flags, since two blocks of rows share the compiled kernel, and `hopper_keep`'s
    assert len(made) == 1 and made[0] % (2 * LARGE.rows0 * 128) == 0


def test_the_sort_is_launched_right_before_the_kernel(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU would idle between the two while the host prepares the rest."""
    done: list[str] = []

    def noted(owner: object, name: str) -> None:
        inner = getattr(owner, name)

        def call(*values: object) -> object:
            done.append(name)
            return inner(*values)

        monkeypatch.setattr(owner, name, call)

    for name in ("row_arguments", "table_arguments", "sort_sparse"):
        noted(arguments, name)
    for name in ("workspace", "describe"):
        noted(hopper_sample, name)
    make_job(UP_TO_64, "sparse")
    assert sorted(done) == sorted(
        ["row_arguments", "table_arguments", "workspace", "describe", "describe", "sort_sparse"]
    )
    assert done[-1] == "sort_sparse"


def test_every_configuration_is_tested_here(make_job: Callable[..., Job]) -> None:
    assert set(SIZES) == set(hopper_configs.ALL)
    for config, (B, D) in SIZES.items():
        assert hopper_configs.pick(B, D, 1, "grouped") == config
        if B > 64:
            assert hopper_configs.pick(B, D, 2, "grouped") == UP_TO_128
            assert hopper_configs.pick(B, D, 1, "element") == UP_TO_128


def test_tables_are_handed_over_side_by_side(make_problem: MakeProblem) -> None:
    """The kernel takes no stride over ids: what is spread is copied, and nothing else."""
    row, mask = torch.arange(2.0 * V), torch.arange(3 * V).view(V, 3) % 5 == 0
    spread = make_problem(3, V, 64, head_bias=row[::2], logit_bias=row[1::2].expand(3, V), mask=mask.t())
    beside = hopper_sample.beside(spread)
    for name in ("head_bias", "logit_bias", "mask"):
        assert getattr(beside, name).stride(-1) == 1
        assert torch.equal(getattr(beside, name), getattr(spread, name))
    whole = make_problem(3, V, 64, head_bias=row[V:], logit_bias=row[:V].expand(3, V))
    assert hopper_sample.beside(whole) is whole


def test_rows_that_lie_over_one_another_are_not_read_by_tma() -> None:
    row = torch.zeros(1, 64, dtype=torch.bfloat16)
    assert hopper_sample.tma_fits(row) and hopper_sample.tma_fits(row.expand(8, -1).contiguous())
    assert not hopper_sample.tma_fits(row.expand(8, -1))


def test_small_batches(make_job: Callable[..., Job], pool: ProcessPoolExecutor) -> None:
    variants = ["plain", "rows", "bias", "sparse", "stored", "mass", "exact", "element", "element rows"]
    jobs = [(UP_TO_64, make_job(UP_TO_64, variant)) for variant in variants]
    jobs += [(UP_TO_64_NARROW, make_job(UP_TO_64_NARROW, "plain"))]
    codes = check(pool, jobs)
    plain, bias, stored = (codes[variants.index(name)] for name in ("plain", "bias", "stored"))
    # neighbouring ids at once: 16 pairs of two rows a thread, for the one block of a tile
    assert bias.pairs("LDG") - plain.pairs("LDG") == stored.pairs("STG") - plain.pairs("STG") == 32
    logits = UP_TO_64.rows * UP_TO_64.bv / 128  # a thread and tile
    print(f"{plain.per_tile} instructions a tile, {plain.per_tile / logits:.2f} a logit")
    assert 6 < plain.per_tile / logits <= (SLACK * 11.44 if EARLY else 12.5)


def test_large_batches(make_job: Callable[..., Job], pool: ProcessPoolExecutor) -> None:
    """The class with the most registers a thread: the accumulator takes 128 of 240."""
    variants = ["plain", "rows", "transforms", "bias", "sparse", "mask", "bits", "stored", "mass", "exact"]
    check(pool, [(LARGE, make_job(LARGE, variant)) for variant in variants])


def test_up_to_192_rows(make_job: Callable[..., Job], pool: ProcessPoolExecutor) -> None:
    """A warpgroup of 128 rows beside one of 64."""
    variants = ["plain", "rows", "mask", "bits", "stored", "mass"]
    check(pool, [(UP_TO_192, make_job(UP_TO_192, variant)) for variant in variants])


def test_up_to_128_rows(make_job: Callable[..., Job], pool: ProcessPoolExecutor) -> None:
    """Also several samples and noise an id, for any number of rows."""
    variants = [
        "plain", "rows", "transforms", "bias", "sparse", "mask", "bits", "stored", "mass", "exact",
        "samples", "samples mass", "element", "element rows",
    ]  # fmt: skip
    check(pool, [(UP_TO_128, make_job(UP_TO_128, variant)) for variant in variants])


def test_a_shard_that_leaves_keys_or_sends_them(
    make_job: Callable[..., Job], pool: ProcessPoolExecutor
) -> None:
    """What the last CTA of a row does takes nothing from the others: no register, no spill."""
    jobs = [(c, make_job(c, variant)) for c in (UP_TO_64, LARGE) for variant in ("keys", "linked 2")]
    jobs.append((UP_TO_64, make_job(UP_TO_64, "linked 8")))
    keys, linked, _, _, many = check(pool, jobs)
    # A word is two stores, and two loads in the first look and in the loop that waits.
    assert keys.system_stores == 0 and linked.system_stores == 4 and many.system_stores == 16
    for code in (linked, many):
        # no copies, in which inline assembly runs as well, and in triton 3.9 half of a maximum
        assert min(code.exchanged) >= 128, summary(code)
        # the scheduler moves a few
        assert abs(code.per_tile - keys.per_tile) <= keys.per_tile / 100, summary(code)


def test_shapes_that_tune_measures(
    make_job: Callable[..., Job], pool: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []
    for config in candidates.HOPPER:
        if config not in hopper_configs.ALL:
            rows = next(rows for rows in (64, 128, 192) if not candidates.why_not(config, rows, 256))
            monkeypatch.setattr(hopper_sample, "variant", lambda problem, config=config: config)
            monkeypatch.setitem(SIZES, config, (rows, 256))
            monkeypatch.setitem(NAMES, config, f"{config.bv} x {config.rows}, {config.stages} stages")
            jobs.append((config, make_job(config, "plain")))
    check(pool, jobs)


def test_fp16(make_job: Callable[..., Job], pool: ProcessPoolExecutor) -> None:
    jobs = [(config, make_job(config, "plain", torch.float16)) for config in (UP_TO_64, UP_TO_128)]
    check(pool, jobs)
