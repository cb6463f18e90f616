"""Test `invariance`: a request's tokens depend on its seed, position and logits, and on nothing around it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fsample_cli.exactness import forms, oracle, targets
from fsample_cli.exactness.draws import Histogram
from fsample_cli.exactness.fit_targets import KINDS
from fsample_cli.exactness.goodness_of_fit import chi_squared
from fsample_cli.exactness.outcomes import Case
from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.result import TestResult
from fsample_cli.exactness.subject import Library, Subject
from fsample_kernels import checked
from fsample_kernels.types import SampleResult

TEST = "invariance"
ROWS = forms.BATCHES[-1]  # two past tiles of 64 and 192


def run(subject: Subject, plan: Plan) -> list[TestResult]:
    """Logits are exact whatever the shape of the product, so tokens must be equal, not nearly."""
    assert subject.library is not None
    setting = _Setting(subject.library, plan, 9000 if subject.noise == "online" else 1000)
    checks: dict[str, Callable[[_Setting], int]] = {
        "same call twice": _twice,
        "row order": _row_order,
        "batch size, and with it the tile": _batch_size,
        "masked and greedy neighbours": _neighbours,
        "4 samples of 4 and of 9": _samples,
        "seed and position on the device": _on_device,
        "greedy at every seed": _greedy,
    }
    results = []
    for name, check in checks.items():
        case = Case(TEST, subject, name)
        wrong = check(setting)
        results.append(case.rule("", wrong > 0, ROWS, f"{wrong} tokens differ", "share of wrong tokens"))
    results.append(samples_and_calls(subject, subject.library, plan))
    if subject.reference is not None:
        results.append(_implementation(subject, subject.reference, setting))
    if plan.device == "cuda":
        results.append(_graph_result(Case(TEST, subject, "graph replay and eager"), setting))
    return results


class _Setting:
    """Rows of exact logits, a seed and a position for each."""

    def __init__(self, library: Library, plan: Plan, vocab: int) -> None:
        rng = np.random.default_rng(plan.seed + 7)
        self.library, self.vocab, self.device = library, vocab, plan.device
        self.kinds = torch.from_numpy(targets.to_bf16(rng.normal(0, 3, (KINDS, vocab))))
        weight = torch.zeros(vocab, targets.HIDDEN, dtype=torch.float64)
        weight[:, :KINDS] = self.kinds.T
        hidden = torch.zeros(ROWS, targets.HIDDEN, dtype=torch.float64)
        hidden[torch.arange(ROWS), torch.arange(ROWS) % KINDS] = 1
        self.weight = weight.to(plan.device, plan.dtype)
        self.hidden = hidden.to(plan.device, plan.dtype)
        self.logits = self.kinds[torch.arange(ROWS) % KINDS]  # [B, V] float64
        self.seeds = torch.from_numpy(rng.integers(0, 2**62, ROWS)).to(plan.device)
        self.positions = torch.from_numpy(rng.integers(0, 2**32, ROWS)).to(plan.device)
        self.plain = self.draw(library)

    def call(self, library: Library, num_samples: int = 1) -> SampleResult:
        return forms.by_row(
            library,
            self.hidden,
            self.weight,
            seed=self.seeds,
            position=self.positions,
            num_samples=num_samples,
        )

    def draw(self, library: Library, num_samples: int = 1) -> Tensor:
        return self.call(library, num_samples).ids


def _differ(first: Tensor, second: Tensor) -> int:
    return int((first != second).sum())


def _twice(s: _Setting) -> int:
    return _differ(s.draw(s.library), s.plain)


def _row_order(s: _Setting) -> int:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).to(s.device)
    ids = forms.by_row(
        s.library, s.hidden[order], s.weight, seed=s.seeds[order], position=s.positions[order]
    ).ids
    return _differ(ids, s.plain[order])


def _batch_size(s: _Setting) -> int:
    wrong = 0
    for size in (1, 2, 3, 17, 33, 64, 100, 130):
        ids = forms.by_row(
            s.library, s.hidden[:size], s.weight, seed=s.seeds[:size], position=s.positions[:size]
        ).ids
        wrong += _differ(ids, s.plain[:size])
    return wrong


def _neighbours(s: _Setting) -> int:
    """Every second row masked and every third greedy: the others keep their tokens."""
    row = torch.arange(ROWS, device=s.device)
    touched = (row % 2 == 1) | (row % 3 == 2)
    mask = torch.ones(ROWS, s.vocab, dtype=torch.bool, device=s.device)
    mask[row % 2 == 1, : s.vocab // 2] = False
    temperature = torch.where(row % 3 == 2, 0.0, 1.0)
    ids = forms.by_row(
        s.library, s.hidden, s.weight, seed=s.seeds, position=s.positions, temperature=temperature,
        allowed=forms.pack(mask),
    ).ids  # fmt: skip
    return _differ(ids[~touched], s.plain[~touched])


def _samples(s: _Setting) -> int:
    four, nine = s.draw(s.library, 4), s.draw(s.library, 9)
    return _differ(four, nine[:, :4]) + _differ(four[:, :1], s.plain)


def samples_and_calls(subject: Subject, library: Library, plan: Plan) -> TestResult:
    """Four samples of a call are draws like those of four calls: their counts against the same target."""
    target = targets.skewed(512, plan.seed)
    case = Case(TEST, subject, f"4 samples a call, {target.name} V={target.vocab}")
    rows = plan.rows(target.vocab, plan.pair_draws // 4)
    hidden, weight = target.tensors(rows, plan.device, plan.dtype)
    histogram = Histogram(target.vocab, 1, plan.device)
    seed = plan.case_seed(case.name)
    for position in range(-(-plan.pair_draws // (4 * rows))):
        ids = forms.by_row(library, hidden, weight, seed=seed, position=position, num_samples=4).ids
        histogram.add(ids.flatten())
    drawn = histogram.result()
    if drawn.out_of_range:
        return case.rule("range", True, drawn.draws, drawn.complaint)
    return case.fit("", chi_squared(drawn.counts[0], target.probabilities), drawn.draws)


def _on_device(s: _Setting) -> int:
    seed, position = 0x1234_5678_9ABC_DEF0, 77
    host = forms.plain(s.library, s.hidden, s.weight, seed=seed, position=position).ids
    return _differ(host, forms.by_row(s.library, s.hidden, s.weight, seed=seed, position=position).ids)


def _greedy(s: _Setting) -> int:
    best = s.logits.argmax(1)[:, None].to(s.device)  # ties: argmax of torch on the CPU takes the first
    first = (s.logits == s.logits.amax(1, keepdim=True)).long().argmax(1)[:, None].to(s.device)
    assert bool((best == first).all())
    return sum(
        _differ(forms.plain(s.library, s.hidden, s.weight, seed=seed, position=0, temperature=0.0).ids, first)
        for seed in (0, 1, 2)
    )


def _implementation(subject: Subject, reference: Library, s: _Setting) -> TestResult:
    """The plain torch implementation on the same device: differing tokens must be near-ties."""
    case = Case(TEST, subject, "implementation and reference")
    assert subject.noise is not None
    if s.call(s.library).implementation == s.call(reference).implementation:
        return case.skip("this is the reference")
    other = (s.draw(reference) != s.plain).cpu()[:, 0]
    close = oracle.expected(s.logits, 1.0, s.seeds, s.positions, 0, subject.noise).close
    wrong = int((other & ~close).sum())
    return case.rule("", wrong > 0, ROWS, f"{wrong} tokens differ beyond rounding", "share of wrong tokens")


def _graph_result(case: Case, s: _Setting) -> TestResult:
    """A call that cannot be captured breaks the rule: a serving engine would have to run it outside its
    graph.
    """
    try:
        wrong = _graph(s)
    except RuntimeError as error:
        return case.rule("", True, ROWS, f"not captured: {str(error).splitlines()[0]}")
    return case.rule("", wrong > 0, ROWS, f"{wrong} tokens differ", "share of wrong tokens")


def _graph(s: _Setting) -> int:
    """One captured call, replayed with positions advanced on the device, against eager calls."""
    positions = s.positions.clone()
    # made outside: a tensor from a Python number is a copy from the host, which a graph would freeze
    temperature = torch.ones((), device=s.device)
    allowed = forms.everything(ROWS, s.weight)

    def call() -> Tensor:
        return forms.by_row(
            s.library, s.hidden, s.weight, seed=s.seeds, position=positions, temperature=temperature,
            allowed=allowed,
        ).ids  # fmt: skip

    side = torch.cuda.Stream(s.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), checked(False):  # FSAMPLE_CHECK may check all others
        captured = call()
    wrong = 0
    for step in range(8):
        positions.copy_((s.positions + step) % 2**32)
        graph.replay()
        replayed = captured.clone()
        wrong += _differ(replayed, call())
    return wrong
