"""Test `independence`: rows, steps, seeds and samples share nothing.

Most tests draw from the flat distribution over 512 ids. Two independent draws agree with probability 1/512,
and agreements along any chain of draws are independent of each other, so the number of agreements at a fixed
lag is binomial although its pairs overlap. What unlike rows share, and rows with one likely id, shows as a
correlation of events of known probability.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fsample_cli.exactness import forms, targets
from fsample_cli.exactness.draws import draw_grid, draw_steps
from fsample_cli.exactness.fit_targets import KINDS
from fsample_cli.exactness.goodness_of_fit import chi_squared
from fsample_cli.exactness.outcomes import Case
from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.result import TestResult
from fsample_cli.exactness.subject import Subject

TEST = "independence"
VOCAB = 512
WINDOW = 7  # ids of 9 bits in a 63-bit word
COARSE = 8
# (steps, rows): neighbours, tiles of 16, 64 and 128 rows, and diagonals, where seed + row + step would meet
LAGS = ((0, 1), (0, 2), (0, 16), (0, 64), (0, 128), (1, 0), (2, 0), (1, 1), (1, -1))
SAMPLES = 4
# Bits of a seed: torch's generator on a CPU reads no more than 32; ours have 64.
SEED_BITS, OUR_SEED_BITS = 32, 64


def run(subject: Subject, plan: Plan) -> list[TestResult]:
    """Pairs between rows, steps, seeds s and s + 1, and for ours samples; then repeats anywhere."""
    rows = 4096 if plan.pair_draws >= 2**20 else min(1024, plan.pair_draws // 8)
    steps = plan.pair_draws // rows
    seed = plan.case_seed(TEST) // 2 * 2
    flat = targets.flat(VOCAB)
    case = Case(TEST, subject, "")
    grid = draw_grid(subject, flat, steps, rows, seed, plan)  # [steps, rows]
    after = draw_grid(subject, flat, steps, rows, seed + 1, plan)
    grids = [grid, after]
    results = [_agreements(case, _lag(down, right), *shifted(grid, down, right)) for down, right in LAGS]
    results.append(_agreements(case, "seed+1", grid, after))
    results.append(_agreements(case, "seed+1 row-1", grid[:, 1:], after[:, :-1]))
    results.append(_every_pair(case, grids))
    results.append(_every_lag(case, "at any lag", _centred(grid)))
    results.append(_every_lag(case, "at any lag, one likely id", _of_a_likely_id(case, steps, rows, plan)))
    results.append(_every_lag(case, "at any lag, unlike rows", _of_unlike_rows(case, steps, rows, plan)))
    results.append(_seed_bits(case, flat, rows, seed, plan))
    results.append(_twice(case, flat, plan.rows(VOCAB, plan.focus_draws), seed, plan))
    results.append(pairs(case, "pairs: rows", grid[:, 0::2], grid[:, 1::2]))
    results.append(pairs(case, "pairs: steps", grid[0::2], grid[1::2]))
    results.append(pairs(case, "pairs: seeds", grid, after))
    if subject.library is not None:
        hidden, weight = flat.tensors(rows, plan.device, plan.dtype)
        calls = [
            forms.by_row(subject.library, hidden, weight, seed=seed, position=step, num_samples=SAMPLES).ids
            for step in range(steps, steps + max(1, steps // SAMPLES))
        ]
        # [steps / SAMPLES, rows, SAMPLES], at positions that `grid` does not use
        samples = torch.stack(calls)
        first, second = samples[..., :-1], samples[..., 1:]
        results.append(_agreements(case, "sample+1", first, second))
        results.append(_agreements(case, "sample+1 row-1", first[:, 1:], second[:, :-1]))
        results.append(pairs(case, "pairs: samples", samples[..., 0::2], samples[..., 1::2]))
        grids += [samples[..., k] for k in range(SAMPLES)]
    return [*results, _repeats(case, grids, 1), _repeats(case, grids, 0)]


def _lag(down: int, right: int) -> str:
    return " ".join(f"{name}{by:+d}" for name, by in (("step", down), ("row", right)) if by)


def shifted(grid: Tensor, down: int, right: int) -> tuple[Tensor, Tensor]:
    """The two views of grid [steps, rows] whose elements lie (down, right) apart; right may be negative."""
    steps, rows = grid.shape
    first = grid[: steps - down, max(0, -right) : rows - max(0, right)]
    second = grid[down:, max(0, right) : rows - max(0, -right)]
    return first, second


def _agreements(case: Case, what: str, first: Tensor, second: Tensor) -> TestResult:
    same = int((first == second).sum())
    return case.events(f"equal: {what}", same, first.numel(), 1 / VOCAB, "share of equal draws")


def pairs(case: Case, what: str, first: Tensor, second: Tensor, width: int = VOCAB) -> TestResult:
    """Chi-squared over 8 x 8 cells of disjoint pairs, by the eighth of [0, width) that each id lies in."""
    count = min(first.shape[0], second.shape[0])
    left, right = first[:count], second[:count, : first.shape[1]]
    left = left[:, : right.shape[1]]
    place = width // COARSE
    inside = (left >= 0) & (left < width) & (right >= 0) & (right < width)
    cell = (left[inside] // place) * COARSE + right[inside] // place
    counts = torch.bincount(cell, minlength=COARSE**2).cpu().numpy()
    fit = chi_squared(counts, np.full(COARSE**2, COARSE**-2.0))
    return case.fit(what, fit, int(counts.sum()))


def _every_pair(case: Case, grids: list[Tensor]) -> TestResult:
    """Equal draws among all pairs of a call, whichever rows they are: a uniform that serves two of them.

    Pairs of independent flat draws agree independently of each other, two at a time, so their number has
    variance N p (1 - p) over N pairs, although a draw is in many.
    """
    calls = torch.cat(grids).clamp(-1, VOCAB) + 1  # [calls, rows]
    counts = torch.zeros(len(calls), VOCAB + 2, dtype=torch.int64, device=calls.device)
    counts.scatter_add_(1, calls, torch.ones_like(calls))
    equal, draws = int((counts * (counts - 1) // 2).sum()), calls.numel()
    possible = draws * (calls.shape[1] - 1) / 2
    p = 1 / VOCAB
    deviation = math.sqrt(p * (1 - p) * draws / possible)  # a draw stands for (rows - 1) / 2 pairs
    what = "equal: every pair of a call"
    return case.mean(what, equal / possible, p, deviation, draws, "share of equal pairs")


def _centred(grid: Tensor) -> Tensor:
    """Flat ids as values of mean 0 and variance 1."""
    return (grid.clamp(0, VOCAB - 1).double() - (VOCAB - 1) / 2) / math.sqrt((VOCAB**2 - 1) / 12)


def _of_a_likely_id(case: Case, steps: int, rows: int, plan: Plan) -> Tensor:
    """[steps, rows] of mean 0 and variance 1: whether the id with half the mass was drawn."""
    target = targets.two_scale(VOCAB)
    ids = draw_grid(case.subject, target, steps, rows, plan.case_seed(f"{TEST} likely"), plan)
    likely = int(target.probabilities.argmax())
    return _standard(ids == likely, torch.tensor(target.probabilities[likely]))


def _of_unlike_rows(case: Case, steps: int, rows: int, plan: Plan) -> Tensor:
    """[steps, rows] of mean 0 and variance 1: whether an id of the lower half of a row's own mass was
    drawn, in rows of several distributions.
    """
    kinds = [targets.skewed(VOCAB, plan.seed + kind) for kind in range(KINDS)]
    hidden, weight = targets.together(kinds, rows, plan.device, plan.dtype)
    ids = draw_steps(case.subject, hidden, weight, steps, plan.case_seed(f"{TEST} unlike"))
    sums = [kind.probabilities.cumsum() for kind in kinds]
    edges = torch.tensor([int(np.searchsorted(below, 0.5)) for below in sums])
    mass = torch.tensor([below[edge] for below, edge in zip(sums, edges.tolist(), strict=True)])
    kind = torch.arange(rows) % KINDS
    return _standard(ids <= edges[kind].to(ids.device), mass[kind].to(ids.device))


def _standard(happened: Tensor, p: Tensor) -> Tensor:
    return (happened.double() - p) / (p * (1 - p)).sqrt()


def _every_lag(case: Case, what: str, values: Tensor) -> TestResult:
    """The largest correlation of values [steps, rows] that lie a fixed number of rows and steps apart, up to
    half the grid either way.

    Products of independent centred values are uncorrelated with each other: each sum is normal. Its smallest
    p-value counts as often as there are lags.
    """
    steps, rows = values.shape
    spectrum = torch.fft.rfft2(values, s=(2 * steps, 2 * rows))
    sums = torch.fft.irfft2(spectrum.abs() ** 2, s=(2 * steps, 2 * rows))
    down = torch.arange(steps // 2 + 1, device=values.device)[:, None]
    right = torch.arange(-(rows // 2), rows // 2 + 1, device=values.device)
    terms = (steps - down) * (rows - right.abs())
    z = sums[down, right] / terms.sqrt()  # a negative lag of rows lies at the end
    z[0, : rows // 2 + 1] = 0  # the mirror of the lags to the right, and no lag at all
    lags = z.numel() - rows // 2 - 1
    worst = int(z.abs().argmax())
    lag = _lag(*(int(part) for part in (down[worst // z.shape[1], 0], right[worst % z.shape[1]])))
    note = f"largest at {lag}, of {lags:,} lags"
    score, draws = float(z.view(-1)[worst]), int(terms.min())
    return case.largest(f"correlation {what}", score, lags, draws, "correlation", note)


def _seed_bits(case: Case, target: targets.Target, rows: int, seed: int, plan: Plan) -> TestResult:
    """Equal draws of calls whose seeds differ in one bit, whichever."""
    rows = rows if case.subject.compiles_shapes else forms.BATCHES[-1]
    base = draw_grid(case.subject, target, 1, rows, seed, plan)
    same = [
        int((draw_grid(case.subject, target, 1, rows, seed ^ (1 << bit), plan) == base).sum())
        for bit in range(SEED_BITS if case.subject.library is None else OUR_SEED_BITS)
    ]
    worst = max(range(len(same)), key=lambda bit: same[bit])
    note = f"most at bit {worst}: {same[worst]} of {rows}"
    draws = rows * len(same)
    return case.events("equal: a bit of the seed", sum(same), draws, 1 / VOCAB, "share of equal draws", note)


def _twice(case: Case, target: targets.Target, rows: int, seed: int, plan: Plan) -> TestResult:
    """A large call made once more; `range` does so with small ones."""
    first, again = (draw_grid(case.subject, target, 1, rows, seed, plan) for _ in range(2))
    other = int((first != again).sum())
    note = f"{other} of {rows} ids differ: the same seed must give the same ids"
    return case.rule(
        "same call twice", other > 0 and case.subject.repeats, rows, note, "share of wrong tokens"
    )


def _repeats(case: Case, grids: list[Tensor], along: int) -> TestResult:
    """Equal windows of 7 consecutive ids anywhere in all grids: a stream used twice, at whatever distance.

    Two windows of independent ids agree with probability 512^-7, overlapping or not. A sampler that repeats
    itself repeats many.
    """
    words = torch.cat([_windows(grid if along else grid.T).reshape(-1) for grid in grids])
    ordered = torch.sort(words).values
    repeats = int((ordered[1:] == ordered[:-1]).sum())
    chances = len(words) * (len(words) - 1) / 2
    what = "rows" if along else "steps"
    return case.at_most(
        f"repeats: {what}", repeats, len(words), chances * float(VOCAB) ** -WINDOW, "repeated mass"
    )


def _windows(grid: Tensor) -> Tensor:
    """[a, b] -> [a, b - 6] words of 7 neighbouring ids."""
    width = grid.shape[1] - WINDOW + 1
    if width < 1:
        return grid.new_empty(0)
    word = torch.zeros_like(grid[:, :width])
    for shift in range(WINDOW):
        word = word * VOCAB + grid[:, shift : shift + width] % VOCAB
    return word
