"""Ready before the first request: every kernel that a server's calls will need, compiled side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import api, checks, guard, reference, validation
from .bias_forms import LogitBias
from .chunks import device_of
from .types import Compiled, Implementation, Math, Noise, Problem

MAX_BATCH = 1 << 14  # every kernel's last batch class starts far below


def warm_up(
    weight: Tensor,
    *,
    max_batch: int = 256,
    temperature: float | Tensor = 1.0,
    seed: int | Tensor | None = None,
    position: int | Tensor = 0,
    num_samples: int = 1,
    head_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logit_bias: LogitBias | None = None,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
    noise: Noise = "grouped",
    math: Math = "fast",
    want_logprob: bool = False,
    want_lse: bool = False,
    store_logits: bool = False,
    implementation: Implementation = "auto",
    workers: int | None = None,
) -> tuple[Compiled, ...]:
    """Make ready what `sample(hidden, weight, ...)` with such arguments needs at 1..max_batch rows.

    Afterwards no such call compiles, whatever its batch size, seed, position and temperature. Kernels are
    compiled side by side, then each runs once, which loads it: a CUDA graph may capture its first use.

    Args:
        weight: [V, D], the head itself; hidden states are taken to be contiguous and of its dtype.
        max_batch: largest number of rows, at most 2**14.
        workers: kernels compiled at a time. None: one a processor that this process may use.
        temperature, seed, position, num_samples, head_bias, logit_scale, softcap, logit_bias, mask,
            vocab_size, noise, math, want_logprob, want_lse, store_logits, implementation: as the calls will
            have them. A number or a tensor, and the tensor's dtype, decide which kernel runs; values do not,
            and of a tensor with rows one row is enough. Arguments that are sometimes there and sometimes not
            need a call of `warm_up` with and one without.

    Returns:
        The kernels made ready, with the seconds each took; those already loaded are not in it. Empty on a
        CPU, where nothing is compiled.

    Raises:
        ValueError: as `sample`, and for max_batch or workers.

    Example:
        >>> import torch
        >>> from fsample_kernels import warm_up
        >>> warm_up(torch.zeros(1000, 16), max_batch=8, temperature=torch.ones(1), want_logprob=True)
        ()
    """
    _check(max_batch, workers)
    checks.matrix("weight", weight)
    rows = _rows_given(temperature, seed, position, logit_bias, mask)
    if weight.dtype not in checks.HALF_OR_SINGLE:
        raise ValueError(
            f"weight must be bfloat16, float16 or float32, got {checks.dtype_name(weight.dtype)}; "
            "convert it first, a quantised head with its scales"
        )
    hidden = torch.zeros(weight.shape[1], dtype=weight.dtype, device=weight.device).expand(rows, -1)
    example = validation.head_problem(
        hidden, weight, temperature=temperature, seed=seed, position=position, num_samples=num_samples,
        head_bias=head_bias, logit_scale=logit_scale, softcap=softcap, logit_bias=logit_bias, mask=mask,
        vocab_size=vocab_size, noise=noise, math=math, want_logprob=want_logprob, want_lse=want_lse,
        store_logits=store_logits,
    )  # fmt: skip
    return _make_ready(example, max_batch, implementation, workers)


def warm_up_logits(
    logits: Tensor,
    *,
    max_batch: int = 256,
    temperature: float | Tensor = 1.0,
    seed: int | Tensor | None = None,
    position: int | Tensor = 0,
    num_samples: int = 1,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logit_bias: LogitBias | None = None,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
    noise: Noise = "grouped",
    math: Math = "fast",
    want_logprob: bool = False,
    want_lse: bool = False,
    implementation: Implementation = "auto",
    workers: int | None = None,
) -> tuple[Compiled, ...]:
    """Make ready what `sample_logits(logits, ...)` with such arguments needs at 1..max_batch rows.

    Args:
        logits: [B, V]: an example, of which V, dtype and device count; the calls' own are taken to be
            contiguous.
        max_batch, workers: as in `warm_up`, and so are the others.

    Returns:
        The kernels made ready; see `warm_up`.

    Raises:
        ValueError: as `sample_logits`, and for max_batch or workers.

    Example:
        >>> import torch
        >>> from fsample_kernels import warm_up_logits
        >>> warm_up_logits(torch.zeros(1, 1000), max_batch=8)
        ()
    """
    _check(max_batch, workers)
    example = validation.logits_problem(
        logits, temperature=temperature, seed=seed, position=position, num_samples=num_samples,
        logit_scale=logit_scale, softcap=softcap, logit_bias=logit_bias, mask=mask, vocab_size=vocab_size,
        noise=noise, math=math, want_logprob=want_logprob, want_lse=want_lse,
    )  # fmt: skip
    if not len(logits):
        raise ValueError("logits must have a row, got B = 0; one is enough, which stands for those of a call")
    return _make_ready(example, max_batch, implementation, workers)


def compile_only(workers: int | None = None) -> contextlib.AbstractContextManager[Sequence[Compiled]]:
    """Within it, calls compile the kernels they need, side by side, and launch none of them.

    Their results are whatever lay in memory: drop them. For calls that `warm_up` does not make, such as
    those of `distributed.sample`: every rank then makes them within it, and meets the others in a barrier
    after it, since a call that was made once waits 30 s at most for a rank that still compiles. The list it
    gives is filled when it ends. In a CPU-only process nothing is compiled, and calls draw as ever.

    Raises:
        ValueError: at once, where workers is no integer or below 1.

    Example:
        >>> import torch
        >>> from fsample_kernels import compile_only, sample
        >>> with compile_only() as compiled:
        ...     _ = sample(torch.zeros(1, 16), torch.zeros(1000, 16), want_lse=True)
        >>> list(compiled)
        []
    """
    _check(1, workers)
    return _compile_only(workers)


@contextlib.contextmanager
def _compile_only(workers: int | None) -> Iterator[Sequence[Compiled]]:
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        yield ()
        return
    from .ops import compiling

    with compiling.compile_only(workers) as found:
        yield found


def compile_workers() -> int:
    """Kernels compiled at a time unless told otherwise: one a processor that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(max_batch: int, workers: int | None) -> None:
    if not 1 <= checks.integer("max_batch", max_batch) <= MAX_BATCH:
        raise ValueError(
            f"max_batch must be an integer in [1, {MAX_BATCH}], got {checks.shown(max_batch)}; larger "
            "batches use the kernels of the largest"
        )
    if workers is not None and checks.integer("workers", workers) < 1:
        raise ValueError(
            f"workers must be 1 or more, got {checks.shown(workers)}; None takes one a processor"
        )


