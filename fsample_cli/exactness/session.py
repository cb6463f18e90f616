"""One run of `fsample verify` from its options: samplers loaded, tests run, everything judged together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from fsample_cli import samplers
from fsample_cli.errors import MissingError
from fsample_cli.exactness import battery, fit_rows, noise_words, self_test
from fsample_cli.exactness.loading import Loader, is_compiled
from fsample_cli.exactness.outcomes import Case
from fsample_cli.exactness.plan import Level, Plan, for_online, make_plan
from fsample_cli.exactness.result import TestResult, timed
from fsample_cli.exactness.subject import BadIds, Subject
from fsample_cli.interrupts import name_of, unwrapped
from fsample_cli.measure import inputs
from fsample_cli.results import VerifyResult
from fsample_cli.samplers.protocol import (
    Sampler,
    SamplerRaised,
    SamplerUnavailable,
    ShapeUnsupported,
    Transform,
)
from fsample_cli.workloads import Workload

DISTINCT_ROWS = 4
DRAWS = 10_000
CPU_LOGITS = 2**29  # what the default number of draws of a row test costs at most on a CPU, all rows together


@dataclass(frozen=True)
class Request:
    """What to verify.

    `draws` None: 10,000 a row, fewer where the vocabulary is large and the device a CPU.
    """

    names: tuple[str, ...]
    workload: Workload
    batches: tuple[int, ...]
    draws: int | None
    temperature: float
    alpha: float
    level: Level
    tests: tuple[str, ...]
    device: str
    seed: int
    ranks: int = 1  # of the process group that this process is in; all of them run the same request


@dataclass(frozen=True)
class Verified:
    """All results, judged, and the draws a row got.

    `seconds` is what the run took from its request to its verdicts, `seconds_outside_tests` the part of it in
    no result: heads made, kernels compiled ahead, verdicts, and a test that was stopped.

    `stopped` is the signal that ended the run early, if one did: the results are then those of the tests that
    had ended, judged together, and `next_up` is the one that had not.
    """

    results: list[VerifyResult]
    draws: int
    seconds: float
    seconds_outside_tests: float
    stopped: str = ""
    next_up: str = ""


@dataclass(frozen=True)
class Head:
    """The workload's tensors: states [R, D], weight [V, D], and the float64 logits [R, V] they must give."""

    states: Tensor
    weight: Tensor
    logits: Tensor
    transform: Transform


def run(request: Request, stage: Callable[[str], None], tick: Callable[[], None]) -> Verified:
    """Every test of every sampler, judged together. `stage` and `tick` (once per sampler and test) show
    progress.

    SIGINT, and SIGTERM where `terminable`, ends a run on one rank early; before the first test has ended they
    raise KeyboardInterrupt as ever. Raises UsageError for a sampler name that is unknown, MissingError
    where memory does not hold the head or nothing at all could be tested.
    """
    began = time.perf_counter()
    dtype = inputs.TORCH_DTYPES[request.workload.dtype]
    loader = Loader(request.device, dtype, request.ranks)
    for name in request.names:  # a misspelt one is found before anything runs
        with suppress(SamplerUnavailable):
            loader.make(name, Transform())
    head = load_head(request)
    real = () if request.workload.checkpoint is None else tuple(row.numpy() for row in head.logits)
    kernels, torch_code = (
        make_plan(
            request.level,
            request.device,
            dtype,
            request.seed,
            request.alpha,
            real,
            compiled,
            len(request.names),
        )
        for compiled in (True, False)
    )
    if request.device == "cuda":
        stage("compiling")
        hidden = head.states[torch.arange(max(request.batches), device="cuda") % len(head.states)]
        stage(loader.compile_all(request.names, hidden, head.weight, kernels) or "every kernel was compiled")
        if request.ranks > 1:
            dist.barrier()  # a rank that still compiles is waited for here, and not by a kernel of another
    draws = request.draws or default_draws(request)
    found: list[TestResult] = []
    loaded: dict[str, Sampler] = {}
    stopped = next_up = ""
    for name, test in parts(request.names, request.tests):
        stage(f"{name}: {test}")
        start = time.perf_counter()
        try:
            with unwrapped():
                results, sampler = _one_test(name, test, request, draws, loader, head, kernels, torch_code)
        except KeyboardInterrupt as stop:
            if request.ranks > 1 or not found:  # the other ranks are inside a call that this one has left
                raise
            stopped, next_up = name_of(stop), f"{name}: {test}"
            break
        ended = time.perf_counter()
        found += timed(results, start, ended)
        if sampler is not None:
            loaded[name] = sampler
        stage(f"{name}: {test} took {ended - start:.1f} s")
        tick()
    # the definition alone says nothing of a sampler, unless nothing else was asked
    of_samplers = [result for result in found if result.test != noise_words.TEST] or found
    if not stopped and all(result.skipped for result in of_samplers):
        raise MissingError(f"verify: nothing could be tested: {of_samplers[0].note}")
    judged = battery.judge(found, request.alpha)
    rows = [_record(result, loaded.get(result.sampler)) for result in judged]
    seconds = round(time.perf_counter() - began, 4)
    outside = round(seconds - sum(row.seconds or 0.0 for row in rows), 4)
    return Verified(rows, draws, seconds, outside, stopped, next_up)


