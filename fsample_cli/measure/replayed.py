"""One draw of fused, made again on the CPU: the token, the runner-up, and what rounding may change.

The row's logits are worked out in float64 and the noise is rebuilt from seed, position, row and sample; no
other row, no batch size and no GPU enters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsample_cli import checkpoint
from fsample_cli.errors import InputError, UsageError
from fsample_cli.measure import inputs
from fsample_cli.results import ReplayResult
from fsample_cli.workloads import Workload
from fsample_kernels.oracle import Oracle
from fsample_kernels.testing import Mismatch, explain, logit_error, runner_up
from fsample_kernels.types import Noise, Problem
from fsample_kernels.validation import head_problem, logits_problem

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Draw:
    """Which draw it is. With `per_row_seed` the row index is not part of the noise's counter."""

    seed: int
    position: int
    row: int
    sample: int
    temperature: float
    noise: Noise
    per_row_seed: bool


def replay_logits(draw: Draw, logits: Tensor, token: int | None) -> ReplayResult:
    """Replay over the row's logits [V], bf16, fp16 or fp32, taken as exact."""
    problem = logits_problem(
        logits[None], temperature=draw.temperature, seed=_seed(draw), position=draw.position, num_samples=1,
        logit_scale=1.0, softcap=None, logit_bias=None, mask=None, vocab_size=None, noise=draw.noise,
        math="fast", want_logprob=False, want_lse=False,
    )  # fmt: skip
    return _replay(draw, problem, token)


def replay_head(
    draw: Draw, hidden: Tensor, weight: Tensor, workload: Workload, token: int | None
) -> ReplayResult:
    """Replay over hidden [D] and weight [V, D]; the budget then holds the rounding of the product too."""
    problem = head_problem(
        hidden[None], weight, temperature=draw.temperature, seed=_seed(draw), position=draw.position,
        num_samples=1, head_bias=None, logit_scale=workload.logit_scale, softcap=workload.softcap,
        logit_bias=None, mask=None, vocab_size=None, noise=draw.noise, math="fast", want_logprob=False,
        want_lse=False, store_logits=False,
    )  # fmt: skip
    return _replay(draw, problem, token)


def make_row(
    workload: Workload, device: str, seed: int, row: int, batch: int | None
) -> tuple[Tensor, Tensor]:
    """(hidden [D], weight [V, D]) on the CPU, made on `device` as bench and verify make them.

    Rows of a file of states are taken in order, from the first again past the last. Random rows belong to a
    batch, of row + 1 unless `batch` says otherwise: a generator's values can depend on how many are asked.
    """
    weight = inputs.load_weight(workload, device, seed)
    if workload.states is not None:
        states = checkpoint.load_states(Path(workload.states), workload.dtype, device)
        return states[row % states.shape[0]].cpu(), weight.cpu()
    hidden = inputs.make_hidden(workload, batch or row + 1, device, seed, weight)
    return hidden[row].cpu(), weight.cpu()


def load_logits(path: Path, row: int) -> Tensor:
    """The row's logits [V] of a .npy or .safetensors file that holds [V] or [N, V]. Raises InputError."""
    if path.suffix == ".npy":
        found = torch.from_numpy(_floats(path))
    elif path.suffix == ".safetensors":
        found = _only_tensor(path)
    else:
        raise InputError(f"--logits must be a .npy or .safetensors file, got {path}", "numpy.save writes one")
    if found.dim() not in (1, 2) or 0 in found.shape or found.dtype not in FLOATS:
        raise InputError(
            f"--logits must hold [V] or [N, V] in bf16, fp16 or fp32, got {list(found.shape)} "
            f"{str(found.dtype).removeprefix('torch.')} in {path}",
            "save the raw logits in fp32",
        )
    if found.dim() == 1:
        return found
    if row >= found.shape[0]:
        raise UsageError(
            f"--row must lie in 0..{found.shape[0] - 1}, the rows of {path}, got {row}",
            "a file of one row alone, [V], goes with any --row",
        )
    return found[row].contiguous()


def _replay(draw: Draw, problem: Problem, token: int | None) -> ReplayResult:
    exact = Oracle(problem)
    if not draw.per_row_seed:
        exact.streams = replace(exact.streams, row=torch.tensor([draw.row]))
    error = float((logit_error(problem) * exact.scale)[0])
    want = int(exact.draw(draw.sample)[0])
    second = None if want == -1 else runner_up(exact, 0, draw.sample, want, error)
    note = ""
    if want == -1:
        note = "a NaN or +inf among the logits: no token" if exact.bad[0] else "no allowed token"
    given: Mismatch | None = None
    if token is not None and token != want:
        given = explain(exact, 0, draw.sample, token, want, error)
    verdict = "drawn" if token is None else "same" if given is None else "wrong"
    if given is not None and given.explained:
        verdict = "explained"
    return ReplayResult(
        sampler="fused",
        algorithm=draw.noise,
        row=draw.row,
        sample=draw.sample,
        position=draw.position,
        token=want,
        runner_up=None if second is None else second.got,
        margin=None if second is None else second.margin,
        budget=None if second is None else second.budget,
        decided="" if second is None else second.decided,
        given=token,
        given_margin=None if given is None else given.margin,
        given_budget=None if given is None else given.budget,
        given_decided="" if given is None else given.decided,
        verdict=verdict,
        note=note,
    )


def _seed(draw: Draw) -> int | Tensor:
    """A seed of the batch is a number, a seed of the row a tensor of one: as in `fsample_kernels.sample`."""
    if not draw.per_row_seed:
        return draw.seed
    signed = draw.seed - 2**64 if draw.seed >= 2**63 else draw.seed
    return torch.tensor([signed], dtype=torch.int64)


def _floats(path: Path) -> Any:
    import numpy

    try:
        array = numpy.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"--logits {path} cannot be read: {error}", "numpy.save writes one") from None
    if not isinstance(array, numpy.ndarray) or array.dtype.kind != "f":
        raise InputError(
            f"--logits must hold floating numbers, got {getattr(array, 'dtype', type(array))} in {path}",
            "save the raw logits in fp32",
        )
    narrow = array.dtype.itemsize <= 4
    with numpy.errstate(over="ignore"):  # past fp32 it is inf, and the row has no token
        return array.astype(array.dtype.newbyteorder("=") if narrow else numpy.float32)


def _only_tensor(path: Path) -> Tensor:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"--logits {path} cannot be read: {error}", "fetch the file again") from None
    if "logits" in tensors:
        return tensors["logits"]
    if len(tensors) != 1:
        raise InputError(
            f"--logits {path} must hold a tensor logits or one tensor, got {', '.join(tensors) or 'nothing'}",
            "name it logits",
        )
    return next(iter(tensors.values()))
