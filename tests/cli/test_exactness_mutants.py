"""Every planted fault is seen, the control passes, and the oracle of the pathwise test is itself right."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fsample_kernels
from fsample_cli.exactness import battery, forms, invariance, oracle, pathwise, ranks, self_test, targets
from fsample_cli.exactness.goodness_of_fit import chi_squared
from fsample_cli.exactness.mutants import MUTANTS, Mutant, control
from fsample_cli.exactness.plan import LEVELS, make_plan
from fsample_cli.exactness.subject import Library, Subject
from fsample_kernels import checked, guard, noise, validation
from fsample_kernels import oracle as library_oracle
from fsample_kernels.distributed import merge
from fsample_kernels.types import SampleResult

ALGORITHMS = ("element", "grouped", "online")
PLANTED = {
    "bias-half-percent", "warm", "noise-cut", "u-is-one", "rows-share", "ranks-share", "samples-share",
    "seed-frozen", "mask-before-cap", "tile-edge", "coarse-ties", "bf16-candidates", "counters-meet",
    "merge-reuses",
}  # fmt: skip


def nothing(*_: object) -> None:
    return None


def test_every_fault_of_the_list_has_a_mutant() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert set(names) >= PLANTED and len(names) == len(set(names))
    for mutant in MUTANTS:
        assert mutant.level in LEVELS and mutant.test in battery.NAMES
        mutant.narrow(make_plan(mutant.level, "cpu", torch.float32, 0, 0.01))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_seen(mutant: Mutant) -> None:
    seen = self_test.seen(mutant, "cpu", torch.float32, 0, 0.01)  # the seed of the command
    assert seen.verdict == "pass", seen
    assert seen.broken or (seen.p_value is not None and seen.p_value < 0.01 / self_test.FAMILY)


def test_a_fault_that_is_not_there_goes_unseen_and_fails_the_self_test() -> None:
    harmless = Mutant("harmless", "none", "independence", "quick", control().draw)
    first, second = self_test.run("cpu", torch.float32, 0, 0.01, nothing, nothing, [harmless])
    assert first.sampler == "control" and first.verdict == "pass"
    assert second.verdict == "fail" and "NOT SEEN" in second.note


def subject(algorithm: str, library: Library) -> Subject:
    return Subject("ours", control().draw, None, library, algorithm)


def ours(algorithm: str) -> Library:
    def library(*args: Tensor, **options: Any) -> SampleResult:
        return fsample_kernels.sample(*args, noise=algorithm, **options)  # type: ignore[arg-type]

    return library


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_oracle_draws_from_the_softmax(algorithm: str) -> None:
    """By itself, without any implementation: 6,000 draws of a skewed target over two blocks of groups."""
    target = targets.skewed(200, 3)
    rows = 6000
    logits = torch.from_numpy(target.logits).expand(rows, -1)
    ids = oracle.expected(logits, 1.0, 5, 0, 0, algorithm).ids
    assert 1e-4 < chi_squared(np.bincount(ids.numpy(), minlength=200), target.probabilities).p_value


def test_a_turn_of_the_oracle_has_the_mass_of_its_member() -> None:
    """2,001 evenly spaced uniforms through the tree: each member gets its share of them, masked ones none."""
    x = torch.log2(torch.tensor([0.3, 0.0, 0.2, 0.05] + [0.0] * 27 + [0.45], dtype=torch.float64))
    words = [int((k + 0.5) / 2001 * 2**32) for k in range(2001)]
    found = np.bincount([oracle._turns(x, word, 0)[0] for word in words], minlength=32) / 2001
    assert np.abs(found - torch.exp2(x).numpy()).max() < 3 / 2001


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_pathwise_sees_one_wrong_token_and_names_it(algorithm: str) -> None:
    plan = make_plan("quick", "cpu", torch.float32, 1, 0.01)
    right = pathwise.run(subject(algorithm, ours(algorithm)), plan)
    assert not any(result.broken for result in right), right

    def swapped(*args: Tensor, **options: Any) -> SampleResult:
        result = ours(algorithm)(*args, **options)
        ids = result.ids.clone()
        ids[20, -1] ^= 1
        return result._replace(ids=ids)

    wrong = pathwise.run(subject(algorithm, swapped), plan)
    assert all(result.broken for result in wrong)
    assert "row 20" in wrong[0].note and "margin" in wrong[0].note


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_oracles_written_apart_agree(algorithm: str) -> None:
    """This one and the library's: the same tokens for two samples of every row."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(9, 9000, generator=generator) * 3
    seeds = torch.randint(2**62, (9,), generator=generator)
    problem = validation.logits_problem(
        logits, temperature=0.7, seed=seeds, position=12, num_samples=2, logit_scale=1.0, softcap=None,
        logit_bias=None, mask=None, vocab_size=None, noise=algorithm,  # type: ignore[arg-type]
        math="fast", want_logprob=False, want_lse=False,
    )  # fmt: skip
    theirs = library_oracle.oracle(problem).ids
    mine = [oracle.expected(logits, 0.7, seeds, 12, sample, algorithm).ids for sample in (0, 1)]
    assert torch.equal(theirs, torch.stack(mine, dim=1))


