"""Do these counts come from these probabilities? Chi-squared and G, with small expectations pooled and
none dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fsample_cli.exactness import laws

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

# No cell expects fewer draws, and a few cells beside large ones, whose tails are the heaviest, expect more:
# cells are pooled until `near_the_law` holds.
MIN_EXPECTED = 10.0
# From so many degrees of freedom on a statistic may be too small as well: draws that are tied to each other,
# as stratified uniforms are, follow their distribution too closely. With fewer the sum is too coarse near 0.
TWO_SIDED_DOF = 10


@dataclass(frozen=True)
class Fit:
    """One goodness-of-fit statistic. `cells` is the number of cells after pooling, `dof` is cells - 1."""

    statistic: float
    dof: int
    p_value: float
    cells: int
    forbidden: int  # draws of tokens whose probability is 0: any makes p_value 0
    note: str = ""
    mass: float = 0.0  # of two cells: the probability of the first


def chi_squared(counts: ArrayLike, probabilities: ArrayLike, *, min_expected: float = MIN_EXPECTED) -> Fit:
    """Pearson's statistic sum (O - E)^2 / E over pooled cells, E = n p, n the number of draws.

    counts [V] integers >= 0, probabilities [V] >= 0; they are scaled in float64 so that the expectations sum
    to n exactly. Tokens expected fewer than `min_expected` times, and more where few cells would leave the
    law, are pooled with others of about their probability. p_value is twice the smaller tail of chi-squared,
    below TWO_SIDED_DOF the upper tail, of two cells the exact binomial one. A token of probability 0 that was
    drawn makes p_value 0. With fewer than two cells nothing can be tested: dof 0, p_value 1.

    Raises ValueError on wrong shapes, negative or non-finite values, or probabilities that do not sum to 1
    within 1e-3.
    """
    observed, expected, forbidden, note = _cells(counts, probabilities, min_expected)
    statistic = float(np.sum((observed - expected) ** 2 / expected))
    return _fit(statistic, observed, expected, forbidden, note)


def g_test(counts: ArrayLike, probabilities: ArrayLike, *, min_expected: float = MIN_EXPECTED) -> Fit:
    """Likelihood ratio 2 sum O ln(O / E) over the same cells as `chi_squared`; same arguments, same errors.

    Divided by Williams' correction 1 + (sum 1/p - 1) / (6 n dof), which makes its law chi-squared down to p =
    1e-5.
    """
    observed, expected, forbidden, note = _cells(counts, probabilities, min_expected)
    drawn = observed > 0
    statistic = float(2 * np.sum(observed[drawn] * np.log(observed[drawn] / expected[drawn])))
    dof = len(expected) - 1
    if dof > 0:
        statistic /= 1 + (float(np.sum(1 / expected)) - 1 / float(expected.sum())) / (6 * dof)
    return _fit(max(statistic, 0.0), observed, expected, forbidden, note)


def softmax64(logits: ArrayLike, temperature: float = 1.0) -> Floats:
    """softmax(logits / temperature) over the last axis in float64; -inf gives exactly 0."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def pool(expected: Floats, min_expected: float) -> NDArray[np.int64]:
    """Cell number [V] of each token: its own cell if it expects enough, else one shared with tokens equally
    rare.

    Rare tokens are sorted by expectation (ids break ties, so flat targets pool neighbours) and cut every
    2 * min_expected: each cell then expects more than min_expected, for no member expects as much. A
    remainder joins the rarest cell before it, or the smallest single token if there is none.
    """
    cell = np.empty(len(expected), dtype=np.int64)
    rare = expected < min_expected
    common = np.flatnonzero(~rare)
    order = np.flatnonzero(rare)[np.argsort(expected[rare], kind="stable")]
    if len(order) == 0:
        return np.arange(len(expected))
    running = np.cumsum(expected[order])
    shared = np.floor((running - expected[order] / 2) / (2 * min_expected)).astype(np.int64)
    total = np.bincount(shared, weights=expected[order])
    if total[-1] < min_expected and len(total) > 1:
        shared[shared == len(total) - 1] = len(total) - 2
    cell[order] = shared
    first = int(shared.max()) + 1
    cell[common] = first + np.arange(len(common))
    if running[-1] < min_expected and len(common):
        cell[order] = cell[common[np.argmin(expected[common])]]
        return cell - 1
    return cell


