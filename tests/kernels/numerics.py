"""How far the functions of a draw are from float64, in ulps, and how far log2 E of a 32-bit word may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

CUT = 1.0 - 2.0**-24
SERIES = 2.0**-6  # below it E is a series
# PTX: lg2.approx is right to 2^-22 absolute between 1/2 and 2 and to 2^-22 relative elsewhere. log2 of
# libdevice, of torch and of numpy is right to an ulp.
LOG2_ERROR = {True: 2.0**-22, False: 2.0**-24}


class Errors(NamedTuple):
    """Largest error by stretch of u, in ulps of max(|log2 E|, 1); and largest share of the budget."""

    series: float  # u < 2^-6, where draws are won
    middle: float
    near_one: float  # u > 1 - 2^-6, where fp32 itself is coarse, and draws are lost
    of_budget: float


def errors(u: Tensor, log2: Tensor, words: Tensor, fast: bool) -> Errors:
    """u, log2 [n] fp32 as computed; words [n] int64.

    u must be the word plus a half, rounded once or twice, times 2^-32. log2 is held against float64 of the
    exact u, cut as the code cuts: its own rounding and that of u; of the series its fourth term; above, the
    rounding of 1 - u and the two logarithms, through the derivative of log2 E.
    """
    exact_u = (words.double() + 0.5) * 2.0**-32
    assert ((u.double() / exact_u - 1).abs() <= 2.0**-23).all()
    cut = exact_u.clamp(max=CUT)
    e = -torch.log1p(-cut)
    exact = torch.log2(e)
    error = (log2.double() - exact).abs()
    size = exact.abs().clamp(min=1.0)
    own = 3 * 2.0**-24 * size + LOG2_ERROR[fast] * size
    # E = -ln(1 - u): u rounded twice, 1 - u once, its logarithm, the product with ln 2
    rounding = (cut * 2.0**-23 + 2.0**-25) / (1 - cut) + 0.6932 * LOG2_ERROR[fast] * (1.4427 * e).clamp(min=1)
    direct = 1.4427 * (rounding / e + 2.0**-23)
    budget = own + torch.where(cut < SERIES, 0.4 * cut**3 + 1.4427 * 2.0**-22, direct)
    # the last 2^-20: 1 - u has four digits or fewer, or is cut
    budget = torch.where(exact_u > 1 - 2.0**-20, budget + 0.2, budget)
    worst = float((error / budget).max())
    ulps = error / torch.exp2(torch.floor(torch.log2(size)) - 23)

    def largest(where: Tensor) -> float:
        return float(ulps[where].max()) if bool(where.any()) else 0.0

    low, high = cut < SERIES, cut > 1 - SERIES
    assert log2.isfinite().all()
    return Errors(largest(low), largest(~low & ~high), largest(high), worst)


def largest(found: list[Errors]) -> Errors:
    return Errors(*(max(values) for values in zip(*found, strict=True)))


def exp2_error(x: Tensor, got: Tensor) -> float:
    """Of 2^x, x in [-126, 0]: the largest relative error, in units of 2^-23."""
    return float((got.double() / torch.exp2(x.double()) - 1).abs().max()) * 2.0**23


def log2_error(total: Tensor, got: Tensor) -> float:
    """Of log2 of a group's total: the largest absolute error, in units of 2^-22."""
    return float((got.double() - torch.log2(total.double())).abs().max()) * 2.0**22


def softcap_error(y: Tensor, got: Tensor, cap: float) -> tuple[float, float]:
    """Of cap tanh(y / cap), |y| >= 2^-60: the largest error, in 2^-24 of its size and in 2^-24 of the cap."""
    exact = cap * torch.tanh(y.double() / cap)
    off = (got.double() - exact).abs()
    return float((off / exact.abs()).max()) * 2.0**24, float(off.max()) / cap * 2.0**24


def floats(first: int, stop: int, step: int = 1) -> Tensor:
    """The fp32 values of the bit patterns first, first + step, ... below stop."""
    bits = torch.arange(first, stop, step)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def neighbours(points: Iterable[float], reach: int) -> Tensor:
    """The fp32 values up to `reach` steps from each of the points (fp32 values, none of them 0)."""
    centre = torch.tensor(list(points), dtype=torch.float32).view(torch.int32)[:, None]
    return (centre + torch.arange(-reach, reach + 1, dtype=torch.int32)).flatten().view(torch.float32)
