"""The Hopper kernel compiles without a GPU as it is launched, and its machine code is as it was tuned to be.

The launcher runs on CPU tensors with the launch itself replaced, so the types, flags and options are its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fsample_kernels.ops import (
    arguments,
    candidates,
    hopper_configs,
    hopper_kernel,
    hopper_pipeline,
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

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

MakeProblem = Callable[..., Problem]
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
SHARED = 227 * 1024  # bytes a block can have on sm_90
V = 1024
# rows and hidden size for which `hopper_configs.pick` takes a configuration, see test_every_configuration
SIZES = {
    UP_TO_64: (16, 256),
    UP_TO_64_NARROW: (64, 192),
    UP_TO_128: (128, 256),
    UP_TO_192: (192, 256),
    LARGE: (256, 256),
}
NAMES = {
    UP_TO_64: "<=64",
    UP_TO_64_NARROW: "<=64 narrow",
    UP_TO_128: "<=128",
    UP_TO_192: "<=192",
    LARGE: "large",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One launch: types of the arguments, constants, options."""

    label: str
    signature: dict[str, str]
    constants: dict[str, object]
    aligned: tuple[int, ...]
    num_warps: int
    maxnreg: int


@dataclasses.dataclass(frozen=True)
class Code:
    """What ptxas made of it. `spills` counts loads and stores of local memory, `spills_in_loop` those in the
    loop over D; `per_tile` is `shortest_tile`."""

    label: str
    registers: int
    spills: int
    spills_in_loop: int
    shared: int
    opcodes: Counter[str]
    per_tile: int
    exchanged: frozenset[int]  # `exchanged_together`
    early: int  # `early_arrivals`

    @property
    def shapes(self) -> set[str]:
        return {name.split(".")[1] for name in self.opcodes if name.startswith("HGMMA")}

    def pairs(self, kind: str) -> int:
        """Loads (LDG) or stores (STG) of 8 bytes."""
        return sum(n for name, n in self.opcodes.items() if name.startswith(f"{kind}.E.64"))

    @property
    def system_stores(self) -> int:
        """Stores that other devices see at once."""
        return sum(n for name, n in self.opcodes.items() if name.startswith("STG") and "STRONG.SYS" in name)

    @property
    def loads(self) -> int:
        return sum(n for name, n in self.opcodes.items() if name.startswith("UTMALDG"))


def summary(code: Code) -> str:
    return (
        f"{code.label:<28} registers {code.registers}  spills {code.spills}  shared {code.shared}  "
        f"instructions {code.opcodes.total()}  HGMMA {sorted(code.shapes)}  UTMALDG {code.loads}"
    )


class Launched(Exception):
    """Ends the launcher where the kernel would start."""


