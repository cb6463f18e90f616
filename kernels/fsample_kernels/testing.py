"""Numerical assertions with an error budget, for the tests, `verify` and `bench`. No statistics here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import noise
from .oracle import Oracle
from .types import Problem, SampleResult

SCORE_ROUNDING = (
    2.0**-18
)  # of a score in base 2: logarithms, exponentials and sums in fp32, fast math included
MASS_ROUNDING = 2.0**-20  # relative, of a sum of exponentials


class Mismatch(NamedTuple):
    """An id that differs from the oracle's. Explained where rounding of logits and scores can decide so."""

    row: int
    sample: int
    got: int
    want: int
    margin: float  # how far the oracle's choice was ahead: base-2 score, or share of the mass
    budget: float  # how much of that rounding may take
    decided: str  # what was compared: "logit", "score", "group", "member", "block", "row"

    @property
    def explained(self) -> bool:
        return self.margin <= self.budget

    def __str__(self) -> str:
        return (
            f"row {self.row} sample {self.sample}: got {self.got}, want {self.want}; "
            f"{self.decided} margin {self.margin:.3g}, budget {self.budget:.3g}"
        )


@dataclass(frozen=True)
class Comparison:
    """Ids against the oracle's."""

    total: int
    mismatches: tuple[Mismatch, ...]

    @property
    def unexplained(self) -> tuple[Mismatch, ...]:
        return tuple(mismatch for mismatch in self.mismatches if not mismatch.explained)

    def __str__(self) -> str:
        count, bad = len(self.mismatches), len(self.unexplained)
        head = f"{count} of {self.total} ids differ from the oracle's, {bad} beyond rounding"
        return "\n  ".join([head, *map(str, self.mismatches[:20])])


def assert_same_ids(problem: Problem, ids: Tensor, max_share: float = 0.01) -> Comparison:
    """Ids [B, K] must equal the float64 oracle's, except where the rounding of fp32 logits decides.

    Says which ids differ and by how much. At most max(1, max_share * B * K) may differ even with an
    explanation: wrong noise must not hide behind flat logits. Returns the comparison, for the test to report.
    """
    comparison = compare_ids(problem, ids)
    if comparison.unexplained or len(comparison.mismatches) > max(1.0, max_share * comparison.total):
        raise AssertionError(str(comparison))
    return comparison


def assert_same_rows(problem: Problem, result: SampleResult) -> None:
    """lse, logprob and logits, where present, must be the oracle's within the budget, NaN and inf too."""
    exact = Oracle(problem)
    want = exact.result()
    assert want.lse is not None and want.logprob is not None and want.logits is not None
    error = logit_error(problem)  # [B]
    spread = error * exact.scale / noise.LOG2_E + MASS_ROUNDING
    if result.lse is not None:
        _close("lse", result.lse, want.lse, spread + 2.0**-22 * want.lse.abs())
    if result.logits is not None:
        _close("logits", result.logits, want.logits, error[:, None] + 2.0**-22 * want.logits.abs())
    if result.logprob is not None:
        column = (result.ids - problem.first_id).clamp(min=0)
        own = exact.x.gather(1, column + problem.first_id - exact.base) * math.log(2.0)
        lse = torch.where(exact.greedy, own[:, 0] if own.shape[1] else want.lse, want.lse)
        logprob = (own - lse[:, None]).masked_fill(exact.greedy[:, None], 0.0)
        logprob = logprob.masked_fill((exact.bad | exact.empty)[:, None], torch.nan)
        _close(
            "logprob",
            result.logprob,
            logprob,
            2 * spread[:, None] + 2.0**-22 * (own.abs() + lse[:, None].abs()),
        )
        if (result.logprob > 0).any():
            raise AssertionError(f"logprob above 0: {float(result.logprob.nan_to_num(-1).max())}")


