"""The forms in which `verify` calls our library: neutral where they should be, few, and all warmed up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fsample_kernels
from fsample_cli.exactness import battery, forms, targets
from fsample_cli.exactness.plan import Level, Plan, make_plan
from fsample_cli.exactness.subject import Subject
from fsample_kernels import validation
from fsample_kernels.ops import configs, hopper_configs
from fsample_kernels.types import Problem, SampleResult

OPTIONS = ("head_bias", "softcap", "logit_bias", "sparse_bias", "mask", "bitmask")
IN_TENSORS = ("temperature", "seed", "position")


def problem_of(hidden: Tensor, weight: Tensor, noise: str, **options: Any) -> Problem:
    given: dict[str, Any] = {
        "temperature": 1.0, "seed": None, "position": 0, "num_samples": 1, "head_bias": None,
        "logit_scale": 1.0, "softcap": None, "logit_bias": None, "mask": None, "vocab_size": None,
        "noise": noise, "math": "fast", "want_logprob": False, "want_lse": False, "store_logits": False,
    }  # fmt: skip
    return validation.head_problem(hidden, weight, **(given | options))


def features(problem: Problem) -> tuple[str, ...]:
    """What decides which kernel is compiled, batch class and tile shape aside."""
    found = [name for name in OPTIONS if getattr(problem, name) is not None]
    found += [f"{name} tensor" for name in IN_TENSORS if isinstance(getattr(problem, name), Tensor)]
    found += ["scale"] if problem.logit_scale != 1 else []
    found += [name for name in ("want_logprob", "want_lse", "store_logits") if getattr(problem, name)]
    return (*found, "K" if problem.num_samples > 1 else "one")


def hopper_variant(problem: Problem) -> tuple[object, ...]:
    assert problem.weight is not None
    shape = hopper_configs.pick(problem.num_rows, problem.weight.shape[1], problem.num_samples, problem.noise)
    return (shape, *features(problem))


def portable_variant(problem: Problem) -> tuple[object, ...]:
    assert problem.weight is not None
    shape = configs.pick(torch.bfloat16, problem.num_rows, "sm_90")
    streams = problem.num_rows <= shape.block_b
    return (shape, streams, problem.weight.shape[1], *features(problem))


class Recorder:
    """A library that draws nothing and notes the problems it was asked to draw for."""

    def __init__(self, noise: str) -> None:
        self.noise = noise
        self.problems: list[Problem] = []

    def library(self, hidden: Tensor, weight: Tensor, **options: Any) -> SampleResult:
        problem = problem_of(hidden, weight, self.noise, **options)
        self.problems.append(problem)
        rows, samples = problem.num_rows, problem.num_samples
        return SampleResult(
            torch.zeros(rows, samples, dtype=torch.int64),
            torch.zeros(rows, samples) if problem.want_logprob else None,
            torch.zeros(rows) if problem.want_lse else None,
        )

    def subject(self) -> Subject:
        def draw(hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int) -> Tensor:
            options = {"temperature": temperature, "seed": seed, "position": position}
            return self.library(hidden, weight, **options).ids[:, 0]

        return Subject("recorded", draw, None, self.library, self.noise, None)


def tiny(plan: Plan) -> Plan:
    """A GPU's batches with few calls: batches, not calls, decide what is compiled."""
    most = plan.max_rows
    return dataclasses.replace(
        plan, device="cpu", fit_draws=most, fit_logits=2**26, focus_draws=most, tail_expected=60,
        tail_logits=most * 512, pair_draws=2**14, samples=2,
    )  # fmt: skip


@pytest.mark.parametrize(("noise", "level"), [("grouped", "deep"), ("element", "quick")])
def test_the_battery_needs_no_kernel_that_was_not_warmed_and_few_of_them(noise: str, level: Level) -> None:
    plan = tiny(make_plan(level, "cuda", torch.bfloat16, 0, 0.01))
    ran, warmed = Recorder(noise), Recorder(noise)
    for check in battery.TESTS:
        battery.run_check(check, ran.subject(), plan)
    forms.each(warmed.library, plan)
    for variant, most in ((hopper_variant, 9), (portable_variant, 10)):
        needed = {variant(problem) for problem in ran.problems}
        assert needed <= {variant(problem) for problem in warmed.problems}, variant.__name__
        assert len(needed) <= most, sorted(map(str, needed))


def test_neutral_values_change_no_token() -> None:
    hidden, weight = targets.skewed(1000, 1).tensors(40, "cpu", torch.float32)
    hidden *= torch.linspace(0.5, 8, 40)[:, None]
    plain = forms.plain(fsample_kernels.sample, hidden, weight, seed=5, position=6)
    others = (
        forms.by_row(fsample_kernels.sample, hidden, weight, seed=5, position=6),
        forms.with_mass(fsample_kernels.sample, hidden, weight, seed=5, position=6),
        forms.masked(
            fsample_kernels.sample, hidden, weight, seed=5, position=6, mask=torch.ones(1000).bool()
        ),
    )
    for other in others:
        assert torch.equal(plain.ids, other.ids)
    lse = fsample_kernels.sample(hidden, weight, seed=5, want_lse=True).lse
    assert others[1].lse is not None and lse is not None
    torch.testing.assert_close(others[1].lse, lse)


def test_packed_masks_are_the_bits_of_the_mask() -> None:
    allowed = torch.rand(3, 100, generator=torch.Generator().manual_seed(0)) < 0.5
    words = forms.pack(allowed)
    assert words.shape == (3, 4) and words.dtype == torch.int32
    assert [(int(words[1, 2]) >> bit) & 1 for bit in range(32)] == allowed[1, 64:96].int().tolist()
    assert torch.equal(forms.unpack(words, 100), allowed)
    assert forms.unpack(forms.everything(2, torch.zeros(33, 1)), 33).all()