class Launch:
    """Stands for the kernel: keeps the arguments of a launch, and makes a job of them."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(**values: object) -> None:
            self.values = values
            raise Launched

        return launch

    def job(self, label: str) -> Job:
        signature: dict[str, str] = {}
        constants: dict[str, object] = {}
        aligned: list[int] = []
        values = dict(self.values)
        for index, parameter in enumerate(hopper_kernel.hopper_kernel.params):
            name, value = parameter.name, values.pop(parameter.name)
            if value is None or name.isupper():
                signature[name] = "constexpr"
                constants[name] = value
            elif isinstance(value, TensorDescriptor):
                block = ", ".join(map(str, value.block_shape))
                signature[name] = f"tensordesc<{TYPES[value.base.dtype]}[{block}],{value.layout!r}>"
            elif isinstance(value, Tensor):
                signature[name] = "*" + TYPES[value.dtype]
                if name not in hopper_kernel.ANY_ALIGNMENT:
                    aligned.append(index)
            else:
                # a number that is not annotated would make a variant for 1
                assert parameter.annotation_type
                signature[name] = parameter.annotation_type
                if isinstance(value, int) and not parameter.do_not_specialize and value % 16 == 0:
                    aligned.append(index)
        num_warps, maxnreg = values.pop("num_warps"), values.pop("maxnreg")
        assert values.pop("enable_fp_fusion") is True
        assert values == {} and isinstance(num_warps, int) and isinstance(maxnreg, int)
        return Job(label, signature, constants, tuple(aligned), num_warps, maxnreg)


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


def fields(B: int) -> dict[str, dict[str, object]]:
    """The variants of a call that change the compiled code."""
    zeros = torch.zeros(3, dtype=torch.int64)
    rows: dict[str, object] = {
        "temperature": torch.ones(B), "seed": torch.zeros(B, dtype=torch.int64),
        "position": torch.zeros(B, dtype=torch.int64),
    }  # fmt: skip
    mass: dict[str, object] = {"want_logprob": True, "want_lse": True}
    return {
        "plain": {},
        "keys": {},
        "linked 2": {},
        "linked 8": {},
        "rows": rows,
        "transforms": {"head_bias": torch.zeros(V).bfloat16(), "logit_scale": 0.5, "softcap": 30.0},
        "bias": {"logit_bias": torch.zeros(B, V)},
        "sparse": {"sparse_bias": (zeros, zeros, torch.zeros(3))},
        "mask": {"mask": torch.zeros(B, V, dtype=torch.bool)},
        "bits": {"bitmask": torch.zeros(B, V // 32, dtype=torch.int32)},
        "stored": {"store_logits": True},
        "mass": mass,
        "exact": {"math": "exact"},
        "samples": {"num_samples": 2},
        "samples mass": rows | mass | {"num_samples": 2},
        "element": {"noise": "element"},
        "element rows": rows | {"noise": "element"},
    }


def compile_job(work: Job) -> Code:
    source = GluonASTSource(
        fn=hopper_kernel.hopper_kernel, signature=work.signature, constexprs=work.constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in work.aligned},
    )  # fmt: skip
    options = {"num_warps": work.num_warps, "maxnreg": work.maxnreg}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    cubin = Path(os.environ["TRITON_CACHE_DIR"]) / f"{os.getpid()}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])

    def tool(name: str, flag: str) -> str:
        command = [str(BIN / name), flag, str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    registers = re.search(r"REG:(\d+)", tool("cuobjdump", "-res-usage"))
    assert registers is not None
    steps = read_sass(tool("nvdisasm", "-c"))
    opcodes = Counter(step.opcode for step in steps)
    local = [n for n, step in enumerate(steps) if step.opcode.startswith(("LDL", "STL"))]
    loop = loop_over_d(steps)
    assert loop
    return Code(
        work.label, int(registers[1]), len(local), len(loop.intersection(local)), compiled.metadata.shared,
        opcodes, shortest_tile(steps), exchanged_together(compiled.asm["ttgir"]),
        early_arrivals(compiled.asm["ptx"]),
    )  # fmt: skip


def exchanged_together(ttgir: str) -> frozenset[int]:
    """How many words the instructions that other devices see are asked for at a time."""
    lines = [line for line in ttgir.splitlines() if "relaxed.sys" in line]
    return frozenset(int(words) for line in lines for words in re.findall(r"tensor<(\d+)xi", line))


def early_arrivals(ptx: str) -> int:
    """Stages handed back by one thread before the other warps of its warpgroup are known to have waited for
    them: a warp still in the draw of the tile before could miss two turns of the ring, and wait for ever."""
    before = [part.rpartition("mbarrier.try_wait")[2] for part in ptx.split("mbarrier.arrive.shared")[:-1]]
    assert before
    return sum(re.search(r"\bbar(rier)?\.sync", part) is None for part in before)


@dataclasses.dataclass(frozen=True)
class Step:
    """One instruction and the numbers of those that can come next."""

    opcode: str
    following: tuple[int, ...]


def read_sass(text: str) -> list[Step]:
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(lines)
        elif code := re.match(r"\s*/\*[0-9a-f]{4,6}\*/\s+(.*?)\s*;", line):
            lines.append(code[1])
    steps = []
    for number, line in enumerate(lines):
        parts = re.match(r"(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)(.*)", line)
        assert parts is not None, line
        predicate, opcode, operands = parts.groups()
        following = [number + 1]
        target = re.search(r"`\((\.L_\w+)\)", operands)
        if opcode.startswith("BRA") and target:
            if predicate is None and re.fullmatch(r"\s*`\(\.L_\w+\)", operands):
                following = []
            following.append(labels[target[1]])
        elif predicate is None and opcode in ("EXIT", "RET", "BRX"):
            following = []
        steps.append(Step(opcode, tuple(following)))
    return steps


def reach(following: Sequence[Sequence[int]], start: int, limit: int = 10**6) -> dict[int, int]:
    """Fewest instructions to each that can come after, where that is no more than the limit."""
    found: dict[int, int] = {}
    frontier, length = {start}, 0
    while frontier and length < limit:
        length += 1
        frontier = {n for s in frontier for n in following[s] if n < len(following) and n not in found}
        found.update(dict.fromkeys(frontier, length))
    return found


def loop_over_d(steps: list[Step]) -> set[int]:
    """Instructions on a way from an HGMMA to itself that is too short to go by a draw."""
    after = [step.following for step in steps]
    before: list[list[int]] = [[] for _ in steps]
    for number, following in enumerate(after):
        for n in following:
            if n < len(steps):
                before[n].append(number)
    inside: set[int] = set()
    for number, step in enumerate(steps):
        if step.opcode.startswith("HGMMA"):
            forward, backward = reach(after, number, 300), reach(before, number, 300)
            inside |= {n for n, length in forward.items() if length + backward.get(n, 300) < 300}
    return inside


def shortest_tile(steps: list[Step]) -> int:
    """Instructions of one warp from the last HGMMA of a tile, by the masses of its groups, to the first of
    the next: what a tile costs beside its matmul when no row is greedy and no id is past the end. The way by
    the masses is the one by the middle of their exp2. 0 where no way leads back: two warpgroups."""
    after = [step.following for step in steps]
    products = [n for n, step in enumerate(steps) if step.opcode.startswith("HGMMA")]
    exponentials = [n for n, step in enumerate(steps) if step.opcode == "MUFU.EX2" and n > products[-1]]
    if not exponentials:
        return 0
    middle = exponentials[len(exponentials) // 2]
    there, back = reach(after, products[-1]).get(middle), reach(after, middle).get(products[0])
    return there + back if there and back else 0


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("fork")) as executor:
        yield executor
    del os.environ["TRITON_CACHE_DIR"]
    if before is not None:
        os.environ["TRITON_CACHE_DIR"] = before


# Loads and stores of local memory that a variant may hold where half of a thread's registers or more are the
# accumulator: what is loaded from a mask or a bias has to wait somewhere, and a mass is kept for four rows.
# None is in the loop over D, and what the tables read costs more. triton 3.9 also keeps some of the kernel's
# numbers in local memory, and reads them once a tile.
MAY_SPILL = {
    LARGE: {},
    UP_TO_192: {"rows": 32, "mask": 32, "bits": 32, "mass": 160, "stored": 32},
    UP_TO_128: {"element rows": 16},
}
MAY_SPILL_LATER = {
    LARGE: {"transforms": 96, "bias": 192, "mask": 512},
    UP_TO_192: {"plain": 128, "mask": 256, "bits": 128, "mass": 256, "stored": 128},
    UP_TO_128: {},
}


def spills_allowed(config: HopperConfig, variant: str) -> int:
    early = triton.__version__.startswith("3.6.")
    if config not in MAY_SPILL:  # a shape that tune measures, without any transform
        if config.rows0 == 128:  # four rows a thread beside m64n128 are the most
            return 64 if early else 192
        return 0 if config.bv == 128 else 32  # the accumulator takes half, and may come from memory
    if early:
        return MAY_SPILL[config].get(variant, 40 if config is LARGE else 0)
    return MAY_SPILL_LATER[config].get(variant, 32)


def check(pool: ProcessPoolExecutor, jobs: list[tuple[HopperConfig, Job]]) -> list[Code]:
    """Compile, print a table, and check what holds for every variant."""
    codes = list(pool.map(compile_job, [job for _, job in jobs]))
    print(*map(summary, codes), sep="\n")
    for (config, job), code in zip(jobs, codes, strict=True):
        line = summary(code)
        assert job.constants["BV"] == config.bv and job.constants["STAGES"] == config.stages
        assert code.registers == hopper_sample.MAX_REGISTERS, line  # else the split of setmaxnreg is ignored
        assert code.shared <= SHARED, line
        assert code.spills_in_loop == 0, line
        assert code.early == 0, line
        assert code.spills <= spills_allowed(config, code.label.rpartition(", ")[2]), line
        assert code.shapes == {f"64x{config.bv}x16"}, line
        assert code.loads >= 1 + config.rows // config.box, line
    return codes


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


@pytest.mark.parametrize("rows1", [0, 64])
def test_every_sum_has_its_place(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, rows1: int
) -> None:
    """In fp32, whatever torch makes of a tensor without a dtype: `hopper_carry.places` counts two warpgroups
    a CTA, and a table may choose one."""
    config = dataclasses.replace(LARGE, rows1=rows1)
    rows, whole = 256, hopper_workspace.workspace
    row_blocks = triton.cdiv(rows, config.rows)
    assert not candidates.why_not(config, rows, 2048)
    asked: list[int] = []

    def workspace(num_rows: int, num_sums: int, *others: Any) -> hopper_workspace.Workspace:
        asked.append(num_sums)
        return whole(num_rows, num_sums, *others)

    monkeypatch.setattr(hopper_sample, "workspace", workspace)
    monkeypatch.setattr(hopper_sample, "variant", lambda problem: config)
    monkeypatch.setattr(hopper_sample, "sm_count", lambda device: 3 * row_blocks)  # for four tiles
    monkeypatch.setitem(SIZES, config, (rows, 2048))
    monkeypatch.setitem(NAMES, config, "parted")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        job = make_job(config, "plain")
    finally:
        torch.set_default_dtype(before)
    last = (3 * row_blocks - 1) * 2 + (rows1 > 0)
    assert len(asked) == 1 and asked[0] >= (last + 1) * config.rows0 * config.bv
    assert job.signature["sums_ptr"] == "*fp32"
    # nine whole tiles a CTA: nothing but the ids is allocated
    assert not hopper_sample.parts_tiles(triton.cdiv(151936, 128), 66, 64, 256)


def test_a_call_without_state_of_its_own_fills_none(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured call would keep it for good."""
    made: list[int] = []
    whole = hopper_workspace.workspace

    def workspace(num_rows: int, num_sums: int, *others: Any) -> hopper_workspace.Workspace:
        made.append(num_sums)
        return whole(num_rows, num_sums, *others)

    monkeypatch.setattr(hopper_sample, "workspace", workspace)
    for config, variant in ((UP_TO_64, "mass"), (UP_TO_128, "samples")):
        job = make_job(config, variant)
        assert job.constants["flags_ptr"] is None and job.constants["keys_ptr"] is None
    assert made == []
    make_job(LARGE, "mass")
    assert made == [0]  # flags, since two blocks of rows share the compiled kernel


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
    assert 6 < plain.per_tile / logits <= 12.5


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