def test_ranks_that_share_noise_or_merge_wrongly_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("quick", "cpu", torch.float32, 1, 0.01)
    right = battery.judge(ranks.run(subject("grouped", ours("grouped")), plan), 0.01)
    assert battery.passed(right), right

    right_merge = merge.merge_log_mass

    def heaviest(ids: Tensor, lse: Tensor, *, seed: int, position: int) -> merge.Merged:
        return right_merge(ids, lse * 3, seed=seed, position=position)

    def local(hidden: Tensor, weight: Tensor, *, mask: Tensor, **options: Any) -> SampleResult:
        """Noise by place in the shard: as if every shard started at id 0."""
        allowed = forms.unpack(mask, weight.shape[0])
        first = int(allowed[0].int().argmax())
        moved = allowed[0].roll(-first)
        result = ours("grouped")(hidden, weight.roll(-first, 0), mask=moved, **options)
        return result._replace(ids=result.ids + first)

    shared = battery.judge(ranks.run(subject("grouped", local), plan), 0.01)
    seen = {r.case for r in shared if r.verdict == "fail"}
    assert {f"{kind}: {what}" for kind in ("equal", "pairs") for what in ("ranks", "tiles")} <= seen
    monkeypatch.setattr(merge, "merge_log_mass", heaviest)
    wrong = battery.judge(ranks.run(subject("grouped", ours("grouped")), plan), 0.01)
    assert sum(r.verdict == "fail" for r in wrong) >= 2


def test_invariance_sees_samples_that_are_no_draws_of_a_call() -> None:
    """Samples after the first from a flat distribution: the first, which other checks compare, is right."""

    def flat_after_one(*args: Tensor, num_samples: int = 1, **options: Any) -> SampleResult:
        result = ours("grouped")(*args, num_samples=num_samples, **options)
        ids = result.ids.clone()
        ids[:, 1:] = torch.randint(args[1].shape[0], ids[:, 1:].shape)
        return result._replace(ids=ids)

    plan = make_plan("quick", "cpu", torch.float32, 1, 0.01)
    judged = battery.judge(invariance.run(subject("grouped", flat_after_one), plan), 0.01)
    assert "4 samples a call, skewed V=512" in {r.case for r in judged if r.verdict == "fail"}


def test_the_reference_is_not_compared_with_itself() -> None:
    plan = make_plan("quick", "cpu", torch.float32, 1, 0.01)
    found = invariance.run(
        dataclasses.replace(subject("grouped", ours("grouped")), reference=ours("grouped")), plan
    )
    assert [r.case for r in found if r.skipped] == ["implementation and reference"]


def test_pathwise_sees_noise_of_another_algorithm() -> None:
    plan = make_plan("quick", "cpu", torch.float32, 1, 0.01)
    assert all(r.broken for r in pathwise.run(subject("element", ours("grouped")), plan))


def test_what_a_graph_captures_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSAMPLE_CHECK has every call checked, which a capture refuses."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in (
        ("Stream", lambda device: stream), ("current_stream", lambda: stream), ("stream", nullcontext),
        ("CUDAGraph", lambda: SimpleNamespace(replay=lambda: None)), ("graph", nullcontext),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    seen: list[bool] = []

    def library(*values: Any, **options: Any) -> Any:
        seen.append(guard.active())
        return ours("grouped")(*values, **options)

    setting = invariance._Setting(library, make_plan("quick", "cpu", torch.float32, 1, 0.01), 512)
    seen.clear()
    with checked():
        invariance._graph(setting)
    assert seen == [True, False] + [True] * 8


def test_invariance_sees_local_noise_and_forgotten_seeds() -> None:
    """Noise by place in the batch breaks the row order; reading only the first seed breaks the batch."""
    plan = make_plan("quick", "cpu", torch.float32, 1, 0.01)

    def by_place(hidden: Tensor, *args: Tensor, seed: int | Tensor = 0, **options: Any) -> SampleResult:
        place = torch.arange(hidden.shape[0]) if isinstance(seed, Tensor) and seed.dim() else 0
        return ours("grouped")(hidden, *args, seed=seed + place, **options)

    def first_seed(hidden: Tensor, *args: Tensor, seed: int | Tensor = 0, **options: Any) -> SampleResult:
        if isinstance(seed, Tensor) and seed.dim():
            seed = seed[:1].expand(hidden.shape[0])
        return ours("grouped")(hidden, *args, seed=seed, **options)

    for library in (by_place, first_seed):
        broken = {r.case for r in invariance.run(subject("grouped", library), plan) if r.broken}
        assert "row order" in broken
    assert not any(r.broken for r in invariance.run(subject("grouped", ours("grouped")), plan))


def test_the_oracle_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="algorithm"):
        oracle.expected(torch.zeros(1, 4), 1.0, 0, 0, 0, "other")
    one = oracle.expected(torch.zeros(2, 1), 1.0, 0, 0, 0, "element")
    assert one.ids.tolist() == [0, 0] and not bool(one.close.any())
    assert noise.BLOCK == 128