def assert_ids_in_range(ids: Tensor, vocab_size: int, bad_rows: Tensor | None = None) -> None:
    """Every id in [0, vocab_size), and -1 exactly in `bad_rows` [B] bool."""
    dead = torch.zeros(ids.shape[0], dtype=torch.bool) if bad_rows is None else bad_rows.cpu()
    host = ids.cpu()
    wrong = torch.where(dead[:, None], host != -1, (host < 0) | (host >= vocab_size))
    if wrong.any():
        row, sample = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{int(wrong.sum())} ids outside [0, {vocab_size}), or not -1 in a bad row: first "
            f"{int(host[row, sample])} at row {row} sample {sample}"
        )


def logit_error(problem: Problem) -> Tensor:
    """Bound on the rounding of y in fp32, [B] float64.

    A sum of D products errs by about sqrt(D) half-ulps of its size when errors are independent. The factor 8
    covers the accumulators of tensor cores, which truncate, and the worst of many sums. Below 2^-126 fp32 has
    few bits or, where small numbers are flushed, none.
    """
    if problem.hidden is None or problem.weight is None:
        assert problem.logits is not None
        error = torch.zeros(problem.num_rows, dtype=torch.float64, device=problem.logits.device)
    else:
        squares = problem.hidden.double().square()
        sizes = (squares @ part.double().square().t() for part in torch.split(problem.weight, 8192))
        # a NaN or infinite weight leaves the other ids of the row their budget
        size = torch.stack([part.nan_to_num(0, 0).amax(1) for part in sizes]).amax(0)
        error = 8 * 2.0**-24 * math.sqrt(problem.weight.shape[1]) * size.sqrt() + 2.0**-126
    error = error * abs(problem.logit_scale) + 2.0**-126
    return error if problem.softcap is None else error + 2.0**-22 * problem.softcap


def compare_ids(problem: Problem, ids: Tensor) -> Comparison:
    """Compare ids [B, K] with the oracle's, and explain each difference."""
    exact = Oracle(problem)
    want = exact.result().ids
    if ids.shape != want.shape or ids.dtype != torch.int64:
        raise AssertionError(f"ids must be int64 {list(want.shape)}, got {ids.dtype} {list(ids.shape)}")
    error = (logit_error(problem) * exact.scale).tolist()  # base 2
    mismatches = []
    for row, sample in (ids != want).nonzero().tolist():
        got, right = int(ids[row, sample]), int(want[row, sample])
        mismatches.append(explain(exact, row, sample, got, right, error[row]))
    return Comparison(ids.numel(), tuple(mismatches))


def explain(exact: Oracle, row: int, sample: int, got: int, want: int, error: float) -> Mismatch:
    """How far the oracle's id `want` was ahead of another, and how much of that rounding may take.

    error: bound on the rounding of the row's scaled logits, base 2: `logit_error(problem) * exact.scale`.
    """
    margin, budget, decided = _explain(exact, row, sample, got, want, error)
    return Mismatch(row, sample, got, want, margin, budget, decided)


def runner_up(exact: Oracle, row: int, sample: int, want: int, error: float) -> Mismatch | None:
    """The id beside the oracle's `want` that the least rounding would give, in budgets; None if none can.

    Looked at are the members of the winner's group and the best member of every rival group that counts: of
    the two best groups, and for noise="online" of the best group of each block.
    """
    column = want - exact.base
    if exact.greedy[row] or exact.problem.noise == "element":
        scores = exact.x[row] if exact.greedy[row] else exact.element_scores(sample)[row]
        others = scores.clone()
        others[column] = -torch.inf
        found = [int(others.argmax()) + exact.base]
    else:
        own = int(noise.group_of(torch.tensor(want)))
        found = [int(noise.id_of(torch.tensor(own), torch.tensor(j))) for j in range(32)]
        scores = exact.group_scores(sample)[row].masked_fill(exact.groups == own, -torch.inf)
        blocks = exact.groups // 128 if exact.problem.noise == "online" else torch.zeros_like(exact.groups)
        for block in sorted(set(blocks.tolist())):
            best = exact.groups[scores.masked_fill(blocks != block, -torch.inf).argmax()]
            member = exact.member_choice(sample, best.expand(exact.x.shape[0]))[row]
            found.append(int(noise.id_of(best, member)))
    rivals = [explain(exact, row, sample, got, want, error) for got in found if got != want]
    possible = [rival for rival in rivals if math.isfinite(rival.margin)]
    return min(possible, key=lambda rival: rival.margin / max(rival.budget, 1e-300), default=None)


