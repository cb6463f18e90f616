"""`fsample verify --self-test`: every planted fault must be seen, and the sampler without one must pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fsample_cli.exactness import battery
from fsample_cli.exactness.mutants import MUTANTS, Mutant, control
from fsample_cli.exactness.plan import make_plan
from fsample_cli.exactness.result import TestResult

# More p-values than a run of our three algorithms has at any level (about 870 at deep): a fault counts as
# seen only if it would be in such a run.
FAMILY = 900


def run(
    device: str,
    dtype: torch.dtype,
    seed: int,
    alpha: float,
    stage: Callable[[str], None],
    tick: Callable[[], None],
    mutants: Sequence[Mutant] = MUTANTS,
) -> list[TestResult]:
    """The clearest result for each mutant, verdict "pass" where the fault was seen; the control's worst
    comes first.
    """
    results = [_control(device, dtype, seed, alpha, stage)]
    tick()
    for mutant in mutants:
        stage(f"{mutant.name}: {mutant.test}")
        results.append(seen(mutant, device, dtype, seed, alpha))
        tick()
    return results


def _control(
    device: str, dtype: torch.dtype, seed: int, alpha: float, stage: Callable[[str], None]
) -> TestResult:
    started = time.perf_counter()
    subject = control()
    plan = make_plan("quick", device, dtype, seed, alpha, compiled=False)
    found: list[TestResult] = []
    for check in battery.TESTS:
        stage(f"{subject.name}: {check.name}")
        found += battery.run_check(check, subject, plan)
    judged = battery.judge(found, alpha)
    worst = min(judged, key=lambda result: (result.verdict != "fail", result.adjusted_p or 2.0))
    return replace(
        worst,
        case=f"{len(judged)} statistics, worst: {worst.test} {worst.case}",
        seconds=time.perf_counter() - started,
        note="no fault planted",
    )


def seen(mutant: Mutant, device: str, dtype: torch.dtype, seed: int, alpha: float) -> TestResult:
    """One mutant against its test; stops nowhere early, so the clearest statistic is shown."""
    started = time.perf_counter()
    check = next(check for check in battery.TESTS if check.name == mutant.test)
    plan = mutant.narrow(make_plan(mutant.level, device, dtype, seed, alpha, compiled=False))
    found = battery.judge(battery.run_check(check, mutant.subject(), plan), alpha)
    clearest = min(
        found, key=lambda result: (not result.broken, 1.0 if result.p_value is None else result.p_value)
    )
    chance = None if clearest.p_value is None else battery.weighed_p(clearest)
    clear = clearest.broken or (chance is not None and chance <= alpha / FAMILY)
    return replace(
        clearest,
        seconds=time.perf_counter() - started,
        verdict="pass" if clear else "fail",
        note=f"{mutant.fault}: {'seen' if clear else 'NOT SEEN'} at level {mutant.level}",
    )
