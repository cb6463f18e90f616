"""A quick correctness check before any timing: no speed is printed for a sampler that draws wrong tokens.

Two parts, both cheap. `check_small` draws from a head whose logits are known exactly, V = 512, once per run
and sampler. `check_shape` looks at the very tensors that are timed, at every batch size. `fsample verify` is
the real audit; this catches what would make a time meaningless: ids out of range, a wrong distribution, a
stuck seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsample_cli.exactness.goodness_of_fit import chi_squared, softmax64
from fsample_cli.measure.graphs import Captured
from fsample_cli.samplers.fused import Fused
from fsample_cli.samplers.protocol import IDENTITY, HoldsColumns, Sampler, Transform
from fsample_cli.samplers.unfused import Unfused

SMALL_VOCAB = 512
SMALL_ROWS = 256
SMALL_CALLS = 40  # 10,240 draws
SHAPE_ROWS = 32
SHAPE_CALLS = 32  # 1,024 draws at B >= 32
BINS = 16
# A correct sampler fails one check in a million; a run makes about a hundred.
ALPHA = 1e-6


@dataclass(frozen=True)
class Verdict:
    passed: bool
    reason: str  # one line: what failed, or what was looked at
    draws: int = 0


def small_problem(
    hidden_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden [256, D], weight [512, D], logits [512] float64): every product is exact in any dtype.

    Only column 0 counts, and it holds multiples of 1/8 in [-4, 4): exact in bf16, no accumulation to round.
    """
    generator = torch.Generator().manual_seed(512)
    logits = torch.randint(-32, 32, (SMALL_VOCAB,), generator=generator) / 8
    weight = torch.zeros(SMALL_VOCAB, hidden_size, dtype=dtype)
    weight[:, 0] = logits.to(dtype)
    hidden = torch.zeros(SMALL_ROWS, hidden_size, dtype=dtype)
    hidden[:, 0] = 1
    return hidden.to(device), weight.to(device), logits.double()


def check_small(
    sampler: Sampler,
    *,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    temperature: float,
    seed: int,
) -> Verdict:
    """Chi-squared of 10,240 draws against the exact softmax; a sampler that draws nothing is checked by its
    logits.

    `sampler` must be loaded without a transform: this head has its own vocabulary.
    """
    hidden, weight, logits = small_problem(hidden_size, dtype, device)
    sampler.prepare(hidden, weight, temperature=temperature)
    if not sampler.draws:
        got = sampler.sample(hidden, weight, temperature=temperature, seed=seed, position=0)
        held = sampler.columns(SMALL_VOCAB) if isinstance(sampler, HoldsColumns) else slice(None)
        same = torch.equal(got.double().cpu(), logits[held].expand(SMALL_ROWS, -1))
        return Verdict(
            same, "logits of the small head exact" if same else "logits of the small head are wrong"
        )
    drawn = [
        sampler.sample(hidden, weight, temperature=temperature, seed=seed, position=i)
        for i in range(SMALL_CALLS)
    ]
    for ids in drawn:
        problem = _range_problem(ids, SMALL_ROWS, SMALL_VOCAB)
        if problem is not None:
            return Verdict(False, f"small head: {problem}")
    if temperature == 0:
        greedy = int((logits == logits.max()).nonzero()[0])  # the lowest id wins a tie
        right = all(bool((ids == greedy).all()) for ids in drawn)
        return Verdict(
            right, "small head: greedy" if right else "small head: temperature 0 is not the argmax"
        )
    counts = numpy.bincount(torch.cat(drawn).cpu().numpy(), minlength=SMALL_VOCAB)
    p = chi_squared(counts, softmax64(logits.numpy(), temperature)).p_value
    draws = SMALL_ROWS * SMALL_CALLS
    if p < ALPHA:
        return Verdict(
            False, f"small head: chi-squared of {draws} draws against the softmax, p = {p:.1e}", draws
        )
    return Verdict(True, f"small head: chi-squared p = {p:.3f}", draws)


