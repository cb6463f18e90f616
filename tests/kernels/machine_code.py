"""The Hopper kernel compiled without a GPU, and what its machine code says of it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from fsample_kernels.ops import hopper_kernel
from fsample_kernels.ops.compiling import FUSE

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


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


def compile_job(work: Job) -> Code:
    source = GluonASTSource(
        fn=hopper_kernel.hopper_kernel, signature=work.signature, constexprs=work.constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in work.aligned},
    )  # fmt: skip
    options = {"num_warps": work.num_warps, "maxnreg": work.maxnreg, "enable_fp_fusion": FUSE}
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
