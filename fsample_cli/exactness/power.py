"""What a number of draws can see, and how many draws a defect needs."""

from __future__ import annotations

import math
from functools import cache

from scipy import special

from fsample_cli.exactness import laws
from fsample_cli.exactness.goodness_of_fit import TWO_SIDED_DOF
from fsample_cli.exactness.result import Sensitivity


@cache
def smallest_noncentrality(dof: int, alpha: float, power: float) -> float:
    """Noncentrality at which a chi-squared test of level alpha with dof degrees of freedom rejects with
    this power, by its upper tail, which has half of the level from TWO_SIDED_DOF on.
    """
    _check(alpha, power)
    if dof < 1:
        raise ValueError(f"dof must be at least 1, got {dof}")
    if power <= alpha:
        return 0.0
    cut = laws.chi_squared_isf(alpha / 2 if dof >= TWO_SIDED_DOF else alpha, dof)
    low, high = 0.0, 10.0 + cut
    while laws.noncentral_chi_squared_sf(cut, dof, high) < power:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        enough = laws.noncentral_chi_squared_sf(cut, dof, middle) >= power
        low, high = (low, middle) if enough else (middle, high)
    return high


def smallest_total_variation(draws: int, dof: int, alpha: float, power: float) -> float:
    """Total-variation distance that n draws surely show, whatever its shape: sqrt(noncentrality / n) / 2.

    A deviation d of the cell probabilities p has noncentrality n sum d^2 / p >= n (sum |d|)^2 = 4 n TV^2,
    with equality where |d| is proportional to p: the shape hardest to see. Deviations inside one pooled cell
    are not seen at all.
    """
    return min(1.0, 0.5 * math.sqrt(smallest_noncentrality(dof, alpha, power) / draws))


def draws_for_total_variation(distance: float, dof: int, alpha: float, power: float) -> int:
    """Draws after which a chi-squared test sees a total-variation distance of this size in any shape."""
    if not 0 < distance <= 1:
        raise ValueError(f"distance must lie in (0, 1], got {distance}")
    return math.ceil(smallest_noncentrality(dof, alpha, power) / (4 * distance**2))


def smallest_shift(standard_error: float, alpha: float, power: float) -> float:
    """Shift of a mean that a two-sided normal test sees: (z_{1 - alpha/2} + z_power) standard errors."""
    _check(alpha, power)
    return standard_error * (laws.normal_isf(alpha / 2) + laws.normal_isf(1 - power))


def smallest_excess(draws: int, mass: float, alpha: float, power: float) -> float | None:
    """Mass above `mass` that a two-sided count test sees in n draws (mass 0: any event at all), or None
    where even n events would be no surprise.
    """
    _check(alpha, power)
    # the fewest events that reject
    events = 1 if mass == 0 else laws.first(lambda k: 2 * laws.binomial_sf(k, draws, mass) <= alpha, 1)
    if events > draws:
        return None
    return float(special.betaincinv(events, draws - events + 1, power)) - mass


def smallest_deficit(draws: int, mass: float, alpha: float, power: float) -> float | None:
    """Missing mass that the same test sees, or None where even no event at all would be no surprise."""
    _check(alpha, power)
    # the fewest events that no longer reject: one less does
    events = laws.first(lambda k: 2 * laws.binomial_cdf(k, draws, mass) > alpha, 0)
    return None if events == 0 else mass - float(special.betainccinv(events, draws - events + 1, power))


def smallest_effect(sensitivity: Sensitivity, alpha: float, power: float) -> float | None:
    """The smallest effect, in the unit `sensitivity.effect` names, that a test of level alpha sees with
    this power; of a count the smallest excess.
    """
    if sensitivity.draws < 1:
        return None
    alpha /= sensitivity.tries
    if sensitivity.law == "chi-squared":
        if sensitivity.dof < 1:
            return None
        return smallest_total_variation(sensitivity.draws, sensitivity.dof, alpha, power)
    if sensitivity.law == "normal":
        return smallest_shift(sensitivity.scale, alpha, power)
    if sensitivity.law == "markov":
        _check(alpha, power)
        events = max(1, math.ceil(sensitivity.scale / alpha))  # the fewest of which bound / seen <= alpha
        return float(special.gammaincinv(events, power)) / sensitivity.draws
    return smallest_excess(sensitivity.draws, sensitivity.scale, alpha, power)


def _check(alpha: float, power: float) -> None:
    for name, value in (("alpha", alpha), ("power", power)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie strictly between 0 and 1, got {value}")
