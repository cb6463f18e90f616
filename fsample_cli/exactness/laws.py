"""Tails of the laws that the tests judge by, from `scipy.special`.

`scipy.stats` has the same functions and takes longer to import than a test of the quick level runs.
"""

from __future__ import annotations

from collections.abc import Callable

from scipy import special


def chi_squared_sf(statistic: float, dof: int) -> float:
    """P(X >= statistic) of chi-squared with dof >= 1 degrees of freedom."""
    return float(special.chdtrc(dof, statistic))


def chi_squared_cdf(statistic: float, dof: int) -> float:
    """P(X <= statistic) of chi-squared with dof >= 1 degrees of freedom, with full relative precision."""
    return float(special.gammainc(dof / 2, statistic / 2))


def chi_squared_isf(p: float, dof: int) -> float:
    """The value that chi-squared with dof >= 1 exceeds with probability p."""
    return float(special.chdtri(dof, p))


def noncentral_chi_squared_sf(statistic: float, dof: int, noncentrality: float) -> float:
    """P(X >= statistic) of the noncentral law, right to 1e-6 absolute: for powers, not for p-values."""
    return 1.0 - float(special.chndtr(statistic, dof, noncentrality))


def normal_sf(z: float) -> float:
    """P(Z >= z) of the standard normal law, with full relative precision for large z."""
    return float(special.ndtr(-z))


def normal_isf(p: float) -> float:
    """The value that a standard normal variable exceeds with probability p."""
    return -float(special.ndtri(p))


def binomial_cdf(events: int, draws: int, p: float) -> float:
    """P(X <= events) of `draws` trials with 0 < p < 1, with full relative precision."""
    if events < 0:
        return 0.0
    return 1.0 if events >= draws else float(special.betaincc(events + 1, draws - events, p))


def binomial_sf(events: int, draws: int, p: float) -> float:
    """P(X >= events): the tail includes `events`."""
    if events > draws:
        return 0.0
    return 1.0 if events <= 0 else float(special.betainc(events, draws - events + 1, p))


def binomial_two_sided(events: int, draws: int, p: float) -> float:
    """Exact p-value: twice the smaller tail, at most 1."""
    return min(1.0, 2 * min(binomial_cdf(events, draws, p), binomial_sf(events, draws, p)))


def first(true_at: Callable[[int], bool], start: int) -> int:
    """The smallest integer n >= start where a condition holds that, once true, stays true. Doubles, then
    halves.
    """
    if true_at(start):
        return start
    low, step = start, 1
    while not true_at(low + step):
        low, step = low + step, 2 * step
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if true_at(middle) else (middle, high)
    return high
