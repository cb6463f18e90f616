"""Stage 2 by itself: what no kernel before it leaves on a CPU."""

from __future__ import annotations

import pytest
import torch

from fsample_kernels import validation
from fsample_kernels.ops import arguments
from fsample_kernels.ops.reduce_candidates import reduce_candidates
from fsample_kernels.types import Problem
from fsample_kernels.validation import Shard

pytestmark = pytest.mark.interpreter


def problem(num_samples: int) -> Problem:
    """A shard of ids 128 to 255 of which vocab_size leaves none."""
    return validation.head_problem(
        torch.zeros(3, 16), torch.zeros(128, 16), shard=Shard(128, 256), temperature=1.0, seed=1, position=0,
        num_samples=num_samples, head_bias=None, logit_scale=1.0, softcap=None, logit_bias=None, mask=None,
        vocab_size=100, noise="grouped", math="fast", want_logprob=True, want_lse=True, store_logits=False,
    )  # fmt: skip


def launch_of(K: int, T: int) -> arguments.Launch:
    """K samples of 3 rows with T candidates each."""
    return arguments.Launch(
        T, arguments.row_arguments(problem(K)), torch.zeros(K, 3, T), torch.zeros(K, 3, T, dtype=torch.int32),
        torch.zeros(K, 3, T), torch.zeros(3, T), torch.ones(3, T), None, None,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_without_a_candidate_nothing_is_read() -> None:
    """As the Hopper kernel leaves a shard that lies past vocab_size: buffers without memory."""
    result = reduce_candidates(problem(2), launch_of(2, 0))
    assert result.ids.tolist() == [[-1, -1]] * 3
    assert result.logprob is not None and bool(result.logprob.isnan().all())
    assert result.lse is not None and bool((result.lse == -torch.inf).all())


@pytest.mark.parametrize("T", [2, 1025])
def test_a_tie_goes_to_the_lower_id_wherever_it_lies(T: int) -> None:
    """A CTA's candidate may be any id; 1025 of them are two rounds."""
    launch = launch_of(1, T)
    launch.ids[:] = torch.arange(T).flip(0)
    assert reduce_candidates(problem(1), launch).ids.tolist() == [[0]] * 3
