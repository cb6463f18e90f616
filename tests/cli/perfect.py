"""A right sampler, numpy and float64, and wrong ones made from it: what the tests of `verify` test with."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsample_cli.exactness import forms
from fsample_cli.exactness.result import TestResult
from fsample_cli.exactness.subject import Subject
from fsample_kernels.types import SampleResult

Floats = NDArray[np.float64]


class Perfect:
    """Inverse CDF on float64 sums; numpy's Philox makes the uniforms, keyed by seed and position.

    `library` takes the options of `fsample_kernels.sample` that the battery uses, and gives what they
    promise: a row is its seed, position and allowed ids, whatever is beside it. The allowed ids enter the
    counter, so shards that are drawn with one seed share nothing. `salt` tells one perfect sampler from
    another.
    """

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def subject(self) -> Subject:
        return Subject("perfect", self.draw, library=self.library)

    def draw(self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int) -> Tensor:
        return self.library(hidden, weight, temperature=temperature, seed=seed, position=position).ids[:, 0]

    def library(
        self,
        hidden: Tensor,
        weight: Tensor,
        *,
        seed: int | Tensor,
        position: int | Tensor,
        temperature: float | Tensor = 1.0,
        mask: Tensor | None = None,
        num_samples: int = 1,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        logit_bias: Tensor | None = None,
        vocab_size: int | None = None,
        want_logprob: bool = False,
        want_lse: bool = False,
    ) -> SampleResult:
        rows = len(hidden)
        kinds, kind = _kinds(hidden, mask, temperature)
        y = logit_scale * (hidden[kinds].double() @ weight.double().T)  # [C, V]
        y = y if softcap is None else softcap * torch.tanh(y / softcap)
        y = y if logit_bias is None else y + logit_bias.double()
        y = y.masked_fill(~_allowed(mask, kinds, y.shape[1], vocab_size), -torch.inf)
        degrees = torch.as_tensor(temperature, dtype=torch.float64).expand(rows)[kinds, None]
        scaled = (y / torch.where(degrees > 0, degrees, 1.0)).numpy()
        marks = [zlib.crc32(np.isfinite(row).tobytes()) for row in scaled]
        u = self._uniforms(seed, position, [marks[c] for c in kind.tolist()], num_samples)  # [B, K]
        top = scaled.max(1, initial=-1e300, keepdims=True)
        cumulative = np.exp(scaled - top).cumsum(1)
        ids = np.empty((rows, num_samples), dtype=np.int64)
        for c, edges in enumerate(cumulative):
            here = kind.numpy() == c
            if edges[-1] == 0:
                ids[here] = -1
            elif float(degrees[c]) == 0:
                ids[here] = scaled[c].argmax()
            else:
                ids[here] = np.searchsorted(edges, u[here] * edges[-1], side="right")
        drawn = torch.from_numpy(ids)
        lse = torch.from_numpy(top[:, 0] + np.log(np.maximum(cumulative[:, -1], 1e-300)))  # [C]
        lse[torch.from_numpy(cumulative[:, -1]) == 0] = -torch.inf
        of_ids = torch.from_numpy(scaled)[kind[:, None], drawn.clamp(min=0)]
        return SampleResult(
            drawn,
            (of_ids - lse[kind, None]).float().clamp(max=0) if want_logprob else None,
            lse[kind].float() if want_lse else None,
            None,
            "numpy",
        )

    def _uniforms(
        self, seed: int | Tensor, position: int | Tensor, marks: list[int], num_samples: int
    ) -> Floats:
        """[B, K]. A seed or position of its own is a row's stream; otherwise rows follow in one."""
        rows = len(marks)
        seeds, positions = _listed(seed), _listed(position)
        if len(seeds) > 1 or len(positions) > 1:
            whole = seeds * (rows // len(seeds)), positions * (rows // len(positions))
            keys = zip(*whole, marks, strict=True)
            return np.array([[self._stream(*key, k).random() for k in range(num_samples)] for key in keys])
        u = np.empty((rows, num_samples))
        of_row = np.array(marks)
        for mark in set(marks):
            here = of_row == mark
            for k in range(num_samples):
                u[here, k] = self._stream(seeds[0], positions[0], mark, k).random(rows)[here]
        return u

    def _stream(self, seed: int, position: int, mark: int, sample: int) -> np.random.Generator:
        key = np.array([seed % 2**64, position], dtype=np.uint64)
        counter = np.array([0, mark, sample, self.salt], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))


