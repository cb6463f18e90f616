"""Every shipped configuration compiles without a GPU; on NVIDIA nothing that is compiled here spills.

`triton.compile` takes a target, so no driver is needed, and cuobjdump comes in the triton wheel. The types
of the arguments are read off the launcher's own, so that what is compiled is what is launched.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fsample_kernels.ops import (
    arguments,
    configs,
    lm_head_sample,
    logits_sample,
    pick_rank,
    reduce_candidates,
    sort_sparse,
)
from fsample_kernels.ops.compiling import FUSE
from fsample_kernels.types import Problem

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

MakeProblem = Callable[..., Problem]
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Job:
    """One kernel to compile: arguments as launched, options, target."""

    label: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, object]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int
    architecture: str


@dataclass(frozen=True)
class Usage:
    """What ptxas gave a kernel; zeros where only assembly was made."""

    label: str
    registers: int
    spilled_bytes: int
    shared: int


KERNELS = {
    "lm_head": lm_head_sample.lm_head_sample_kernel,
    "logits": logits_sample.logits_sample_kernel,
    "reduce": reduce_candidates.reduce_candidates_kernel,
    "sort": sort_sparse.sort_sparse_kernel,
    "rank": pick_rank.pick_rank_kernel,
}


def job(
    label: str, kernel: str, values: dict[str, object], num_warps: int, num_stages: int, architecture: str
) -> Job:
    """Type every argument as a launch would: None and flags are constants, a stride of 1 is one as well."""
    signature: dict[str, str] = {}
    constants: dict[str, object] = {}
    aligned: list[str] = []
    for name in KERNELS[kernel].arg_names:
        value = values[name]
        specialized = name not in arguments.UNSPECIALIZED
        if value is None or name.isupper() or (specialized and isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants[name] = value
        elif isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            if name not in arguments.ANY_ALIGNMENT:
                aligned.append(name)
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if specialized and isinstance(value, int) and value % 16 == 0:
                aligned.append(name)
    if "FAST" in constants:
        constants["FAST"] = not architecture.startswith("gfx")
    return Job(label, kernel, signature, constants, tuple(aligned), num_warps, num_stages, architecture)


def source_of(work: Job) -> tuple[ASTSource, dict[str, int]]:
    kernel = KERNELS[work.kernel]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in work.aligned}
    source = ASTSource(fn=kernel, signature=work.signature, constexprs=work.constants, attrs=attributes)
    options = {"num_warps": work.num_warps, "num_stages": work.num_stages, "enable_fp_fusion": FUSE}
    return source, options


def compile_job(work: Job) -> Usage:
    target = TARGETS[work.architecture]
    source, options = source_of(work)
    if target.backend == "hip":
        return Usage(work.label, 0, 0, assemble(source, target, options))
    compiled = triton.compile(source, target=target, options=options)
    cubin = Path(os.environ["TRITON_CACHE_DIR"]) / f"{os.getpid()}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [str(BIN / "cuobjdump"), "-res-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Usage(work.label, int(found[1]), int(found[2]), compiled.metadata.shared)


def assemble(source: ASTSource, target: GPUTarget, options: dict[str, int]) -> int:
    """Compile down to AMD assembly. The last step needs ROCm's linker, which the wheel does not carry."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Callable[..., object]] = {}
    backend.add_stages(stages, parsed, source.language)
    metadata: dict[str, object] = {"target": target, **parsed.__dict__}
    module: object = source.make_ir(
        target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
    )
    for name, stage in stages.items():
        if name == "hsaco":
            break
        module = stage(module, metadata)
    assert isinstance(module, str) and ".amdgcn_target" in module
    shared = metadata["shared"]
    assert isinstance(shared, int)
    return shared