def parts(names: Sequence[str], tests: Sequence[str]) -> list[tuple[str, str]]:
    """(sampler, test) in the order of a run. What is tested of a definition that ours share is one part."""
    ours = [name for name in names if name.partition(":")[0] == "fused"]
    found = [
        (name, test) for name, test in product(names, tests) if test != noise_words.TEST or name not in ours
    ]
    if ours and noise_words.TEST in tests:
        found.append((noise_words.DEFINITION, noise_words.TEST))
    return found


def _one_test(
    name: str,
    test: str,
    request: Request,
    draws: int,
    loader: Loader,
    head: Head,
    kernels: Plan,
    torch_code: Plan,
) -> tuple[list[TestResult], Sampler | None]:
    """Results of one test of one sampler, and the sampler, where it could run."""
    case = Case(test, Subject(name, _never), "")
    if name == noise_words.DEFINITION:
        return noise_words.run(case.subject, kernels), None
    try:
        if test == fit_rows.TEST:
            sampler, subject = loader.load(name, head.transform)
            return _rows(subject, head, request, draws), sampler
        sampler, subject = loader.load(name)
        check = next(check for check in battery.TESTS if check.name == test)
        plan = kernels if is_compiled(name) else torch_code
        sized = for_online(plan) if subject.noise == "online" else plan
        return battery.run_check(check, subject, sized), sampler
    except (SamplerUnavailable, ShapeUnsupported) as error:
        if samplers.is_user_function(name):
            raise
        return [case.skip(str(error).removeprefix(f"{name}: "))], None


def run_self_test(
    device: str, dtype: str, seed: int, alpha: float, stage: Callable[[str], None], tick: Callable[[], None]
) -> list[VerifyResult]:
    """The control and every mutant, in the records of a run; verdict "fail" marks a fault that went
    unseen.
    """
    found = self_test.run(device, inputs.TORCH_DTYPES[dtype], seed, alpha, stage, tick)
    return [_record(result, None) for result in found]


def default_draws(request: Request) -> int:
    """10,000 a row; on a CPU as many as CPU_LOGITS allow, and at least 200."""
    if request.device != "cpu":
        return DRAWS
    return min(DRAWS, max(200, CPU_LOGITS // (DISTINCT_ROWS * request.workload.vocab)))


def load_head(request: Request) -> Head:
    """The workload's own tensors, padding rows of the head cut off and an output bias turned into a
    column.
    """
    workload, device = request.workload, request.device
    weight = inputs.load_weight(workload, device, request.seed)
    distinct = min(DISTINCT_ROWS, max(request.batches))
    states = inputs.make_hidden(workload, distinct, device, request.seed, weight)
    transform = Transform(workload.logit_scale, workload.softcap)
    logits = fit_rows.float64_logits(states, weight) * transform.logit_scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return Head(states, weight, logits, transform)


def _rows(subject: Subject, head: Head, request: Request, draws: int) -> list[TestResult]:
    results: list[TestResult] = []
    for batch in request.batches:
        distinct = min(batch, len(head.states))
        try:
            results += fit_rows.run(
                subject,
                head.states[:distinct],
                head.weight,
                head.logits[:distinct],
                batch=batch,
                draws=draws,
                temperature=request.temperature,
                seed=request.seed,
                scale=head.transform.logit_scale,
            )
        except BadIds as error:
            results.append(Case(fit_rows.TEST, subject, f"B={batch}").rule("ids", True, 0, str(error)))
        except SamplerRaised as error:
            results.append(Case(fit_rows.TEST, subject, f"B={batch}").rule("call", True, 0, error.message))
    return results


def _never(hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int) -> Tensor:
    raise AssertionError("a subject that only names a result never draws")


def _record(result: TestResult, sampler: Sampler | None) -> VerifyResult:
    seen = result.sensitivity
    words = result.case.split()
    batch = int(words[0][2:]) if result.test == fit_rows.TEST and words else None
    row = int(words[2]) if result.test == fit_rows.TEST and len(words) == 3 else None
    base, _, rest = result.sampler.partition(":")
    ours = base in ("fused", "fused+store")
    return VerifyResult(
        test=result.test,
        case=result.case,
        sampler=base if ours else result.sampler,
        algorithm=(rest or "grouped") if ours else None,
        implementation="" if sampler is None else sampler.implementation,
        batch=batch,
        row=row,
        draws=result.draws,
        statistic=result.statistic,
        dof=result.dof,
        p_value=result.p_value,
        p_adjusted=result.adjusted_p,
        verdict=result.verdict,
        effect="" if seen is None else seen.effect,
        seen_at_80=result.smallest_at_80,
        seen_at_99=result.smallest_at_99,
        deficit_at_80=result.deficit_at_80,
        seconds=round(result.seconds, 4),
        note=result.note,
    )