def _listed(value: int | Tensor) -> list[int]:
    """One for all rows, or one a row."""
    return value.reshape(-1).tolist() if isinstance(value, Tensor) else [value]


def _kinds(hidden: Tensor, mask: Tensor | None, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Rows [C] that stand for all, and which of them each row [B] is like."""
    by_row = (mask is not None and mask.dim() == 2 and mask.stride(0) != 0) or (
        isinstance(temperature, Tensor) and temperature.dim() == 1
    )
    every = torch.arange(len(hidden))
    if by_row:
        return every, every
    if bool((hidden == hidden[:1]).all()):
        return every[:1], torch.zeros_like(every)
    _, kind = torch.unique(hidden, dim=0, return_inverse=True)
    first = torch.full((int(kind.max()) + 1,), len(hidden)).scatter_reduce(0, kind, every, "amin")
    return first, kind


def _allowed(mask: Tensor | None, kinds: Tensor, vocab: int, vocab_size: int | None) -> Tensor:
    """bool [C, V] or [1, V]."""
    within = (torch.arange(vocab) < (vocab if vocab_size is None else vocab_size))[None]
    if mask is None:
        return within
    rows = mask if mask.dim() == 2 else mask[None].expand(int(kinds.max()) + 1, -1)
    return within & (rows[kinds] if mask.dtype == torch.bool else forms.unpack(rows[kinds], vocab))


def continuous(results: Iterable[TestResult]) -> dict[tuple[str, str], list[float]]:
    """The p-values over many runs, by test and case, that should be uniform: of statistics with a continuous
    law, if they are no more than finely discrete themselves. The largest correlation's are a bound.
    """
    cases: dict[tuple[str, str], list[float]] = {}
    for result in results:
        seen = result.sensitivity
        if result.p_value is not None and seen is not None and seen.law in ("chi-squared", "normal"):
            if seen.tries == 1:
                cases.setdefault((result.test, result.case), []).append(result.p_value)
    return {key: found for key, found in cases.items() if len(set(found)) > 0.5 * len(found)}


def _by_row(
    hidden: Tensor, weight: Tensor, temperature: float, seed: int
) -> tuple[Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed % 2**63)
    p = torch.softmax(hidden.double() @ weight.double().T / temperature, dim=1)
    u = torch.rand(len(hidden), 1, generator=generator, dtype=torch.float64)
    return torch.searchsorted(p.cumsum(1), u).clamp(max=p.shape[1] - 1)[:, 0], p, generator


def right(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    return _by_row(hidden, weight, temperature, seed)[0]


def one_percent_bias(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    ids, _, generator = _by_row(hidden, weight, temperature, seed)
    return torch.where(torch.rand(len(ids), generator=generator) < 0.01, 5, ids)


def past_the_end(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    ids, _, generator = _by_row(hidden, weight, temperature, seed)
    return torch.where(torch.rand(len(ids), generator=generator) < 0.001, weight.shape[0], ids)


def never_the_rarest_third(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    ids, p, _ = _by_row(hidden, weight, temperature, seed)
    rare = p.argsort(1)[:, : p.shape[1] // 3]
    return torch.where((rare == ids[:, None]).any(1), p.argmax(1), ids)


def probabilities_as_logits(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    p = torch.softmax(hidden.double() @ weight.double().T / temperature, dim=1)
    u = torch.rand(len(p), 1, generator=torch.Generator().manual_seed(seed % 2**63), dtype=torch.float64)
    return torch.searchsorted(torch.softmax(p, 1).cumsum(1), u).clamp(max=p.shape[1] - 1)[:, 0]


def floats(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    return right(hidden, weight, temperature, seed).float()


def softmax_in_bf16(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    """Probabilities and their running sum in bf16, which has 8 bits."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    p = torch.softmax((hidden @ weight.T).bfloat16() / temperature, dim=1)
    u = torch.rand(len(p), 1, generator=generator)
    return torch.searchsorted(p.cumsum(1).float(), u).clamp(max=p.shape[1] - 1)[:, 0]
