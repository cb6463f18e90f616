"""Loading samplers, their contracts, and what each says when it cannot run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsample_cli import samplers
from fsample_cli.errors import InputError, UsageError
from fsample_cli.exactness.claims import claim
from fsample_cli.measure import gate
from fsample_cli.samplers.protocol import (
    SamplerRaised,
    SamplerUnavailable,
    ShapeUnsupported,
    Transform,
    TwoStage,
)
from fsample_cli.samplers.seeding import call_seed

CPU = torch.device("cpu")


def tensors(rows: int = 4, vocab: int = 300, hidden: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(vocab, hidden, generator=generator) / 4
    return torch.randn(rows, hidden, generator=generator), weight


@pytest.mark.parametrize("name", ["fused", "fused:element", "fused+store", "unfused", "multinomial-eager"])
def test_seed_and_position_decide_the_ids(name: str) -> None:
    hidden, weight = tensors(rows=64)
    sampler = samplers.load(name)
    sampler.prepare(hidden, weight, temperature=0.7)

    def draw(seed: int, position: int) -> list[int]:
        ids = sampler.sample(hidden, weight, temperature=0.7, seed=seed, position=position)
        assert ids.shape == (64,) and not ids.is_floating_point()
        return [int(i) for i in ids]

    assert draw(3, 5) == draw(3, 5)
    assert draw(3, 5) != draw(3, 6)
    assert draw(3, 5) != draw(4, 5)


@pytest.mark.parametrize("name", ["fused", "fused:element", "unfused", "multinomial-eager", "gemm"])
def test_right_samplers_pass_the_gate_with_a_transform(name: str) -> None:
    hidden, weight = tensors(rows=64)
    transform = Transform(logit_scale=3.0, softcap=2.0)
    sampler = samplers.load(name, transform)
    sampler.prepare(hidden, weight, temperature=0.5)
    if not sampler.draws:  # the bare product knows no transform
        transform = Transform()
    verdict = gate.check_shape(sampler, hidden, weight, temperature=0.5, seed=0, transform=transform)
    assert verdict.passed, verdict.reason


def test_the_gate_sees_a_forgotten_softcap() -> None:
    hidden, weight = tensors(rows=64)
    sampler = samplers.load("multinomial-eager")
    sampler.prepare(hidden, weight, temperature=0.5)
    wanted = Transform(logit_scale=3.0, softcap=2.0)
    verdict = gate.check_shape(sampler, hidden, weight, temperature=0.5, seed=0, transform=wanted)
    assert not verdict.passed and "order of probability" in verdict.reason


def test_fused_names_algorithm_and_implementation() -> None:
    sampler = samplers.load("fused:online:reference")
    hidden, weight = tensors()
    sampler.prepare(hidden, weight, temperature=1.0)
    assert (sampler.name, sampler.algorithm, sampler.implementation) == ("fused", "online", "reference")
    with pytest.raises(UsageError, match="fused takes grouped, element, online"):
        samplers.load("fused:best")


def test_two_samplers_are_called_unfused_and_differ_in_their_logits() -> None:
    library = samplers.load("fused:unfused")
    assert library.name == "fused" and "implementation='unfused'" in library.description
    assert "sample_logits(hidden @ weight.T" in samplers.load("unfused").description
    assert claim("fused:unfused") != claim("unfused")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown sampler 'topk'.*fused, gemm, multinomial-eager"):
        samplers.load("topk")


def test_two_categories_too_many_are_unsupported_and_not_a_crash() -> None:
    weight = torch.zeros(1, 1).expand(2**24 + 1, 1)
    for name in ("multinomial", "multinomial-eager"):
        with pytest.raises(ShapeUnsupported, match=r"at most 2\^24 categories, got V = 16777217"):
            samplers.load(name).prepare(torch.zeros(1, 1), weight, temperature=1.0)


def test_baselines_do_not_divide_by_temperature_zero() -> None:
    hidden, weight = tensors()
    for name in ("multinomial-eager", "multinomial", "race"):
        with pytest.raises(ShapeUnsupported, match="temperature"):
            samplers.load(name).prepare(hidden, weight, temperature=0.0)


@pytest.mark.parametrize("name", ["fi1", "fi2"])
def test_flashinfer_says_what_it_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = tensors()
    with pytest.raises(SamplerUnavailable, match="needs an NVIDIA GPU; run on a machine with"):
        samplers.load(name).prepare(hidden, weight, temperature=1.0)
    on_gpu: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)  # as good as not installed
    with pytest.raises(SamplerUnavailable, match="flashinfer.*pip install flashinfer-python"):
        samplers.load(name).prepare(on_gpu, weight, temperature=1.0)


@pytest.mark.parametrize("name", ["multinomial", "race"])
def test_without_a_compiler_the_compiled_ones_are_unavailable(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight = tensors()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda command: None)
    with pytest.raises(SamplerUnavailable, match=r"needs a C\+\+ compiler .*apt-get install"):
        samplers.load(name).prepare(hidden, weight, temperature=1.0)


@pytest.mark.parametrize("name", ["multinomial", "race"])
def test_compiled_samplers_keep_up_with_more_shapes_than_dynamo_allows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the eager back end traces as inductor does, and costs no C++ compilation for each of the ten shapes
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda body, **options: compile_(body, backend="eager", **options))
    sampler = samplers.load(name)
    for rows in range(1, 11):  # dynamo's own limit is 8
        hidden, weight = tensors(rows=rows)
        sampler.prepare(hidden, weight, temperature=1.0)
        ids = sampler.sample(hidden, weight, temperature=1.0, seed=1, position=rows)
        assert ids.shape == (rows,) and int(ids.max()) < 300
    verdict = gate.check_small(
        sampler, hidden_size=16, dtype=torch.float32, device=CPU, temperature=1.0, seed=0
    )
    assert verdict.passed, verdict.reason


def test_only_separable_samplers_are_two_stage() -> None:
    separable = {name for name in samplers.NAMES if isinstance(samplers.load(name), TwoStage)}
    assert separable == {"multinomial-eager", "fi1", "fi2", "unfused"}


def test_mixing_keeps_seeds_and_positions_apart() -> None:
    words = {call_seed(seed, position) for seed in range(100) for position in range(100)}
    assert len(words) == 10_000 and max(words) < 2**63


GOOD = """
import torch
def draw(hidden, weight, temperature, seed):
    g = torch.Generator().manual_seed(seed)
    probs = torch.softmax((hidden @ weight.T).double() / temperature, -1)
    return torch.multinomial(probs, 1, generator=g)
