"""Chi-squared, G, pooling, Holm and power: against closed forms, other libraries and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fsample_cli.exactness import battery, fit_targets, laws, power
from fsample_cli.exactness.goodness_of_fit import (
    TWO_SIDED_DOF,
    Floats,
    chi_squared,
    g_test,
    near_the_law,
    pool,
    softmax64,
)
from fsample_cli.exactness.holm import SMALLEST_ALPHA, holm
from fsample_cli.exactness.result import Sensitivity


def test_chi_squared_is_pearsons_statistic() -> None:
    counts, p = [30, 50, 20], [0.25, 0.5, 0.25]
    fit = chi_squared(counts, p)
    right = stats.chisquare(counts, [25, 50, 25])
    assert fit.statistic == pytest.approx(right.statistic) and fit.p_value == pytest.approx(right.pvalue)
    assert (fit.dof, fit.cells, fit.forbidden) == (2, 3, 0)


def test_g_is_the_corrected_likelihood_ratio() -> None:
    counts, p = [30, 50, 20], [0.25, 0.5, 0.25]
    raw = stats.power_divergence(counts, [25, 50, 25], lambda_="log-likelihood").statistic
    williams = 1 + ((4 + 2 + 4) - 1) / (6 * 100 * 2)
    assert g_test(counts, p).statistic == pytest.approx(raw / williams)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-9, 1e4), min_size=1, max_size=60), st.floats(0.5, 20))
def test_pooling_drops_nothing_and_fills_every_cell(expected: list[float], least: float) -> None:
    values = np.array(expected)
    cell = pool(values, least)
    total = np.bincount(cell, weights=values)
    assert len(cell) == len(values) and total.sum() == pytest.approx(values.sum())
    assert sorted(set(cell.tolist())) == list(range(len(total)))  # no empty cell between
    if values.sum() >= 2 * least:
        assert total.min() >= least * (1 - 1e-9)
    for index in np.flatnonzero(values >= least):  # common tokens share a cell with a remainder at most
        assert (values[cell == cell[index]] >= least).sum() == 1


def test_small_expectations_are_pooled_not_dropped() -> None:
    """Half the mass on tokens that expect 0.1 draws each; none of them is ever drawn."""
    p = np.concatenate([[0.5], np.full(500, 0.001)])
    counts = np.zeros(501)
    counts[0] = 100
    fit = chi_squared(counts, p)
    assert fit.p_value < 1e-15 and fit.cells >= 3


def test_expectations_are_scaled_to_the_exact_number_of_draws() -> None:
    """An fp32 softmax over 128,000 tokens does not sum to 1; scipy refuses it, a million draws must still
    work.
    """
    rng = np.random.default_rng(0)
    p32 = softmax64(rng.normal(0, 2, 128_000)).astype(np.float32) * np.float32(1.0003)
    counts = rng.multinomial(1_000_000, p32.astype(np.float64) / p32.astype(np.float64).sum())
    fit = chi_squared(counts, p32)
    assert 0.001 < fit.p_value < 0.999 and fit.dof == fit.cells - 1 > 10_000


def test_a_token_of_probability_zero_fails_when_drawn_once() -> None:
    p = [0.5, 0.5, 0.0]
    for test in (chi_squared, g_test):
        fit = test([500, 500, 1], p)
        assert fit.p_value == 0.0 and fit.forbidden == 1 and "probability 0" in fit.note
        assert math.isfinite(fit.statistic)
        assert test([500, 500, 0], p).p_value == 1.0


def test_one_cell_no_cells_and_no_draws_test_nothing_and_raise_nothing() -> None:
    empty: list[float] = []
    for counts, p in (([7], [1.0]), (empty, empty), ([0, 0], [0.5, 0.5]), ([3, 4], [0.5, 0.5])):
        fit = chi_squared(counts, p)
        assert (fit.dof, fit.p_value) == (0, 1.0) and fit.note


@pytest.mark.parametrize(
    ("counts", "p", "word"),
    [
        ([1, 2], [0.5, 0.25, 0.25], "[V]"),
        ([1, -2], [0.5, 0.5], "counts"),
        ([1, math.nan], [0.5, 0.5], "counts"),
        ([1, 2], [0.5, math.nan], "probabilities"),
        ([1, 2], [1.5, -0.5], "probabilities"),
        ([1, 2], [0.5, 0.4], "sum to 1"),
    ],
)
def test_wrong_input_is_named(counts: list[float], p: list[float], word: str) -> None:
    with pytest.raises(ValueError, match=word.replace("[", r"\[")):
        chi_squared(counts, p)


def test_p_values_are_uniform_far_into_the_tail() -> None:
    """8,000 simulated tests: the share below 0.05, 0.01 and 0.001 is what it says, within 4 sd and 15 %."""
    rng = np.random.default_rng(5)
    p = softmax64(-1.1 * np.log(np.arange(1, 65)))
    samples = rng.multinomial(2000, p, size=8_000)
    found = np.array([[chi_squared(c, p).p_value, g_test(c, p).p_value] for c in samples])
    for level in (0.05, 0.01, 0.001):
        share = (found <= level).mean(axis=0)
        room = 4 * math.sqrt(level / 8_000) + 0.15 * level
        assert (np.abs(share - level) < room).all(), (level, share)


def sums(small: float, count: int, large: int, step: float) -> Floats:
    """Chances of Pearson's statistic on a grid: `count` Poisson cells that expect `small` draws each and
    `large` that expect very many, beside one that takes the rest. Convolved.
    """
    dof = count + large
    size = 1 << math.ceil(math.log2(4 * stats.chi2.isf(1e-8, dof) / step))
    draws = np.arange(small + 40 * math.sqrt(small) + 60)
    cell = np.zeros(size)
    place = np.rint((draws - small) ** 2 / small / step).astype(int)
    np.add.at(cell, np.minimum(place, size - 1), stats.poisson.pmf(draws, small))
    law = np.fft.rfft(cell) ** count
    if large:
        edges = np.maximum(np.arange(size + 1) * step - step / 2, 0)
        law *= np.fft.rfft(np.diff(stats.chi2.cdf(edges, large)))
    return np.asarray(np.fft.irfft(law, size))


def beyond(small: float, count: int, large: int, levels: list[float]) -> list[float]:
    """P(Pearson's statistic > the law's cut) / level."""
    step, dof = 0.01, count + large
    chances = sums(small, count, large, step)
    size = len(chances)
    first = [int(stats.chi2.isf(level, dof) / step) for level in levels]
    return [float(chances[f : size // 2].sum()) / level for f, level in zip(first, levels, strict=True)]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2, 0.01])
@pytest.mark.parametrize("dof", [2, 3, 5, 6, 9, 12, 20, 40, 100, 300])
def test_cells_that_pass_keep_the_far_tail_within_what_holm_allows(dof: int, share: float) -> None:
    """The smallest cells that pass beside very large ones, whose tail is the heaviest."""
    count = max(1, round(share * dof))
    small = max(10.0, (40 + 1400 / dof) * count / dof / 2)
    cells = np.array([small] * count + [1e9] * (dof - count + 1))
    assert near_the_law(cells)
    assert small == 10 or not near_the_law(cells * np.where(cells < 1e9, 0.9, 1))
    lowest = SMALLEST_ALPHA / 5000 / battery.CHI_SQUARED_TAIL
    found = beyond(small, count, dof - count, [1e-4, 1e-5, 1e-6, lowest])
    assert max(found) <= battery.CHI_SQUARED_TAIL, found
    assert found[2] <= 2.2, found


@pytest.mark.parametrize("share", [1.0, 0.2, 0.01])
@pytest.mark.parametrize("dof", [TWO_SIDED_DOF, 12, 40, 100, 300])
def test_statistics_that_are_too_small_follow_the_law_too(dof: int, share: float) -> None:
    count = max(1, round(share * dof))
    small = max(10.0, (40 + 1400 / dof) * count / dof / 2)
    levels = [1e-4, 1e-6, 5e-8]
    step = min(0.01, float(stats.chi2.ppf(levels[-1], dof)) / 100)
    below = sums(small, count, dof - count, step).cumsum()
    for level in levels:
        assert below[int(stats.chi2.ppf(level, dof) / step)] / level < 1.3, level


def test_draws_that_are_too_even_fail() -> None:
    p = np.full(64, 1 / 64)
    assert chi_squared(np.full(64, 100), p).p_value < 1e-30 and g_test(np.full(64, 100), p).p_value < 1e-30
    fair = np.random.default_rng(1).multinomial(6400, p)
    assert chi_squared(fair, p).p_value > 1e-3


def test_of_two_cells_the_p_value_is_the_exact_binomial_one() -> None:
    for counts, p in (([21, 79], [0.1, 0.9]), ([3, 9_997], [0.00105, 0.99895]), ([0, 60], [0.2, 0.8])):
        n = sum(counts)
        low, high = stats.binom.cdf(counts[0], n, p[0]), stats.binom.sf(counts[0] - 1, n, p[0])
        for fit in (chi_squared(counts, p), g_test(counts, p)):
            assert fit.dof == 1 and fit.mass == pytest.approx(p[0])
            assert fit.p_value == pytest.approx(2 * min(low, high))


def test_few_draws_of_many_tokens_end_in_two_cells_and_not_in_one() -> None:
    p = np.array([0.15, 0.12, 0.73])
    fit = chi_squared([15, 12, 73], p)
    assert fit.dof == 1 and fit.mass == pytest.approx(0.27)
    assert chi_squared([1500, 1200, 7300], p).dof == 2


@pytest.mark.parametrize("dof", [1, 63, 511, 30_000, 150_000])
@pytest.mark.parametrize("alpha", [1e-2, 2e-5, 1e-7])
def test_chi_squared_and_its_noncentral_law_are_those_of_scipy_stats(dof: int, alpha: float) -> None:
    cut = float(stats.chi2.isf(alpha, dof))
    assert laws.chi_squared_isf(alpha, dof) == pytest.approx(cut, rel=1e-9)
    assert laws.chi_squared_sf(cut, dof) == pytest.approx(alpha, rel=1e-6)
    for sd in (1.0, 4.0, 12.0):
        noncentrality = sd * math.sqrt(2 * dof)
        right = stats.ncx2.sf(cut, dof, noncentrality)
        assert laws.noncentral_chi_squared_sf(cut, dof, noncentrality) == pytest.approx(right, abs=1e-6)
    found = power.smallest_noncentrality(dof, 2 * alpha if dof >= TWO_SIDED_DOF else alpha, 0.8)
    assert stats.ncx2.sf(cut, dof, found) == pytest.approx(0.8, abs=1e-5)


@pytest.mark.parametrize(
    ("draws", "p"), [(100, 0.5), (131_072, 1 / 512), (10**9, 7e-6), (10**9, 1e-12), (50, 1e-3)]
)
def test_tails_of_counts_are_those_of_scipy_stats(draws: int, p: float) -> None:
    mean = draws * p
    spread = max(1, round(6 * math.sqrt(mean)))
    for k in {0, 1, int(mean), max(0, int(mean) - spread), min(draws, int(mean) + spread), draws}:
        tails = (laws.binomial_cdf(k, draws, p), laws.binomial_sf(k, draws, p))
        right = (stats.binom.cdf(k, draws, p), stats.binom.sf(k - 1, draws, p))
        assert tails == pytest.approx(right, rel=1e-6, abs=1e-300)
    assert laws.binomial_cdf(-1, draws, p) == 0.0 == laws.binomial_sf(draws + 1, draws, p)
    assert laws.normal_sf(9.0) == pytest.approx(stats.norm.sf(9.0))
    assert laws.normal_isf(1e-9) == pytest.approx(stats.norm.isf(1e-9))


@pytest.mark.parametrize("start", [0, 3, 1000])
def test_the_first_place_where_a_condition_holds(start: int) -> None:
    for at in (start, start + 1, start + 2, start + 1023, start + 1024):
        assert laws.first(lambda n: n >= at, start) == at  # noqa: B023 - called at once


def test_holm_follows_its_paper() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="p_values"):
            holm([0.5, wrong])


def test_the_power_of_chi_squared_is_what_it_says() -> None:
    """A deviation of the stated size, in the shape that is hardest to see, is found in the stated share of
    runs.
    """
    rng = np.random.default_rng(2)
    draws, cells, alpha = 20_000, 64, 0.001
    distance = power.smallest_total_variation(draws, cells - 1, alpha, 0.8)
    p = np.full(cells, 1 / cells)
    shifted = p * (1 + 2 * distance * np.where(np.arange(cells) % 2, 1, -1))
    assert 0.5 * np.abs(shifted - p).sum() == pytest.approx(distance)
    hits = np.mean([chi_squared(c, p).p_value <= alpha for c in rng.multinomial(draws, shifted, size=2000)])
    assert hits == pytest.approx(0.8, abs=0.04)
    assert power.draws_for_total_variation(distance, cells - 1, alpha, 0.8) == pytest.approx(draws, rel=1e-3)


@pytest.mark.parametrize("mass", [0.0, 1e-4, 0.01])
def test_the_power_of_a_count_is_what_it_says(mass: float) -> None:
    rng = np.random.default_rng(3)
    draws, alpha = 100_000, 1e-4
    excess = power.smallest_excess(draws, mass, alpha, 0.8)
    assert excess is not None
    above = mass + excess

    def rejected(events: int) -> bool:
        low, high = stats.binom.cdf(events, draws, mass), stats.binom.sf(events - 1, draws, mass)
        return bool(2 * min(low, high) <= alpha)

    assert np.mean([rejected(k) for k in rng.binomial(draws, above, 2000)]) == pytest.approx(0.8, abs=0.06)
    missing = power.smallest_deficit(draws, mass, alpha, 0.8)
    if mass < 1e-3:
        assert (missing is None) == (2 * math.exp(-draws * mass) > alpha)
    else:
        assert missing is not None
        hits = np.mean([rejected(k) for k in rng.binomial(draws, mass - missing, 2000)])
        assert hits == pytest.approx(0.8, abs=0.06)


def test_smallest_effects_shrink_with_draws_and_grow_with_power() -> None:
    few, many = (Sensitivity("chi-squared", "total variation", n, 511) for n in (10_000, 1_000_000))
    small = power.smallest_effect(many, 0.01, 0.8)
    large = power.smallest_effect(few, 0.01, 0.8)
    sure = power.smallest_effect(few, 0.01, 0.99)
    assert small is not None and large is not None and sure is not None
    assert small == pytest.approx(large / 10) and sure > large
    assert power.smallest_effect(Sensitivity("chi-squared", "", 100, 0), 0.01, 0.8) is None
    nothing_expected = power.smallest_effect(Sensitivity("zero", "mass", 1000), 0.01, 0.8)
    assert nothing_expected == pytest.approx(1 - 0.2 ** (1 / 1000))
    # Markov's bound: with 3.4e-5 events expected one has p = 3.4e-5, two have half of it
    one, two = (
        power.smallest_effect(Sensitivity("markov", "mass", 1000, scale=3.4e-5), alpha, 0.8)
        for alpha in (4e-5, 2e-5)
    )
    assert one == pytest.approx(nothing_expected, rel=1e-3)
    assert two == pytest.approx(float(stats.gamma.ppf(0.8, 2)) / 1000)


def test_means_that_are_not_normal_enough_are_left_out_either_way() -> None:
    """A fair coin's mean has thin tails, and its p-values are off as much as those of heavy ones."""
    assert fit_targets.normal_enough(0.0, -2.0, 400) and not fit_targets.normal_enough(0.0, -2.0, 399)
    assert not fit_targets.normal_enough(0.0, 2.0, 399) and not fit_targets.normal_enough(1.0, 0.0, 999)


def test_powers_outside_their_range_are_refused() -> None:
    for alpha, strength in ((0.0, 0.8), (0.01, 1.0)):
        with pytest.raises(ValueError, match="strictly between"):
            power.smallest_shift(1.0, alpha, strength)
