"""A straight-line PTX kernel, evaluated: what NVIDIA's compiler was handed, without a GPU.

The interpreter of Triton and a CPU round every product; LLVM may contract it with the sum it goes into. fp32
arithmetic is correctly rounded here, as the PTX manual has it for fma, mul, add and sub; ex2.approx and
lg2.approx are the exact value, rounded. Subnormal numbers are kept also where an instruction says .ftz.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]  # of a value a thread, or 0-d: the same in every thread
ARRAY_BITS = 40  # an address is the number of a parameter, shifted, and a byte offset
LINE = re.compile(r"(?:@%p\d+ )?([a-z]\w*(?:\.\w+)*)\s+(.*);")
Operation = Callable[..., Array]
f32 = np.float32


def fma(a: Array, b: Array, c: Array) -> Array:
    """a b + c, rounded once: the float64 product is exact, its sum is rounded to odd, then to fp32."""
    product, addend = np.float64(a) * np.float64(b), np.float64(c)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    outward = np.where((error > 0) == (total > 0), 1, -1)
    inexact = np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    return np.where(inexact, bits + outward, bits).view(np.float64).astype(f32)


def real(a: Array) -> Array:
    """What an .f32 instruction reads in a register that an integer one has written."""
    return a.astype(np.uint32).view(f32) if a.dtype.kind in "iu" else a


def bits(a: Array) -> Array:
    """What an integer instruction reads in a register that an .f32 one has written."""
    return a.view(np.uint32).astype(np.int64) if a.dtype == f32 else a


def select(a: Array, b: Array, predicate: Array) -> Array:
    return np.where(predicate, a, b)


OPERATIONS: dict[str, Operation] = {
    "add.f32": lambda a, b: a + b,
    "add.s64": lambda a, b: a + b,
    "and.b16": lambda a, b: a & b,
    "and.b32": lambda a, b: bits(a) & b,
    "cvt.rn.f32.u32": lambda a: a.astype(f32),
    "cvt.u32.u16": lambda a: a,
    "cvt.u32.u64": lambda a: a & 0xFFFFFFFF,
    "ex2.approx.f32": lambda a: np.exp2(np.float64(a)).astype(f32),
    "ex2.approx.ftz.f32": lambda a: np.exp2(np.float64(a)).astype(f32),
    "fma.rn.f32": lambda a, b, c: fma(real(a), real(b), real(c)),
    "lg2.approx.ftz.f32": lambda a: np.log2(np.float64(real(a))).astype(f32),
    "mad.wide.s32": lambda a, b, c: a * b + c,
    "max.f32": np.fmax,
    "min.f32": np.fmin,
    "min.u32": np.minimum,
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "mov.u64": lambda a: a,
    "mul.f32": lambda a, b: real(a) * real(b),
    "mul.wide.s32": lambda a, b: a * b,
    "neg.f32": lambda a: -a,
    "or.b16": lambda a, b: a | b,
    "or.b32": lambda a, b: a | b,
    "selp.b16": lambda a, b, predicate: select(a, b, predicate) & 0xFFFF,
    "selp.b32": select,
    "selp.f32": lambda a, b, predicate: select(real(a), real(b), predicate),
    "setp.eq.f32": lambda a, b: a == b,
    "setp.gt.f32": lambda a, b: a > b,
    "setp.le.f32": lambda a, b: a <= b,
    "setp.lt.f32": lambda a, b: a < b,
    "setp.lt.s32": lambda a, b: a < b,
    "setp.num.f32": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "shl.b16": lambda a, b: (a << b) & 0xFFFF,
    "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    "sub.f32": lambda a, b: a - b,
    "sub.s32": lambda a, b: (a - b) & 0xFFFFFFFF,
    "xor.b32": lambda a, b: (bits(a) ^ bits(b)) & 0xFFFFFFFF,
    "xor.pred": lambda a, b: a ^ b,
}


class Kernel:
    """A kernel of one dimension without branches or shared memory.

    Raises ValueError for an instruction that is not known, and for a product that ptxas could still contract
    with a sum and change its value: one that is not by a power of two, and goes into an add or a sub.
    """

    def __init__(self, ptx: str, block: int) -> None:
        self._block = block
        body = ptx[ptx.index("{", ptx.index(".entry")) :].partition("ret;")[0]
        self._steps = [
            (found[1], re.findall(r"-?[%\w]+(?:\.\w+)?", found[2]))
            for found in map(LINE.match, map(str.strip, body.splitlines()))
            if found is not None
        ]
        products: set[str] = set()
        for name, (target, *operands) in self._steps:
            if name not in OPERATIONS and not name.startswith(("ld.", "st.global")):
                raise ValueError(f"an instruction must be one of OPERATIONS, got {name!r}; add it there")
            handed_on = name in ("neg.f32", "selp.f32", "mov.b32") and products.intersection(operands)
            if handed_on or (name == "mul.f32" and not any(map(is_power_of_two, operands))):
                products.add(target)
            if name in ("add.f32", "sub.f32") and products.intersection(operands):
                raise ValueError(f"a product must be by a power of two or an fma, got {name} {operands}")

    def run(self, threads: int, arguments: list[Array | int | f32]) -> Array:
        """What the kernel stores to its last array, by thread: int [threads], of fp32 the bits. Arguments
        that are arrays are read at their addresses."""
        i = np.arange(threads)
        known: dict[str, Array] = {"%tid.x": i % self._block, "%ctaid.x": i // self._block}
        stored = np.zeros(threads, np.int64)

        def value(operand: str) -> Array:
            if operand.startswith("%"):
                return known[operand]
            if operand.startswith("0f"):
                return np.array(int(operand[2:], 16), np.uint32).view(f32)
            return np.asarray(int(operand, 0))

        for name, (target, *operands) in self._steps:
            if name.startswith("ld.param"):
                number = int(operands[0].rpartition("_")[2])
                given = arguments[number] if number < len(arguments) else 0
                known[target] = np.asarray(number << ARRAY_BITS if isinstance(given, np.ndarray) else given)
            elif name.startswith("ld.global"):
                address = known[operands[0]] + int(operands[1])
                array = arguments[int(address.flat[0]) >> ARRAY_BITS]
                assert isinstance(array, np.ndarray)
                known[target] = array[(address & ((1 << ARRAY_BITS) - 1)) // array.itemsize]
            elif name.startswith("st.global"):
                stored[:] = bits(known[operands[1]])
            else:
                known[target] = np.asarray(OPERATIONS[name](*map(value, operands)))
        return stored


def is_power_of_two(operand: str) -> bool:
    return operand.startswith("0f") and int(operand[2:], 16) & 0x7FFFFF == 0