def fields(V: int, B: int, variant: str) -> dict[str, object]:
    """The variants of a call that change the compiled code most."""
    rows: dict[str, object] = {
        "temperature": torch.ones(B), "seed": torch.zeros(B, dtype=torch.int64),
        "position": torch.zeros((), dtype=torch.int64),
    }  # fmt: skip
    constrained: dict[str, object] = {
        "bitmask": torch.zeros(B, -(-V // 32), dtype=torch.int32), "softcap": 30.0, "logit_scale": 0.5,
        "sparse_bias": (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.zeros(1)),
    }  # fmt: skip
    variants: dict[str, dict[str, object]] = {
        "plain": {},
        "rows": rows,
        "logprob": rows | {"want_logprob": True, "want_lse": True},
        "constrained": rows | constrained | {"want_logprob": True},
        "bias": rows | {"logit_bias": torch.zeros(B, V), "head_bias": torch.zeros(V)},
        "masked": rows | {"mask": torch.zeros(B, V, dtype=torch.bool)},
        "stored": {"store_logits": True},
        "samples": {"num_samples": 4},
    }
    return variants[variant]


def head_jobs(
    make: MakeProblem,
    architecture: str,
    dtype: torch.dtype,
    variants: list[str],
    classes: tuple[int, ...] = (16, 32, 64, 128),
) -> list[Job]:
    V, D, jobs = 1024, 512, []
    for largest, config in configs.table(dtype, architecture).items():
        if largest not in classes:
            continue
        for noise in ("grouped", "element"):
            for variant in variants:
                problem = make(largest, V, D, dtype, noise=noise, **fields(V, largest, variant))
                launch = arguments.prepare(problem, config.block_v)
                values = lm_head_sample.kernel_arguments(problem, config, launch)
                label = f"lm_head {architecture} {TYPES[dtype]} B<={largest} {noise} {variant}"
                jobs.append(job(label, "lm_head", values, config.num_warps, config.num_stages, architecture))
    return jobs


def other_jobs(make: MakeProblem, architecture: str, variants: list[str]) -> list[Job]:
    V, jobs = 8192, []
    for B in (8, 9):
        block_v, num_warps = configs.pick_streaming(B)
        for noise in ("grouped", "element"):
            for variant in variants:
                base = make(B, V, 1, noise=noise, **fields(V, B, variant))
                problem = replace(base, hidden=None, weight=None, logits=torch.zeros(B, V))
                launch = arguments.prepare(problem, block_v)
                values = logits_sample.kernel_arguments(problem, block_v, launch)
                label = f"logits {architecture} B={B} {noise} {variant}"
                jobs.append(job(label, "logits", values, num_warps, 3, architecture))
    for variant in variants:
        problem = make(8, V, 1, **fields(V, 8, variant))
        launch = arguments.prepare(problem, 128)
        ids = torch.zeros(8, 1, dtype=torch.int64)
        result = (ids, torch.zeros(8, 1), torch.zeros(8), ids)  # the last: keys
        values = reduce_candidates.kernel_arguments(launch, *result)
        jobs.append(job(f"reduce {architecture} {variant}", "reduce", values, 4, 3, architecture))
    nine = torch.zeros(9, dtype=torch.int64)
    triples = (nine, nine, torch.zeros(9))
    sizes = (128, sort_sparse.BLOCK, sort_sparse.WIDE, sort_sparse.CHUNK)
    given = (*triples, *triples, nine.int(), torch.zeros(9, dtype=torch.bool), 9, 9, 9, 0, V, *sizes)
    named: dict[str, object] = dict(zip(sort_sparse.sort_sparse_kernel.arg_names, given, strict=True))
    jobs.append(job(f"sort {architecture}", "sort", named, 4, 3, architecture))
    lse, bad = torch.zeros(2, 9), torch.zeros(9, dtype=torch.bool)
    given_ranks = (lse, nine, 9, 3, nine, 1, 0, 0, nine, 1, 0, 0, bad, 1, 2, 128)
    named = dict(zip(pick_rank.pick_rank_kernel.arg_names, given_ranks, strict=True))
    jobs.append(job(f"rank {architecture}", "rank", named, 4, 3, architecture))
    return jobs


@pytest.fixture(autouse=True)
def sort_without_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a launch's arguments sorts sparse biases, with a kernel."""
    monkeypatch.setattr(arguments, "sort_sparse", sort_sparse.sort_many)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("fork")) as executor:
        yield executor
    del os.environ["TRITON_CACHE_DIR"]


# Shared memory of one block, bytes: 163 KiB on sm_80, 99 KiB on sm_89, 227 KiB on sm_90 and sm_100, 64 KiB on
# gfx942, 160 KiB on gfx950.
SHARED = {
    "sm_80": 166912, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "gfx950": 163840,
}  # fmt: skip


def spills_allowed(label: str) -> int:
    """A newer Triton also holds more of the addresses of a dense bias or mask; 3.9 spills in plain calls."""
    if triton.__version__.startswith("3.6."):
        return 0
    if "plain" in label:
        return 16 if "element" in label else 8 if label == "lm_head sm_80 bf16 B<=64 grouped plain" else 0
    return 640 if "element" in label else 384


def too_large(pool: ProcessPoolExecutor, jobs: list[Job]) -> list[str]:
    """Lines of a table: the kernels that spill or ask for more shared memory than a block can have."""
    return [
        f"{usage.label:<56} registers {usage.registers}  spilled {usage.spilled_bytes}  shared {usage.shared}"
        for work, usage in zip(jobs, pool.map(compile_job, jobs), strict=True)
        if usage.spilled_bytes > spills_allowed(work.label) or usage.shared > SHARED[work.architecture]
    ]


def test_hopper(make_problem: MakeProblem, pool: ProcessPoolExecutor) -> None:
    jobs = head_jobs(make_problem, "sm_90", torch.bfloat16, ["plain", "constrained"])
    assert too_large(pool, jobs) == []


def test_hopper_every_variant(make_problem: MakeProblem, pool: ProcessPoolExecutor) -> None:
    """Of the class with the most registers a thread: 64 rows to a warpgroup."""
    variants = ["rows", "logprob", "bias", "masked", "stored", "samples"]
    jobs = head_jobs(make_problem, "sm_90", torch.bfloat16, variants, classes=(64,))
    assert too_large(pool, jobs) == []


def test_hopper_other_kernels_and_dtypes(make_problem: MakeProblem, pool: ProcessPoolExecutor) -> None:
    jobs = other_jobs(make_problem, "sm_90", ["constrained"])
    jobs += head_jobs(make_problem, "sm_90", torch.float16, ["plain"], classes=(64,))
    jobs += head_jobs(make_problem, "sm_90", torch.float32, ["plain"])
    assert too_large(pool, jobs) == []


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_100"])
def test_other_nvidia_gpus(make_problem: MakeProblem, pool: ProcessPoolExecutor, architecture: str) -> None:
    jobs = head_jobs(make_problem, architecture, torch.bfloat16, ["plain", "rows", "logprob", "stored"])
    assert too_large(pool, jobs + other_jobs(make_problem, architecture, ["rows"])[1:]) == []


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_amd_gpus(make_problem: MakeProblem, pool: ProcessPoolExecutor, architecture: str) -> None:
    jobs = head_jobs(make_problem, architecture, torch.bfloat16, ["rows"], classes=(16, 128))
    assert too_large(pool, jobs + other_jobs(make_problem, architecture, ["rows"])[1:]) == []


def test_a_product_of_two_words_is_one_instruction(
    make_problem: MakeProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two Philox calls a thread in the 64 x 128 tile, ten rounds of two products each; a few of them, such as
    those whose low word nobody reads, need less than a wide product. Triton 3.7 takes two for a few more."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    work = head_jobs(make_problem, "sm_90", torch.bfloat16, ["plain"], classes=(64,))[0]
    source, options = source_of(work)
    ptx = triton.compile(source, target=TARGETS["sm_90"], options=options).asm["ptx"]
    assert 24 <= ptx.count("mul.wide.u32") <= 60
    assert ptx.count("mul.hi.u32") <= (12 if triton.__version__.startswith("3.7.") else 4)


def test_a_step_along_a_strided_hidden_size_has_64_bits(
    make_problem: MakeProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transposed view of a buffer with 2^25 columns steps over 2^31 values in 64 of its rows."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    work = head_jobs(make_problem, "sm_90", torch.bfloat16, ["plain"], classes=(64,))[0]
    strides = ("hidden_stride_d", "weight_stride_d")
    work = dataclasses.replace(
        work,
        signature=work.signature | dict.fromkeys(strides, "i32"),
        constants={name: value for name, value in work.constants.items() if name not in strides},
    )
    source, options = source_of(work)
    ttir = triton.compile(source, target=TARGETS["sm_90"], options=options).asm["ttir"]
    for name in strides:
        assert re.search(rf"arith.extsi %{name} ", ttir)
        assert not re.search(rf"arith.muli .*%{name}\b.* : i32", ttir)


def test_a_slice_of_a_row_parameter_is_no_other_kernel() -> None:
    """It may start at an odd address, in the middle of serving or in a capture."""
    for kernel in KERNELS.values():
        aligned = {p.name for p in kernel.params if not p.do_not_specialize_on_alignment}
        assert not aligned & {"temperature_ptr", "seed_ptr", "position_ptr", "greedy_ptr"}, kernel
