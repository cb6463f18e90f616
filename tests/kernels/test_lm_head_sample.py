"""The fused kernel in the interpreter against the reference with the same noise: everything is equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fsample_kernels import reference, sample, sample_logits, words
from fsample_kernels.ops import arguments, configs, lm_head_sample
from fsample_kernels.ops.reduce_candidates import reduce_candidates
from fsample_kernels.types import Problem, SampleResult

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

MakeProblem = Callable[..., Problem]
EVERYTHING = {"want_logprob": True, "want_lse": True, "store_logits": True}
GENERATOR = torch.Generator()


def check(problem: Problem) -> SampleResult:
    """Same ids as the reference. Seeds are fixed and no score is a near tie, with any library's matmul."""
    got, want = lm_head_sample.run(problem), reference.run(problem)
    assert got.ids.tolist() == want.ids.tolist()
    for got_field, want_field in zip(got[1:4], want[1:4], strict=True):
        torch.testing.assert_close(got_field, want_field, rtol=1e-5, atol=2e-5, equal_nan=True)
    return got


# V: one id, one less and one more than a tile, several tiles with a tail. D: one column, a multiple of the
# tile, not one. B: one row, a part of a row tile, more than one row tile.
@pytest.mark.parametrize("noise", ["grouped", "element"])
@pytest.mark.parametrize("B, V, D", [(1, 1, 1), (3, 127, 40), (1, 129, 32), (3, 1000, 65), (65, 129, 24)])
def test_small_odd_sizes(make_problem: MakeProblem, noise: str, B: int, V: int, D: int) -> None:
    check(make_problem(B, V, D, noise=noise, **EVERYTHING))


@pytest.mark.parametrize("noise", ["grouped", "element"])
@pytest.mark.parametrize(
    "config",
    [
        configs.Config(16, 128, 64, 4, 3, vocab_on_m=True),
        configs.Config(16, 256, 32, 4, 3),
        configs.Config(64, 256, 128, 8, 4, vocab_on_m=True),
    ],
)
def test_tile_shapes_do_not_change_ids(
    make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch, noise: str, config: configs.Config
) -> None:
    monkeypatch.setattr(configs, "pick", lambda *_: config)
    check(make_problem(19, 300, 72, torch.float16, noise=noise, **EVERYTHING))