def _explain(
    exact: Oracle, row: int, sample: int, got: int, want: int, error: float
) -> tuple[float, float, str]:
    """(margin, budget, what decided) of the decision that has to fall differently to give `got`."""
    column = got - exact.base
    if want == -1 or not 0 <= column < exact.x.shape[1] or exact.x[row, column] == -torch.inf:
        return math.inf, 0.0, "row"
    x_got, x_want = float(exact.x[row, column]), float(exact.x[row, want - exact.base])
    error += 2.0**-23 * max(abs(x_got), abs(x_want))
    if exact.greedy[row]:
        return x_want - x_got, 2 * error, "logit"
    budget = 2 * error + SCORE_ROUNDING
    if exact.problem.noise == "element":
        scores = exact.element_scores(sample)[row]
        return float(scores[want - exact.base] - scores[column]), budget, "score"
    group = noise.group_of(torch.tensor([got, want], device=exact.x.device))
    scores = exact.group_scores(sample)[row]
    share = budget * math.log(2.0) + MASS_ROUNDING
    if exact.problem.noise == "online" and got // 4096 != want // 4096:
        margin = 0.0
        for block, replace, closeness in exact.block_steps(sample):
            fits = block < got // 4096 or bool(replace[row]) == (block == got // 4096)
            margin = margin if fits else max(margin, float(closeness[row]))
        if margin > share:
            return margin, share, "block"
        first = scores[(exact.groups // 128 == got // 4096)].amax()
        ahead = float(first - scores[int(group[0]) - int(exact.groups[0])])
    else:
        ahead = float(
            scores[int(group[1]) - int(exact.groups[0])] - scores[int(group[0]) - int(exact.groups[0])]
        )
    if ahead > budget:
        return ahead, budget, "group"
    e, t = exact.member_masses(sample, group[0].expand(exact.x.shape[0]))
    member = int(noise.member_of(group.new_tensor(got)))
    margin = _member_margin(e[row].tolist(), float(t[row]), member, share)
    return (margin, share, "member") if margin > share or ahead <= 0 else (ahead, budget, "group")


def _member_margin(e: list[float], t: float, member: int, share: float) -> float:
    """Least relative change of masses and t that lets the descent end on `member`; 0 if it does anyway."""
    total, start = sum(e), t

    def walk(bit: int, t: float) -> float:
        if bit == 5:
            return 0.0
        size = 2 << bit
        mine = sum(e[member % size :: size])
        other = sum(e[(member + (1 << bit)) % size :: size])
        best = math.inf
        near = abs(mine - other) / total <= share  # which side is the lighter one is then open too
        mine_left = not (member >> bit) & 1
        for light in {mine < other or (mine == other and mine_left), *((True, False) if near else ())}:
            if light:
                need = max(0.0, t - mine) / (start + mine) if mine else math.inf
                best = min(best, max(need, walk(bit + 1, min(t, mine))))
            else:
                need = max(0.0, other - t) / (start + other)
                best = min(best, max(need, walk(bit + 1, max(t - other, 0.0))))
        return best

    return walk(0, t)


def _close(name: str, got: Tensor, want: Tensor, budget: Tensor) -> None:
    same = (got.double() == want) | (got.isnan() & want.isnan())
    off = torch.where(same, 0.0, (got.double() - want).abs()).nan_to_num(torch.inf)
    wrong = ~(off <= budget) & ~same
    if wrong.any():
        where = wrong.nonzero()[0].tolist()
        at = tuple(where)
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {got.numel()} beyond the budget; first at {where}: "
            f"got {float(got[at])}, want {float(want[at])}, budget {float(budget.expand(got.shape)[at]):.3g}"
        )