def floats(hidden, weight, temperature, seed):
    return torch.zeros(hidden.shape[0])
def nothing(hidden, weight, temperature, seed):
    return None
value = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


def test_a_users_function_is_a_sampler(mine: Path) -> None:
    hidden, weight = tensors()
    sampler = samplers.load(f"{mine}:draw")
    sampler.prepare(hidden, weight, temperature=1.0)
    assert sampler.sample(hidden, weight, temperature=1.0, seed=1, position=2).shape == (4,)
    verdict = gate.check_small(
        sampler, hidden_size=16, dtype=torch.float32, device=CPU, temperature=1.0, seed=0
    )
    assert verdict.passed, verdict.reason


def test_a_users_module_is_found_in_the_working_directory(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mine.parent)
    monkeypatch.syspath_prepend("")  # restores sys.path afterwards
    assert samplers.load("mine:draw").name == "mine:draw"


@pytest.mark.parametrize(
    ("function", "message"),
    [("floats", r"integer ids of shape \[B\] = \[4\]"), ("nothing", "must return a tensor")],
)
def test_what_a_users_function_returns_is_checked(mine: Path, function: str, message: str) -> None:
    hidden, weight = tensors()
    with pytest.raises((ShapeUnsupported, SamplerRaised), match=message):
        samplers.load(f"{mine}:{function}").prepare(hidden, weight, temperature=1.0)


def test_a_users_function_that_is_not_there_is_named(mine: Path) -> None:
    with pytest.raises(UsageError, match="has no function 'value'"):
        samplers.load(f"{mine}:value")
    with pytest.raises(InputError, match="no such file"):
        samplers.load(f"{mine.parent}/other.py:draw")
    with pytest.raises(UsageError, match="no module 'no_such_module'"):
        samplers.load("no_such_module:draw")


def test_a_users_function_takes_four_arguments(mine: Path) -> None:
    with mine.open("a") as file:
        file.write("\ndef few(hidden, weight): ...\ndef many(*args): ...\n")
    with pytest.raises(UsageError, match=r"few: must take four arguments, \(hidden, weight\) does not"):
        samplers.load(f"{mine}:few")
    assert samplers.load(f"{mine}:many").draws


def test_a_users_function_cannot_know_a_softcap(mine: Path) -> None:
    hidden, weight = tensors()
    with pytest.raises(ShapeUnsupported, match="soft-cap"):
        samplers.load(f"{mine}:draw", Transform(softcap=30.0)).prepare(hidden, weight, temperature=1.0)