def _rows_given(
    temperature: float | Tensor,
    seed: int | Tensor | None,
    position: int | Tensor,
    logit_bias: LogitBias | None,
    mask: Tensor | None,
) -> int:
    """The batch size that the example arguments are for; 1 where none has rows. Raises ValueError."""
    given: dict[str, int] = {}
    for name, value, dims in (
        ("temperature", temperature, 1), ("seed", seed, 1), ("position", position, 1),
        ("logit_bias", logit_bias, 2), ("mask", mask, 2),
    ):  # fmt: skip
        if isinstance(value, Tensor) and value.dim() == dims:
            checks.check_tensor(name, value)  # a nested one has no shape
            if not len(value):
                raise ValueError(f"{name} must have a row, got B = 0; one stands for those of a call")
            given[name] = len(value)
    if isinstance(logit_bias, Sequence) and logit_bias and isinstance(logit_bias[0], Mapping):
        given["logit_bias"] = len(logit_bias)
    if len(set(given.values())) > 1:
        raise ValueError(
            f"{', '.join(given)} must have one number of rows, got {', '.join(map(str, given.values()))}; "
            "one row each is enough"
        )
    return next(iter(given.values()), 1)


def _make_ready(
    example: Problem, max_batch: int, implementation: Implementation, workers: int | None
) -> tuple[Compiled, ...]:
    name = validation.implementation_name(implementation)
    example = dataclasses.replace(example, num_samples=max(1, example.num_samples))  # as `api.run` does
    problems = [with_rows(example, rows) for rows in class_starts(example, max_batch, name)]
    with compile_only(workers) as compiled:
        if api.choose(problems[0], name) is reference:
            return ()
        for problem in problems:
            api.run(problem, name)
    with guard.checked(False):  # the examples stand for shapes: their values may be none of a call's
        for problem in problems:
            api.run(problem, name)
    if device_of(example).type == "cuda":
        torch.cuda.synchronize(device_of(example))
    return tuple(compiled)


def class_starts(example: Problem, max_batch: int, name: Implementation) -> list[int]:
    """The smallest batch of every batch class up to max_batch: 1, and wherever a call's kernel changes."""
    starts: list[int] = []
    last: tuple[Any, ...] | None = None
    for rows in range(1, max_batch + 1):
        problem = _stretched(example, rows)
        module = api.choose(problem, name)
        shape = (module, None if module is reference else module.variant(problem))
        if shape != last:
            starts.append(rows)
        last = shape
    return starts


def _stretched(example: Problem, rows: int) -> Problem:
    """The example as a call of that many rows, for its shape alone: one row serves all of them."""
    hidden, logits = example.hidden, example.logits
    return dataclasses.replace(
        example,
        hidden=None if hidden is None else hidden[:1].expand(rows, -1),
        logits=None if logits is None else logits[:1].expand(rows, -1),
    )


def with_rows(example: Problem, rows: int) -> Problem:
    """The example with its first row that many times, in memory as a call's own tensors would be.

    Tables over the vocabulary are not copied: no kernel is compiled for the stride of a [B, V] table.
    """

    def per_row(value: Any) -> Any:
        return value[:1].expand(rows) if isinstance(value, Tensor) and value.dim() else value

    def table(value: Tensor | None) -> Tensor | None:
        return value[:1].expand(rows, -1) if value is not None and value.dim() == 2 else value

    def made(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.new_zeros(rows, value.shape[1])

    sparse = example.sparse_bias
    return dataclasses.replace(
        example,
        hidden=made(example.hidden),
        logits=made(example.logits),
        temperature=per_row(example.temperature),
        seed=per_row(example.seed),
        position=per_row(example.position),
        logit_bias=table(example.logit_bias),
        mask=table(example.mask),
        bitmask=None if example.bitmask is None else example.bitmask[:1].repeat(rows, 1),
        sparse_bias=None if sparse is None else (torch.zeros_like(sparse[0]), *sparse[1:]),
    )