@pytest.mark.parametrize("noise", ["grouped", "element"])
def test_rows_have_their_own_parameters(make_problem: MakeProblem, noise: str) -> None:
    """Greedy rows among sampled ones, seeds that use all 64 bits, positions at both ends and past them."""
    problem = make_problem(
        5, 300, 32, noise=noise, num_samples=2, temperature=torch.tensor([0.0, 0.7, 2.0, torch.nan, 1.0]),
        seed=torch.tensor([5, -7, 1 << 40, 3, -(1 << 63)]),
        position=torch.tensor([0, 2**32 - 1, 3, 4, 2**32]),
        **EVERYTHING,
    )  # fmt: skip
    result = check(problem)
    assert result.ids[3:].eq(-1).all() and result.ids[:3].ge(0).all()
    assert problem.hidden is not None and problem.weight is not None
    assert result.ids[0].eq((problem.hidden[0] @ problem.weight.T).argmax()).all()
    solo = dataclasses.replace(
        problem, hidden=problem.hidden[2:3], temperature=2.0, seed=torch.tensor([1 << 40]), position=3
    )
    assert lm_head_sample.run(solo).ids.tolist() == result.ids[2:3].tolist()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[NDArray[np.uint64]]:
    """The addresses that kernels read, lanes that a mask leaves out aside."""
    from triton.runtime import interpreter

    addresses: list[NDArray[np.uint64]] = []
    load = interpreter.InterpreterBuilder.create_masked_load

    def record(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        addresses.append(ptrs.data[mask.data])
        return load(builder, ptrs, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", record)
    return addresses


# 17 rows leave 15 lanes of a row tile, 33 fill one and open another for a single row.
@pytest.mark.parametrize("B", [5, 17, 33])
def test_rows_of_a_request_use_its_parameters_and_load_no_others(
    loaded: list[NDArray[np.uint64]], B: int
) -> None:
    """Requests of two, two and one rows at successive positions, again and again: each row is as alone."""
    row = torch.arange(B)
    request = torch.tensor([0, 0, 1, 1, 2])[row % 5]
    parameters = {
        "temperature": torch.tensor([0.5, 1.5, 0.0])[request],
        "seed": torch.tensor([1, 2, 3])[request],
        "position": torch.tensor([10, 11, 3, 4, 8])[row % 5] + 20 * (row // 5),
    }
    inside = {name: torch.cat([of, of, of])[B : 2 * B] for name, of in parameters.items()}
    generator = torch.Generator().manual_seed(9)
    hidden = torch.randint(-2, 3, (B, 16), generator=generator).float()  # sums that no order rounds
    weight = torch.randint(-8, 9, (129, 16), generator=generator) / 8
    ids = sample(hidden, weight, **inside, implementation="triton").ids  # type: ignore[arg-type]
    addresses = np.concatenate(loaded)
    for name, tensor in inside.items():
        size = tensor.element_size()
        start = tensor.data_ptr() - B * size
        at = (addresses[(addresses >= start) & (addresses < start + 3 * B * size)] - start) // size
        assert np.unique(at).tolist() == list(range(B, 2 * B)), name
    for one in range(B - 1, -1, -4):  # of every request, of both row tiles
        alone: dict[str, Any] = {
            "temperature": float(parameters["temperature"][one]), "seed": parameters["seed"][one : one + 1],
            "position": int(parameters["position"][one]), "implementation": "triton",
        }  # fmt: skip
        assert torch.equal(sample(hidden[one : one + 1], weight, **alone).ids[0], ids[one]), one


@pytest.mark.parametrize("rows", [1, 256])
def test_row_parameters_far_apart_are_copied(make_problem: MakeProblem, rows: int) -> None:
    """A row times a stride past 2^31, counted in int32, is a place before the tensor."""
    far = {
        name: torch.empty(1 << 42, dtype=dtype, device="meta").as_strided((rows,), ((1 << 31) // rows,))
        for name, dtype in (("temperature", torch.float32), ("seed", torch.int64), ("position", torch.int64))
    }
    given = arguments.row_arguments(make_problem(rows, 9, 8, **far))
    assert all(given[f"{name}_stride"] == given[f"{name}_ptr"].stride(0) == 1 for name in far)  # type: ignore[attr-defined]
    near = {name: tensor.as_strided((rows,), (((1 << 31) - 1) // rows,)) for name, tensor in far.items()}
    given = arguments.row_arguments(make_problem(rows, 9, 8, **near))
    assert all(given[f"{name}_ptr"] is near[name] for name in near)
    shared = arguments.row_arguments(make_problem(rows, 9, 8, seed=torch.tensor(3).expand(rows)))
    assert shared["seed_stride"] == 0


def test_copied_row_parameters_are_the_same(
    make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "REACH", 8)
    heats = torch.tensor([0.0, 0.7, 2.0, 1.0, 3.0])[:, None].repeat(1, 2)[:, 0]
    seeds, positions = torch.arange(15).view(5, 3)[:, 1], torch.arange(20).view(5, 4)[:, 2]
    check(make_problem(5, 300, 32, temperature=heats, seed=seeds, position=positions))


def test_rows_colder_than_the_minimum_are_greedy(make_problem: MakeProblem) -> None:
    """Down to temperatures whose reciprocal is none in fp32; the minimum itself is not."""
    heats = torch.tensor([0.0, 1e-45, 1e-38, 1e-25, 2.0**-65, 2.0**-64])
    result = check(make_problem(6, 300, 32, num_samples=2, temperature=heats, **EVERYTHING))
    assert result.logits is not None and result.lse is not None
    assert result.lse[:5].tolist() == result.logits[:5].amax(1).tolist()


def test_a_number_and_a_tensor_draw_the_same(make_problem: MakeProblem) -> None:
    numbers = make_problem(3, 200, 16, seed=2**64 - 5, position=2**32 - 1, temperature=0.75)
    tensors = dataclasses.replace(
        numbers,
        seed=torch.tensor(-5),
        position=torch.tensor(2**32 - 1),
        temperature=torch.tensor([0.75]).expand(3),
    )
    assert torch.equal(lm_head_sample.run(numbers).ids, lm_head_sample.run(tensors).ids)


def test_samples_differ_and_do_not_depend_on_their_number(make_problem: MakeProblem) -> None:
    five = lm_head_sample.run(make_problem(1, 256, 16, num_samples=5, temperature=5.0)).ids
    two = lm_head_sample.run(make_problem(1, 256, 16, num_samples=2, temperature=5.0)).ids
    assert torch.equal(five[:, :2], two)
    assert len(set(five[0].tolist())) >= 4


TRANSFORMS: dict[str, Callable[[int, int], dict[str, object]]] = {
    "head_bias": lambda B, V: {"head_bias": torch.randn(V, generator=GENERATOR).to(torch.bfloat16)},
    "scale": lambda B, V: {"logit_scale": 0.0625},
    "softcap": lambda B, V: {"softcap": 1.5},
    "bias_row": lambda B, V: {"logit_bias": 3 * torch.randn(2 * V, generator=GENERATOR)[::2]},
    "bias_matrix": lambda B, V: {"logit_bias": 3 * torch.randn(V, B, generator=GENERATOR).T.half()},
    "sparse": lambda B, V: {"sparse_bias": sparse(B, V)},
    "mask_row": lambda B, V: {"mask": torch.rand(V, generator=GENERATOR) > 0.9},
    "mask_matrix": lambda B, V: {
        "mask": torch.rand(B, V - 9, generator=GENERATOR) > 0.5,
        "vocab_size": V - 9,
    },
    "bitmask": lambda B, V: {"bitmask": bits(B, V)},
    "vocab_size": lambda B, V: {"vocab_size": 130},
}


def sparse(B: int, V: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Repeats, both ends of the vocabulary, the ends of a tile, many in one row, in no order."""
    ids = torch.cat(
        [torch.tensor([V - 1, 0, 127, 128, 5, 5]), torch.randint(0, V, (20,), generator=GENERATOR)]
    )
    rows = torch.randint(0, B, ids.shape, generator=GENERATOR)
    return rows, ids, 4 * torch.randn(ids.shape, generator=GENERATOR)


def bits(B: int, V: int) -> torch.Tensor:
    words = torch.randint(-(1 << 31), 1 << 31, (B, -(-V // 32) + 3), generator=GENERATOR).to(torch.int32)
    return words[:, : -(-V // 32)]  # a padded stride


@pytest.mark.parametrize("noise", ["grouped", "element"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform(make_problem: MakeProblem, noise: str, name: str) -> None:
    GENERATOR.manual_seed(11)
    check(make_problem(3, 300, 24, noise=noise, **EVERYTHING, **TRANSFORMS[name](3, 300)))


@pytest.mark.parametrize("noise", ["grouped", "element"])
def test_all_transforms_at_once(make_problem: MakeProblem, noise: str) -> None:
    GENERATOR.manual_seed(12)
    fields: dict[str, object] = {}
    for name in ("head_bias", "scale", "softcap", "bias_matrix", "sparse", "mask_row", "bitmask"):
        fields |= TRANSFORMS[name](3, 300)
    check(
        make_problem(
            3, 300, 24, noise=noise, **EVERYTHING, **(fields | {"logit_scale": 3.0, "vocab_size": 290})
        )
    )


def test_the_mask_comes_after_the_softcap(make_problem: MakeProblem) -> None:
    """All logits at -1000, cap 1: an early mask would leave a forbidden id as likely as the others."""
    problem = make_problem(32, 140, 16, softcap=1.0, vocab_size=7)
    assert problem.hidden is not None and problem.weight is not None
    problem.hidden.fill_(0.0)[:, 0] = 1.0
    problem.weight.fill_(0.0)[:, 0] = -1000.0
    assert lm_head_sample.run(problem).ids.max() < 7


@pytest.mark.parametrize("noise", ["grouped", "element"])
def test_poisoned_rows_disturb_no_other(make_problem: MakeProblem, noise: str) -> None:
    problem = make_problem(
        6, 300, 16, noise=noise, temperature=torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 1.0]), **EVERYTHING
    )
    clean = lm_head_sample.run(problem).ids
    assert problem.hidden is not None and problem.weight is not None
    problem.hidden[1, 0] = torch.nan
    problem.hidden[3, 5] = torch.inf
    result = check(problem)
    assert result.ids[[1, 3]].eq(-1).all() and torch.equal(result.ids[[0, 2, 4, 5]], clean[[0, 2, 4, 5]])


def test_a_forbidden_nan_is_only_forbidden(make_problem: MakeProblem) -> None:
    problem = make_problem(3, 300, 16, mask=torch.arange(300) != 17)
    assert problem.weight is not None
    problem.weight[17] = torch.nan
    assert check(problem).ids.ge(0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_allowed(make_problem: MakeProblem, temperature: float) -> None:
    mask = torch.ones(3, 300, dtype=torch.bool)
    mask[1] = False
    result = check(make_problem(3, 300, 16, mask=mask, temperature=temperature, **EVERYTHING))
    assert result.ids[1] == -1 and result.lse is not None and result.lse[1] == -torch.inf


@pytest.mark.parametrize(
    "row, token, value, spoiled",
    [(1, 300, 1.0, [1]), (1, -1, 1.0, [1]), (1, 5, torch.nan, [1]), (1, 5, torch.inf, [1]),
     (3, 5, 1.0, [0, 1, 2]), (-1, 5, 1.0, [0, 1, 2])],
)  # fmt: skip
def test_bad_sparse_bias(
    make_problem: MakeProblem, row: int, token: int, value: float, spoiled: list[int]
) -> None:
    triple = (torch.tensor([0, row]), torch.tensor([4, token]), torch.tensor([2.0, value]))
    result = check(make_problem(3, 300, 16, sparse_bias=triple))
    assert result.ids[:, 0].eq(-1).nonzero().flatten().tolist() == spoiled


def test_greedy_takes_the_lowest_id_of_a_tie(make_problem: MakeProblem) -> None:
    problem = make_problem(1, 400, 16, temperature=0.0)
    assert problem.weight is not None
    best = problem.weight[100].clone()
    problem.weight[[130, 131, 260, 399]] = 5 * best  # within a tile, and in three tiles
    problem.weight[100] = 0.0
    assert check(dataclasses.replace(problem, hidden=best[None])).ids.tolist() == [[130]]


def test_strides_and_misalignment(make_problem: MakeProblem) -> None:
    problem = make_problem(3, 200, 33)
    assert problem.hidden is not None and problem.weight is not None
    storage = torch.zeros(3 * 80 + 1)
    hidden = storage[1:].view(3, 80)[:, 1:67:2].copy_(problem.hidden)
    weight = torch.zeros(33, 201)[:, 1:].copy_(problem.weight.T).T
    assert (
        check(dataclasses.replace(problem, hidden=hidden, weight=weight)).ids.tolist()
        == check(problem).ids.tolist()
    )


@pytest.mark.parametrize("noise", ["grouped", "element"])
@pytest.mark.parametrize("first_id", [128, 200, 1])
def test_a_shard_draws_by_global_id(make_problem: MakeProblem, noise: str, first_id: int) -> None:
    GENERATOR.manual_seed(13)
    fields = {
        "logit_bias": torch.randn(3, 600, generator=GENERATOR),
        "bitmask": bits(3, 600),
        "sparse_bias": sparse(3, 600),
    }
    check(
        make_problem(
            3, 300, 16, noise=noise, first_id=first_id, vocab_size=first_id + 290, **EVERYTHING, **fields
        )
    )


@pytest.mark.parametrize("noise", ["grouped", "element"])
def test_keys_say_what_other_shards_compare(make_problem: MakeProblem, noise: str) -> None:
    """Scores and ids of the reference; a greedy row, one without an allowed id, two that are bad."""
    mask = torch.ones(5, 300, dtype=torch.bool)
    mask[2] = False
    temperature = torch.tensor([1.0, 0.0, 1.0, torch.nan, 1.0])
    position = torch.tensor([7, 7, 7, 7, -1])
    problem = make_problem(
        5, 300, 16, noise=noise, num_samples=2, mask=mask, temperature=temperature, position=position,
        first_id=128, vocab_size=428,
    )  # fmt: skip
    problem = dataclasses.replace(problem, mask=torch.cat([torch.ones(5, 128).bool(), mask], 1))
    got, keys = lm_head_sample.candidates(problem)
    want, wanted = reference.candidates(problem)
    assert torch.equal(got.ids, want.ids) and torch.equal(words.key_ids(keys), want.ids)
    scores, exact = (words.key_scores(k) for k in (keys, wanted))
    torch.testing.assert_close(scores, exact, rtol=1e-5, atol=1e-5)
    assert (exact[2] == -torch.inf).all() and (exact[3:] == torch.inf).all() and exact[:2].isfinite().all()


def test_store_logits_changes_nothing_else(make_problem: MakeProblem) -> None:
    problem = make_problem(3, 300, 16, num_samples=2)
    stored = lm_head_sample.run(dataclasses.replace(problem, store_logits=True))
    assert torch.equal(stored.ids, lm_head_sample.run(problem).ids) and stored.logits is not None


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("B, V", [(3, 129), (40, 300)])
def test_every_slot_is_written(
    make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch, B: int, V: int
) -> None:
    seen: list[arguments.Launch] = []

    def record(problem: Problem, launch: arguments.Launch, keys: None) -> SampleResult:
        seen.append(launch)
        return reduce_candidates(problem, launch, keys)

    monkeypatch.setattr(lm_head_sample, "reduce_candidates", record)
    result = lm_head_sample.run(make_problem(B, V, 16, num_samples=2, **EVERYTHING))
    for buffer in (
        *(getattr(seen[0], name) for name in ("scores", "winner_logits", "tile_max", "tile_sum", "logits")),
        *result[1:4],
    ):
        assert isinstance(buffer, torch.Tensor) and not buffer.isnan().any()
    for ids in (seen[0].ids, result.ids):
        assert ids.min() >= 0 and ids.max() < V


def test_bf16_is_refused_where_the_interpreter_would_draw_nonsense() -> None:
    hidden, weight = torch.ones(2, 16, dtype=torch.bfloat16), torch.ones(40, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="multiplies the bits of bf16.*use 'auto' or 'reference'"):
        sample(hidden, weight, seed=1, implementation="triton")
    assert sample(hidden, weight, seed=1).implementation == "reference"
    assert sample_logits(hidden, seed=1, implementation="triton").implementation == "triton"
