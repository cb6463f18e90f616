"""What a run works on, from the values of its options: samplers, device, dtype, the one workload."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fsample_cli import checkpoint as checkpoints
from fsample_cli.errors import MissingError, UsageError
from fsample_cli.options import Device, DType
from fsample_cli.workloads import DTYPES, Workload, find_preset


def parse_samplers(
    values: Sequence[str] | None, known: Iterable[str], default: Sequence[str]
) -> tuple[str, ...]:
    """Sampler names in the order given, each once. `all` is every known one, `module:function` your own.

    `known` names may carry an algorithm, as in fused:element. Raises UsageError for any other name.
    """
    names = tuple(known)
    chosen: list[str] = []
    for name in [part.strip() for value in values or () for part in value.split(",")]:
        base, colon, rest = name.partition(":")
        if name == "all":
            chosen.extend(names)
        elif base in names or (colon and base and rest):
            chosen.append(name)
        else:
            near = difflib.get_close_matches(base, names, n=1)
            hint = f"did you mean {near[0]}?" if near else "your own is named module:function"
            raise UsageError(f"--sampler must be one of {', '.join(names)}, got {name!r}", hint)
    return tuple(dict.fromkeys(chosen or default))


def resolve_device(device: Device | str) -> str:
    """ "cuda" or "cpu". Raises MissingError where a GPU is asked for and there is none, UsageError where
    every call would fail for what FSAMPLE_CHECK says. Imports torch."""
    from fsample_kernels import guard

    try:
        guard.active()
    except ValueError as error:
        message, _, hint = str(error).partition("; ")
        raise UsageError(message, hint) from None
    wanted = Device(device)
    if wanted is Device.cpu:
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted is Device.cuda:
        raise MissingError(
            "--device cuda needs a GPU that torch can use, found none",
            "`fsample doctor` says what is missing; --device cpu runs without one",
        )
    return "cpu"


def resolve_dtype(dtype: DType | str, device: str, own: str | None = None) -> str:
    """bf16, fp16 or fp32. `auto`: fp32 on the CPU, where 16-bit matmuls are slow; `own` or bf16 on a GPU."""
    wanted = DType(dtype).value
    if wanted != "auto":
        return str(wanted)
    return "fp32" if device == "cpu" else own or "bf16"


def build_workload(
    *,
    preset: str | None,
    vocab: int | None,
    hidden: int | None,
    checkpoint: Path | None,
    states: Path | None,
    device: str,
    dtype: DType | str,
    default: Workload,
) -> Workload:
    """The one workload the options ask for, with files looked at (their headers only) and shapes compared.

    `device` is resolved. `default` serves when no option names a shape. Raises UsageError or InputError.
    """
    given = [
        name
        for name, there in (
            ("--preset", preset is not None),
            ("--vocab/--hidden", vocab is not None or hidden is not None),
            ("--checkpoint", checkpoint is not None),
        )
        if there
    ]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", "give one of them")
    if (vocab is None) != (hidden is None):
        there, missing = ("--hidden", "--vocab") if vocab is None else ("--vocab", "--hidden")
        size = default.vocab if vocab is None else default.hidden
        raise UsageError(
            f"--vocab and --hidden go together, got {there} alone", f"add {missing}, as in {missing} {size}"
        )
    if checkpoint is not None:
        head = checkpoints.find_head(checkpoint)
        workload = Workload(
            "checkpoint", head.vocab, head.hidden, resolve_dtype(dtype, device, head.dtype),
            checkpoint=str(checkpoint), softcap=head.softcap, logit_scale=head.logit_scale,
        )  # fmt: skip
    elif preset is not None:
        workload = find_preset(preset).workload(resolve_dtype(dtype, device))
    elif vocab is not None and hidden is not None:
        workload = Workload("custom", vocab, hidden, resolve_dtype(dtype, device))
    else:
        workload = replace(default, dtype=resolve_dtype(dtype, device))
    assert workload.dtype in DTYPES
    if states is None:
        return workload
    shape = checkpoints.states_shape(states)
    if shape[1] != workload.hidden:
        raise UsageError(
            f"--states must be [N, D] with D = {workload.hidden}, got {list(shape)} in {states}",
            "take the states and the head from the same model",
        )
    return replace(workload, states=str(states))
