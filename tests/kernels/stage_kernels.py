"""Small kernels that call the device functions on given words, as the samplers' kernels call them."""

# No `from __future__ import annotations`: Triton reads the constexpr annotations.
import torch
import triton
import triton.language as tl
from torch import Tensor

from fsample_kernels.ops import device, epilogue, pick_rank
from tests.kernels.bisection import split

BLOCK = 1024


@triton.jit
def member_kernel(x_ptr, high_ptr, low_ptr, out_ptr, count, scale, FAST: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    mask = i < count
    x = (tl.load(x_ptr + i * 0),)  # type: tuple[tl.tensor, ...]
    for j in tl.static_range(1, 32):
        x = x + (tl.load(x_ptr + i * 0 + j),)
    _, total, sums = device.group_mass(x, tl.full((N,), 0.0, tl.float32) + scale, FAST)
    r0 = tl.load(high_ptr + i, mask=mask, other=0).to(tl.uint32)
    r1 = tl.load(low_ptr + i, mask=mask, other=0).to(tl.uint32)
    member, _ = device.draw_member(sums, total, r0, r1)
    tl.store(out_ptr + i, member, mask=mask)


@triton.jit
def exponential_kernel(high_ptr, low_ptr, out_ptr, count, FAST: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    mask = i < count
    high = tl.load(high_ptr + i, mask=mask, other=0).to(tl.uint32)
    low = tl.load(low_ptr + i, mask=mask, other=0).to(tl.uint32)
    tl.store(out_ptr + i, device.log2_exponential(device.uniform64(high, low), FAST), mask=mask)


@triton.jit
def race_kernel(
    mass, high_ptr, low_ptr, out_ptr, count, SIDE: tl.constexpr, FAST: tl.constexpr, N: tl.constexpr
):
    """Scores of a "rank" of log-mass `mass`, of a "group" of mass 2^mass * 1.75, of an id by "element" whose
    logit is `mass`, from the upper half of its word: these two lines of `element_draw` and `draw_elements`
    are no function of theirs.
    """
    i = tl.program_id(0) * N + tl.arange(0, N)
    mask = i < count
    high = tl.load(high_ptr + i, mask=mask, other=0).to(tl.uint32)
    low = tl.load(low_ptr + i, mask=mask, other=0).to(tl.uint32)
    value = tl.full((N,), 0.0, tl.float32) + mass
    if SIDE == "rank":
        score = pick_rank.rank_score(value, high, low)
    elif SIDE == "element":
        score = value * device.LOG2_E - device.log2_exponential(device.uniform32(high), FAST)
        score = tl.where(score < float("inf"), score, float("inf"))
    else:
        score = device.group_score(value, tl.full((N,), 1.75, tl.float32), high, low, FAST)
    tl.store(out_ptr + i, score, mask=mask)


@triton.jit
def words_kernel(first, u_ptr, log2_ptr, FAST: tl.constexpr, N: tl.constexpr):
    """uniform32 and log2_exponential of the words first, first + 1, ..."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    u = device.uniform32((first + i.to(tl.int64)).to(tl.uint32))
    tl.store(u_ptr + i, u)
    tl.store(log2_ptr + i, device.log2_exponential(u, FAST))


@triton.jit
def function_kernel(x_ptr, out_ptr, softcap, NAME: tl.constexpr, FAST: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + i)
    if NAME == "exp2":
        y = device.exp2(x, FAST)
    elif NAME == "log2":
        y = device.log2(x, FAST)
    else:
        y = epilogue.soft_cap(x, softcap, FAST)
    tl.store(out_ptr + i, y)


def members(x: Tensor, words: list[int], fast: bool, scale: float = 1.0) -> list[int]:
    """Member of the group x [32] (log2 masses / scale, fp32) that each 64-bit word draws."""
    high, low = split(words, str(x.device))
    out = torch.full((len(words),), -1, dtype=torch.int32, device=x.device)
    member_kernel[(triton.cdiv(len(words), BLOCK),)](x, high, low, out, len(words), scale, fast, BLOCK)
    return out.tolist()


def log2_exponentials(words: list[int], fast: bool, where: str) -> list[float]:
    """log2 E of each 64-bit word."""
    high, low = split(words, where)
    out = torch.full((len(words),), torch.nan, device=where)
    exponential_kernel[(triton.cdiv(len(words), BLOCK),)](high, low, out, len(words), fast, BLOCK)
    return out.tolist()


def race_scores(mass: float, high: Tensor, low: Tensor, side: str, fast: bool) -> Tensor:
    """Scores [n] fp32 of the words' halves (int64 [n]), as of `race_kernel`; mass: fp32."""
    out = torch.full((len(high),), torch.nan, device=high.device)
    race_kernel[(triton.cdiv(len(high), BLOCK),)](mass, high, low, out, len(high), side, fast, BLOCK)
    return out


def stages32(first: int, count: int, fast: bool, where: str) -> tuple[Tensor, Tensor]:
    """(u, log2 E), fp32 [count], of the 32-bit words first, first + 1, ...; count a multiple of 1024."""
    u, log2 = torch.full((2, count), torch.nan, device=where).unbind()
    words_kernel[(count // BLOCK,)](first, u, log2, fast, BLOCK)
    return u, log2


def function(name: str, x: Tensor, fast: bool, softcap: float = 1.0) -> Tensor:
    """exp2, log2 or soft_cap of x [n] fp32; n a multiple of 1024."""
    out = torch.full_like(x, torch.nan)
    function_kernel[(x.numel() // BLOCK,)](x, out, softcap, name, fast, BLOCK)
    return out
