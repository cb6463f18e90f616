"""The safety net, `implementation="unfused"`, in the interpreter: fp32 logits in memory, one pass over them.

Its product asks for fp32 out of 16-bit inputs, which only a GPU has: here the same sums come from copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsample_kernels import reference, words
from fsample_kernels.ops import unfused_sample
from fsample_kernels.types import Problem, SampleResult

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

MakeProblem = Callable[..., Problem]


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(hidden: Tensor, weight: Tensor) -> Tensor:
        assert hidden.dtype == weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
        return hidden.float() @ weight.float().T

    monkeypatch.setattr(unfused_sample, "product", product)


def check(problem: Problem) -> SampleResult:
    """Tokens, log-probabilities, lse, logits and keys as the reference has them."""
    got, want = unfused_sample.run(problem), reference.run(problem)
    assert got.implementation == "unfused"
    assert got.ids.tolist() == want.ids.tolist()
    for name in ("logprob", "lse", "logits"):
        ours, theirs = getattr(got, name), getattr(want, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5, equal_nan=True)
    result, keys = unfused_sample.candidates(problem)
    _, other_keys = reference.candidates(problem)
    assert result.implementation == "unfused" and result.ids.tolist() == got.ids.tolist()
    assert words.key_ids(keys).tolist() == words.key_ids(other_keys).tolist()
    scores, others = words.key_scores(keys), words.key_scores(other_keys)
    torch.testing.assert_close(scores, others, rtol=1e-5, atol=2e-5)
    return got


# V: one id, beside a block of 128, several tiles with a tail; B: one row, and more than a short tile takes.
@pytest.mark.parametrize("noise", ["grouped", "element"])
@pytest.mark.parametrize(
    "B, V, dtype", [(1, 1, torch.bfloat16), (3, 129, torch.float16), (9, 2100, torch.bfloat16)]
)
def test_small_odd_sizes(make_problem: MakeProblem, noise: str, B: int, V: int, dtype: torch.dtype) -> None:
    check(make_problem(B, V, 16, dtype, noise=noise, want_logprob=True, want_lse=True))


@pytest.mark.parametrize("noise", ["grouped", "element"])
def test_every_option_reaches_the_pass(make_problem: MakeProblem, noise: str) -> None:
    generator = torch.Generator().manual_seed(5)
    options: dict[str, object] = {
        "temperature": torch.tensor([0.0, 0.5, 2.0, -1.0]), "seed": torch.tensor([1, 2, 3, 4]),
        "position": torch.tensor([9, 8, 7, 6]), "num_samples": 2, "logit_scale": 2.0, "softcap": 3.0,
        "head_bias": torch.randn(300, generator=generator),
        "logit_bias": torch.randn(300, generator=generator),
        "mask": torch.rand(4, 300, generator=generator) > 0.3, "vocab_size": 299, "store_logits": True,
        "sparse_bias": (torch.tensor([0, 1, 2, 1]), torch.tensor([298, 0, 128, 0]), torch.arange(4.0)),
    }  # fmt: skip
    problem = make_problem(
        4, 300, 16, torch.bfloat16, noise=noise, want_logprob=True, want_lse=True, **options
    )
    got = check(problem)
    assert got.ids[3].tolist() == [-1, -1] and bool((got.ids[:3] >= 0).all())
    without = dataclasses.replace(problem, head_bias=None)
    assert unfused_sample.run(without).ids.tolist() != got.ids.tolist()  # the options are not no-ops


def test_a_bad_row_is_minus_one_and_disturbs_no_other(make_problem: MakeProblem) -> None:
    problem = make_problem(4, 300, 16, torch.bfloat16, num_samples=3)
    clean = check(problem).ids
    assert problem.hidden is not None
    problem.hidden[2, 0] = torch.nan
    got = check(problem).ids
    assert got[2].tolist() == [-1] * 3
    assert got[[0, 1, 3]].tolist() == clean[[0, 1, 3]].tolist()


def test_shards_draw_what_the_whole_head_draws(make_problem: MakeProblem) -> None:
    """Two shards at a multiple of 128: the better key of the two is the whole head's token."""
    problem = make_problem(3, 300, 16, torch.bfloat16)
    assert problem.weight is not None
    whole = check(problem).ids
    shards = [
        dataclasses.replace(problem, weight=problem.weight[first:end], first_id=first)
        for first, end in ((0, 128), (128, 300))
    ]
    keys = torch.stack([unfused_sample.candidates(shard)[1] for shard in shards])
    assert words.key_ids(keys.amax(0)).tolist() == whole.tolist()
