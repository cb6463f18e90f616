"""The four forms in which the tests call our library.

A kernel is compiled for the options that a call gives, not for their values, and each new set of options
costs a fresh GPU machine 5 to 20 s. So a test that needs one option calls a form that has it, and the others
of the form get values that change nothing: a mask that allows everything, a soft-cap far above the logits, a
bias of 0. `plain` is what users run, and what every test of the distribution draws with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsample_cli.exactness import targets
from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.subject import Library
from fsample_kernels.types import SampleResult

# A power of two, so dividing by it and multiplying rounds nothing; and tanh z = z in fp32 for z < 2^-13.
NO_CAP = 2.0**24
# One batch of each class that a kernel may be compiled for: up to 16, 32, 64, 128 and 192 rows, and more.
# Tests draw with the last; the others are compared with it.
BATCHES = (1, 17, 33, 100, 130, 194)


def plain(
    library: Library,
    hidden: Tensor,
    weight: Tensor,
    *,
    seed: int,
    position: int,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> SampleResult:
    """Numbers for all rows and no option besides."""
    return library(
        hidden, weight, seed=seed, position=position, temperature=temperature, vocab_size=vocab_size
    )


def by_row(
    library: Library,
    hidden: Tensor,
    weight: Tensor,
    *,
    seed: int | Tensor,
    position: int | Tensor,
    temperature: float | Tensor = 1.0,
    allowed: Tensor | None = None,
    num_samples: int = 1,
) -> SampleResult:
    """Temperature, seed and position in tensors of the device, 0-d or [B], and a packed mask [B, V / 32]."""
    return library(
        hidden,
        weight,
        seed=_on(hidden, seed),
        position=_on(hidden, position),
        temperature=_on(hidden, temperature),
        mask=everything(hidden.shape[0], weight) if allowed is None else allowed,
        num_samples=num_samples,
    )


def with_mass(
    library: Library,
    hidden: Tensor,
    weight: Tensor,
    *,
    seed: int | Tensor,
    position: int | Tensor,
    temperature: float = 2.0,
    allowed: Tensor | None = None,
    logit_scale: float = 2.0,
    softcap: float = NO_CAP,
    logit_bias: Tensor | None = None,
    vocab_size: int | None = None,
) -> SampleResult:
    """`by_row` with every transform, logprob and lse. By default the temperature undoes the scale exactly."""
    return library(
        hidden,
        weight,
        seed=_on(hidden, seed),
        position=_on(hidden, position),
        temperature=_on(hidden, temperature),
        mask=everything(hidden.shape[0], weight) if allowed is None else allowed,
        logit_scale=logit_scale,
        softcap=softcap,
        logit_bias=torch.zeros(weight.shape[0], device=weight.device) if logit_bias is None else logit_bias,
        vocab_size=vocab_size,
        want_logprob=True,
        want_lse=True,
    )


def masked(
    library: Library, hidden: Tensor, weight: Tensor, *, seed: int, position: int, mask: Tensor
) -> SampleResult:
    """`plain` with a bool mask [V]."""
    return library(hidden, weight, seed=seed, position=position, mask=mask)


def each(library: Library, plan: Plan) -> None:
    """Make one small call of every form and batch class that the tests use: what there is to compile."""
    target = targets.flat(129)
    for rows in BATCHES:
        hidden, weight = target.tensors(rows, plan.device, plan.dtype)
        by_row(library, hidden, weight, seed=0, position=0)
        if rows in (BATCHES[0], BATCHES[-1]):
            plain(library, hidden, weight, seed=0, position=0)
    by_row(library, hidden, weight, seed=0, position=0, num_samples=2)
    with_mass(library, hidden, weight, seed=0, position=0)
    mask = torch.ones(target.vocab, dtype=torch.bool, device=plan.device)
    masked(library, hidden, weight, seed=0, position=0, mask=mask)


def everything(rows: int, weight: Tensor) -> Tensor:
    """A packed mask [rows, ceil(V / 32)] that allows all; one row in memory."""
    words = -(-weight.shape[0] // 32)
    return torch.full((1, words), -1, dtype=torch.int32, device=weight.device).expand(rows, -1)


def pack(allowed: Tensor) -> Tensor:
    """bool [B, V] -> int32 words [B, ceil(V / 32)], bit i of word w is token 32 w + i: what grammar engines
    produce.
    """
    rows, vocab = allowed.shape
    words = -(-vocab // 32)
    bits = torch.zeros(rows, words * 32, dtype=torch.int64, device=allowed.device)
    bits[:, :vocab] = allowed
    values = (bits.view(rows, words, 32) << torch.arange(32, device=allowed.device)).sum(2)
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)


def unpack(words: Tensor, vocab: int) -> Tensor:
    """The bool mask [B, V] of packed words: the inverse of `pack`."""
    bits = (words[:, :, None] >> torch.arange(32, device=words.device)) & 1
    return bits.flatten(1)[:, :vocab] != 0


def _on(hidden: Tensor, value: float | Tensor) -> Tensor:
    """A number as a tensor of the device: int64, or fp32 for a float."""
    if isinstance(value, Tensor):
        return value
    dtype = torch.float32 if isinstance(value, float) else torch.int64
    return torch.full((), value, dtype=dtype, device=hidden.device)  # a launch; a copy would wait for the GPU
