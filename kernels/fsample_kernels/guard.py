"""Checked mode: every call waits for its device, and what it drew is looked at before the caller has it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from . import buffers, reference
from .checks import dtype_name, first_few, flag, shape_of
from .chunks import device_of
from .noise import MAX_POSITION
from .types import Problem, SampleResult

VARIABLE = "FSAMPLE_CHECK"

# None: as the environment says.
_chosen: ContextVar[bool | None] = ContextVar("fsample_checked", default=None)


class CheckError(RuntimeError):
    """A checked call returned what the contract of `sample` rules out: a fault of fsample."""


def checked(on: bool = True) -> contextlib.AbstractContextManager[None]:
    """Within it, on this thread, every call is checked: of `sample`, `sample_logits`, `distributed.sample`.

    Where the environment variable FSAMPLE_CHECK is 1 when the first call is made, the calls of all threads
    are, but for those inside `checked(False)`. A checked call draws the same tokens. It waits for the device,
    so it is slow and cannot be captured in a CUDA graph. It makes sure that

    - the tensors of temperature, position and sparse bias hold no value that would make a row -1;
    - the kernels have written every entry of every buffer that the call allocated for them;
    - ids are in [-1, vocab_size) and allowed by the mask; those of a row are -1 only where the reference
      implementation finds no id to draw either (with `distributed.sample`, whose reason may be another
      rank's, this is not looked at);
    - where an id was drawn, logprob is finite and at most 0 and lse finite; elsewhere logprob is NaN, and lse
      NaN or -inf.

    With `distributed.sample` switch it on in every rank. Each checks what itself has, after the exchange.

    Raises:
        ValueError: at once, where `on` is neither True nor False. Of a call within it: as an unchecked call,
            and for a bad value on the device, in a capture, and for a value of FSAMPLE_CHECK other than 1, 0
            and nothing.
        CheckError: anything else does not hold; names implementation, row, sample and value.

    Example:
        >>> import torch
        >>> from fsample_kernels import checked, sample
        >>> with checked():
        ...     sample(torch.zeros(1, 16), torch.zeros(9, 16), temperature=torch.tensor(-1.0))
        Traceback (most recent call last):
        ...
        ValueError: temperature must be finite and 0 or above, got [-1.0] in rows [0]; correct the tensor
    """
    return _checked(flag("on", on))


@contextlib.contextmanager
def _checked(on: bool) -> Iterator[None]:
    token = _chosen.set(on)
    try:
        with buffers.watched(None):
            yield
    finally:
        _chosen.reset(token)


def active() -> bool:
    """Whether calls are checked. Raises ValueError for a value of FSAMPLE_CHECK that says neither."""
    chosen = _chosen.get()
    return _environment() if chosen is None else chosen


@functools.cache
def _environment() -> bool:
    named = os.environ.get(VARIABLE, "")
    if named not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} must be 1 (check every call) or 0, got {named!r}; correct or unset it")
    return named == "1"


def run(problem: Problem, draw: Callable[[], SampleResult]) -> SampleResult:
    """The draw of a problem by one process, checked as `checked` says."""
    _refuse_capture(device_of(problem))
    _check_arguments(problem)
    result, found = _watch(draw)
    _check_buffers(problem, result, found)
    _check_result(problem, result)
    _check_lost_rows(problem, result)
    return result


def run_rank(
    problem: Problem, draw: Callable[[], SampleResult], check_ranks: Callable[[], None]
) -> SampleResult:
    """A rank's part in a draw of several. Nothing is raised before the exchange: the others wait in it.

    check_ranks raises for a rank that was lost, which explains whatever else would be found.
    """
    _refuse_capture(device_of(problem))
    result, found = _watch(draw)
    check_ranks()
    _check_arguments(problem)
    _check_buffers(problem, result, found)
    _check_result(problem, result)
    return result


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a checked call waits for the device and cannot be captured in a CUDA graph; capture within "
            f"`fsample_kernels.checked(False)`, or without {VARIABLE}"
        )


def _watch(draw: Callable[[], SampleResult]) -> tuple[SampleResult, list[Tensor]]:
    found: list[Tensor] = []
    with buffers.watched(found):
        result = draw()
    if result.ids.is_cuda:
        torch.cuda.synchronize(result.ids.device)  # a launch that failed is raised here, not calls later
    return result, found


def _check_arguments(problem: Problem) -> None:
    """Raise ValueError for what the host cannot see in an unchecked call, and a row of -1 would answer."""
    heat, position = problem.temperature, problem.position
    if isinstance(heat, Tensor):
        _refuse("temperature", heat, ~((heat >= 0) & heat.isfinite()), "finite and 0 or above")
    if isinstance(position, Tensor):
        _refuse("position", position, (position < 0) | (position >= MAX_POSITION), "in [0, 2**32)")
    if problem.sparse_bias is not None:
        rows, ids, values = problem.sparse_bias
        for name, entries, bound in (("rows", rows, problem.num_rows), ("ids", ids, problem.vocab_size)):
            bad = (entries < 0) | (entries >= bound)
            _refuse(f"logit_bias {name}", entries, bad, f"in [0, {bound})", "entries")
        _refuse("logit_bias values", values, ~values.isfinite(), "finite in fp32", "entries")


def _refuse(name: str, values: Tensor, bad: Tensor, rule: str, where: str = "rows") -> None:
    at = bad.reshape(-1).nonzero()[:, 0]
    if len(at):
        shown = first_few(values.reshape(-1)[at[:6]].tolist())
        raise ValueError(
            f"{name} must be {rule}, got {shown} in {where} {first_few(at[:6].tolist())}; correct the tensor"
        )


def _check_buffers(problem: Problem, result: SampleResult, found: list[Tensor]) -> None:
    for buffer in found:
        at = buffers.unwritten(buffer)
        if at is not None:
            kind = f"{dtype_name(buffer.dtype)} {shape_of(buffer)}"
            what = f"left entry {at} of a buffer, {kind}, unwritten"
            raise CheckError(_report(problem, result, what))


def _check_result(problem: Problem, result: SampleResult) -> None:
    ids, logprob, lse = result.ids, result.logprob, result.lse  # [B, K], [B, K], [B]
    _require(problem, result, (ids >= -1) & (ids < problem.vocab_size), ids, "id", "out of range")
    _require(problem, result, _allowed(problem, ids), ids, "id", "which the mask forbids")
    drawn = ids >= 0
    if logprob is not None:
        right = torch.where(drawn, logprob.isfinite() & (logprob <= 0), logprob.isnan())
        _require(problem, result, right, logprob, "logprob", "beside id")
    if lse is not None:
        right = torch.where(drawn, lse.isfinite()[:, None], (lse.isnan() | (lse == -torch.inf))[:, None])
        _require(problem, result, right, lse[:, None].expand_as(ids), "lse", "beside id")


def _allowed(problem: Problem, ids: Tensor) -> Tensor:
    """[B, K] bool; ids are in their range."""
    some = ids.clamp(min=0)
    if problem.mask is not None:
        return problem.mask.expand(len(ids), -1).gather(1, some) | (ids < 0)
    if problem.bitmask is not None:
        return ((problem.bitmask.gather(1, some // 32) >> (some % 32)) & 1 == 1) | (ids < 0)
    return torch.ones_like(ids, dtype=torch.bool)


def _check_lost_rows(problem: Problem, result: SampleResult) -> None:
    """Rows of -1 are those that have nothing to draw, or a NaN or +inf: by other code than the kernels'."""
    lost = result.ids < 0
    if result.implementation == "reference" or not lost.any():
        return
    plain = dataclasses.replace(
        problem, num_samples=1, want_logprob=False, want_lse=False, store_logits=False
    )
    same = lost == (reference.run(plain).ids < 0)
    same |= ~lost.any(1, keepdim=True)
    _require(problem, result, same, result.ids, "id", "in a row where the reference draws otherwise")


def _require(
    problem: Problem, result: SampleResult, right: Tensor, values: Tensor, name: str, why: str
) -> None:
    """Raise CheckError for the first entry [b, k] that is not right."""
    wrong = (~right).nonzero()
    if len(wrong):
        row, sample = wrong[0].tolist()
        beside = "" if name == "id" else f" {int(result.ids[row, sample])}"
        what = f"gave {name} {values[row, sample].item()} in row {row}, sample {sample}, {why}{beside}"
        raise CheckError(_report(problem, result, what))


def _report(problem: Problem, result: SampleResult, what: str) -> str:
    return (
        f"implementation {result.implementation!r} {what}; B = {problem.num_rows}, "
        f"V = {problem.num_columns}, vocab_size = {problem.vocab_size}, K = {problem.num_samples}, "
        f"noise={problem.noise!r}: a fault of fsample, report it with this line and `fsample doctor --json`; "
        "until then use implementation='reference'"
    )
