"""torch.compile for baselines: one whole graph per shape, and a plain word where no compiler is found."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable

import torch
from torch import Tensor

from fsample_cli.samplers.protocol import SamplerUnavailable

Body = Callable[[Tensor, Tensor, Tensor], Tensor]

# Dynamo keeps one entry per shape and gives up after 8; a sweep has more batch sizes than that.
_MOST_SHAPES = 256


def missing_compiler(device: torch.device) -> tuple[str, str] | None:
    """(what is missing, how to get it) when torch.compile cannot generate code for this device, else None."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "torch.compile needs triton on the GPU", "pip install triton"
        return None
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in candidates):
        found = "none of " + ", ".join(candidates) + " is on the PATH"
        return f"torch.compile needs a C++ compiler on the CPU ({found})", "apt-get install g++ (or set CXX)"
    return None


def compile_whole(name: str, body: Body, device: torch.device) -> Body:
    """`torch.compile(body, fullgraph=True, dynamic=False)`; raises `SamplerUnavailable` without a compiler.

    fullgraph: a graph break or a spent recompile limit raises, so that no row labelled "compiled" ran
    eagerly.
    """
    missing = missing_compiler(device)
    if missing is not None:
        raise SamplerUnavailable(f"{name}: {missing[0]}", hint=missing[1])
    import torch._dynamo

    torch._dynamo.config.recompile_limit = _MOST_SHAPES
    compiled: Body = torch.compile(body, fullgraph=True, dynamic=False)
    return compiled