def near_the_law(expected: Floats) -> bool:
    """Whether the variance of Pearson's statistic over cells of these expectations [k] is so near 2 dof, that
    of chi-squared, that right draws pass the law's value for p, down to 5e-8, at most 4 times as often.

    The variance is 2 dof + (sum 1/p - k^2 - 2k + 2) / n. The bound on it was found by convolving the exact
    laws of cells, and a test holds it.
    """
    cells, dof, draws = len(expected), len(expected) - 1, float(expected.sum())
    more = (draws * float(np.sum(1 / expected)) - cells**2 - 2 * cells + 2) / draws
    return more <= 2 * dof / (40 + 1400 / dof)


def _pooled(expected: Floats, min_expected: float) -> NDArray[np.int64]:
    """Cell number [V] of each token: `pool` with growing cells until they are `near_the_law` or two."""
    cell = pool(expected, min_expected)
    while True:
        sizes: Floats = np.bincount(cell, weights=expected).astype(np.float64)
        if len(sizes) <= 2 or near_the_law(sizes):
            return cell
        min_expected *= 1.5
        wider = pool(expected, min_expected)
        if int(wider.max()) == 0:  # too few draws for three cells: two, of about a half each
            last = int(np.argmin(np.abs(np.cumsum(sizes)[:-1] - sizes.sum() / 2)))
            return (cell > last).astype(np.int64)
        cell = wider


def _cells(
    counts: ArrayLike, probabilities: ArrayLike, min_expected: float
) -> tuple[Floats, Floats, int, str]:
    observed = np.asarray(counts, dtype=np.float64)
    p = np.asarray(probabilities, dtype=np.float64)
    if observed.ndim != 1 or observed.shape != p.shape:
        raise ValueError(f"counts and probabilities must be [V], got {observed.shape} and {p.shape}")
    if not np.isfinite(observed).all() or (observed < 0).any():
        raise ValueError("counts must be finite and >= 0")
    if not np.isfinite(p).all() or (p < 0).any():
        raise ValueError("probabilities must be finite and >= 0")
    if not min_expected > 0:
        raise ValueError(f"min_expected must be > 0, got {min_expected}")
    if len(p) and abs(p.sum() - 1) > 1e-3:
        raise ValueError(f"probabilities must sum to 1, got {p.sum():.6g}")
    draws = observed.sum()
    possible = p > 0
    forbidden = int(observed[~possible].sum())
    expected = draws * (p[possible] / p[possible].sum()) if possible.any() else p[possible]
    if draws == 0 or len(expected) == 0:
        return observed[:0], expected[:0], forbidden, "no draws: nothing to test"
    cell = _pooled(expected, min_expected)
    pooled_expected: Floats = np.bincount(cell, weights=expected).astype(np.float64)
    pooled_observed: Floats = np.bincount(cell, weights=observed[possible]).astype(np.float64)
    note = f"one cell expects {min_expected:g}: nothing to test" if len(pooled_expected) < 2 else ""
    return pooled_observed, pooled_expected, forbidden, note


def _fit(statistic: float, observed: Floats, expected: Floats, forbidden: int, note: str) -> Fit:
    cells = len(expected)
    dof = max(cells - 1, 0)
    if forbidden:
        return Fit(statistic, dof, 0.0, cells, forbidden, f"{forbidden} draws of tokens with probability 0")
    if dof == 1:
        mass = float(expected[0] / expected.sum())
        p_value = laws.binomial_two_sided(int(observed[0]), int(observed.sum()), mass)
        return Fit(statistic, dof, p_value, cells, 0, note, mass)
    return Fit(statistic, dof, _p_value(statistic, dof) if dof else 1.0, cells, 0, note)


def _p_value(statistic: float, dof: int) -> float:
    above = laws.chi_squared_sf(statistic, dof)
    if dof < TWO_SIDED_DOF:
        return above
    return min(1.0, 2 * min(above, laws.chi_squared_cdf(statistic, dof)))