def check_shape(
    sampler: Sampler,
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: float,
    seed: int,
    transform: Transform = IDENTITY,
) -> Verdict:
    """Range of the ids, and their place in each row's distribution, on the tensors that are timed.

    The place is the randomised probability integral transform: F(id - 1) + v p(id) with v uniform is uniform
    for a right sampler, whatever the row. It is taken twice and tested in 16 bins: with F along the ids
    (wrong tiles, offsets, ends) and along falling probability (temperature, soft-cap, noise). Logits come
    from an fp32 product; a baseline's 16-bit logits are within what this few draws can see.
    """
    rows, vocab = min(hidden.shape[0], SHAPE_ROWS), weight.shape[0]
    if not sampler.draws:
        got = sampler.sample(hidden, weight, temperature=temperature, seed=seed, position=0)
        held = sampler.columns(vocab) if isinstance(sampler, HoldsColumns) else slice(None)
        return _check_logits(got, hidden, weight[held], rows)
    drawn = []
    for position in range(SHAPE_CALLS):
        ids = sampler.sample(hidden, weight, temperature=temperature, seed=seed, position=position)
        problem = _range_problem(ids, hidden.shape[0], vocab)
        if problem is not None:
            return Verdict(False, problem)
        drawn.append(ids[:rows].long())
    if temperature == 0:
        return Verdict(True, "ids in range")
    logits = transform.apply(_logits(hidden[:rows], weight))  # [rows, V]
    probs = torch.softmax(logits.double() / temperature, dim=1)
    ids = torch.stack(drawn, dim=1)  # [rows, calls]
    order = torch.argsort(probs, dim=1, descending=True)
    ranks = torch.argsort(order, dim=1).gather(1, ids)
    p_values = {
        "id order": _uniformity(_places(ids, probs)),
        "order of probability": _uniformity(_places(ranks, probs.gather(1, order))),
    }
    by, p = min(p_values.items(), key=lambda item: item[1])
    if p < ALPHA:
        return Verdict(False, f"{ids.numel()} draws lie wrongly in their distributions ({by}), p = {p:.1e}")
    return Verdict(True, f"ids in range, places p = {p:.3f}", ids.numel())


def check_replay(sampler: Sampler, hidden: Tensor, weight: Tensor, captured: Captured) -> Verdict:
    """One replay of a captured call on these tensors, over an output that was spoiled before.

    Ours are functions of seed, position and tensors: the ids are those of the call outside of the graph. Of
    others, whose generator goes on, ids lie in range; without a draw the logits are right.
    """
    captured.output.fill_(float("nan") if captured.output.is_floating_point() else -1)
    captured.replay()
    rows, vocab = hidden.shape[0], weight.shape[0]
    if not sampler.draws:
        held = sampler.columns(vocab) if isinstance(sampler, HoldsColumns) else slice(None)
        return _check_logits(captured.output, hidden, weight[held], min(rows, SHAPE_ROWS))
    problem = _range_problem(captured.output, rows, vocab)
    if problem is not None:
        return Verdict(False, f"replayed: {problem}")
    if isinstance(sampler, (Fused, Unfused)):
        wrong = int((captured.output != captured.eager).sum())
        if wrong:
            return Verdict(False, f"replayed: {wrong} of {rows} ids differ from those outside of the graph")
    return Verdict(True, "replayed")


def _range_problem(ids: Tensor, rows: int, vocab: int) -> str | None:
    if tuple(ids.shape) != (rows,) or ids.is_floating_point():
        return f"ids must be integers of shape [{rows}], got {ids.dtype} {list(ids.shape)}"
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        return f"ids must lie in [0, {vocab}), got {low if low < 0 else high}"
    return None


def _check_logits(got: Tensor, hidden: Tensor, weight: Tensor, rows: int) -> Verdict:
    if tuple(got.shape) != (hidden.shape[0], weight.shape[0]):
        return Verdict(False, f"logits must be [B, V], got {list(got.shape)}")
    right = _logits(hidden[:rows], weight)
    error = float((got[:rows].float() - right).abs().max() / right.abs().max())
    # Rounding to bf16 is 2^-9 relative; a wrong product is off by the size of the logits themselves.
    return Verdict(error < 2**-6, f"largest error of the logits is {error:.1e} of the largest logit")


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [R, D], weight [V, D] -> [R, V] fp32, the weight upcast in pieces so that no fp32 copy of it
    exists.
    """
    pieces = [hidden.float() @ piece.float().T for piece in torch.split(weight, 2**15)]
    return torch.cat(pieces, dim=1)


def _places(ids: Tensor, probs: Tensor) -> NDArray[numpy.float64]:
    """ids [R, C], probs [R, V] -> F(id - 1) + v p(id), [R C] in [0, 1]."""
    below = torch.cumsum(probs, dim=1)
    chosen = probs.gather(1, ids)
    spread = torch.rand(ids.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    places = (below.gather(1, ids).cpu() - chosen.cpu() * spread).clamp(0, 1)
    return numpy.asarray(places.flatten().numpy(), dtype=numpy.float64)


def _uniformity(places: NDArray[numpy.float64]) -> float:
    """p-value of the places being uniform; few bins for few places keep every expectation at 5 or more."""
    bins = min(BINS, max(2, places.size // 5))
    counts, _ = numpy.histogram(places, bins=bins, range=(0.0, 1.0))
    return chi_squared(counts, numpy.full(bins, 1 / bins)).p_value
