"""The tensors a run works on: real ones where files are given, else normal values that make realistic logits.

Zeros or ones would be faster than any real input: the speed of a matmul depends on the bits it multiplies.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fsample_cli import checkpoint
from fsample_cli.errors import MissingError
from fsample_cli.workloads import Workload

LOGIT_STD = (
    2.0  # of the random logits: a likely token has a few percent, as a language model's first choices do
)
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CHUNK_ROWS = (
    16_384  # rows of random weight made at a time, so that fp32 values never exist for the whole head
)


def load_weight(workload: Workload, device: str, seed: int) -> Tensor:
    """LM head [V, D] in the workload's dtype: the checkpoint's, or normal, of deviation LOGIT_STD / sqrt(D).

    Raises MissingError when memory does not hold it.
    """
    check_memory(workload, device)
    if workload.checkpoint is not None:
        return checkpoint.load_head(checkpoint.find_head(Path(workload.checkpoint)), workload.dtype, device)
    generator = torch.Generator(device).manual_seed(seed % 2**63)
    weight = torch.empty(workload.vocab, workload.hidden, dtype=TORCH_DTYPES[workload.dtype], device=device)
    for rows in torch.split(weight, CHUNK_ROWS):  # [<= CHUNK_ROWS, D]
        values = torch.randn(rows.shape, generator=generator, device=device)
        rows.copy_(values.mul_(LOGIT_STD / workload.hidden**0.5))
    return weight


def make_hidden(
    workload: Workload, batch: int, device: str, seed: int, weight: Tensor | None = None
) -> Tensor:
    """Hidden states [B, D] in the workload's dtype.

    With `states`: its rows in order, from the first again when there are fewer than B. Else normal values;
    given a checkpoint's `weight` [V, D] they are scaled so that the logits' deviation is LOGIT_STD there too.
    """
    if workload.states is not None:
        states = checkpoint.load_states(Path(workload.states), workload.dtype, device)  # [N, D]
        return states[torch.arange(batch, device=device) % states.shape[0]]  # [B, D]
    generator = torch.Generator(device).manual_seed((seed + 1) % 2**63)
    hidden = torch.randn(batch, workload.hidden, generator=generator, device=device)  # [B, D]
    if workload.checkpoint is not None and weight is not None:
        rows = weight[
            :: max(1, weight.shape[0] // 4096)
        ].float()  # a sample of rows: the scale needs two digits
        hidden *= LOGIT_STD / rows.square().sum(1).mean().sqrt().clamp_min(1e-12) / workload.logit_scale
    return hidden.to(TORCH_DTYPES[workload.dtype])


def describe(workload: Workload) -> Workload:
    """The workload with `distribution` saying in words what `load_weight` and `make_hidden` make."""
    weight = (
        "weight from the checkpoint" if workload.checkpoint else f"weight N(0, ({LOGIT_STD:g}/sqrt(D))^2)"
    )
    hidden = "hidden states from the file" if workload.states else "hidden N(0, 1)"
    if workload.checkpoint and not workload.states:
        hidden = f"hidden normal, scaled to logits of deviation {LOGIT_STD:g}"
    return replace(workload, distribution=f"{hidden}, {weight}")


def check_memory(workload: Workload, device: str) -> None:
    """Raises MissingError when the head alone does not fit in what is free on the device."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else _free_host_bytes()
    if free is not None and workload.weight_bytes > free:
        raise MissingError(
            f"the LM head [{workload.vocab}, {workload.hidden}] in {workload.dtype} needs "
            f"{workload.weight_bytes / 1e9:.1f} GB, {device} has {free / 1e9:.1f} GB free",
            "choose a smaller --preset such as cpu-small, or --dtype bf16",
        )


def _free_host_bytes() -> int | None:
    """MemAvailable of Linux; None elsewhere, where the allocation itself has to tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
