"""The launches of the Hopper kernel that its tests compile: a shape for each configuration, each feature.

The launcher runs on CPU tensors with the launch itself replaced, so the types, flags and options are its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fsample_kernels.ops import hopper_kernel
from fsample_kernels.ops.hopper_configs import (
    LARGE,
    UP_TO_64,
    UP_TO_64_NARROW,
    UP_TO_128,
    UP_TO_192,
)
from tests.kernels.machine_code import Job

TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
V = 1024
# rows and hidden size for which `hopper_configs.pick` takes a configuration, see test_every_configuration
SIZES = {
    UP_TO_64: (16, 256),
    UP_TO_64_NARROW: (64, 192),
    UP_TO_128: (128, 256),
    UP_TO_192: (192, 256),
    LARGE: (256, 256),
}
NAMES = {
    UP_TO_64: "<=64",
    UP_TO_64_NARROW: "<=64 narrow",
    UP_TO_128: "<=128",
    UP_TO_192: "<=192",
    LARGE: "large",
}


class Launched(Exception):
    """Ends the launcher where the kernel would start."""


class Launch:
    """Stands for the kernel: keeps the arguments of a launch, and makes a job of them."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(**values: object) -> None:
            self.values = values
            raise Launched

        return launch

    def job(self, label: str) -> Job:
        signature: dict[str, str] = {}
        constants: dict[str, object] = {}
        aligned: list[int] = []
        values = dict(self.values)
        for index, parameter in enumerate(hopper_kernel.hopper_kernel.params):
            name, value = parameter.name, values.pop(parameter.name)
            if value is None or name.isupper():
                signature[name] = "constexpr"
                constants[name] = value
            elif isinstance(value, TensorDescriptor):
                block = ", ".join(map(str, value.block_shape))
                signature[name] = f"tensordesc<{TYPES[value.base.dtype]}[{block}],{value.layout!r}>"
            elif isinstance(value, Tensor):
                signature[name] = "*" + TYPES[value.dtype]
                if name not in hopper_kernel.ANY_ALIGNMENT:
                    aligned.append(index)
            else:
                # a number that is not annotated would make a variant for 1
                assert parameter.annotation_type
                signature[name] = parameter.annotation_type
                if isinstance(value, int) and not parameter.do_not_specialize and value % 16 == 0:
                    aligned.append(index)
        num_warps, maxnreg = values.pop("num_warps"), values.pop("maxnreg")
        assert values.pop("enable_fp_fusion") is True
        assert values == {} and isinstance(num_warps, int) and isinstance(maxnreg, int)
        return Job(label, signature, constants, tuple(aligned), num_warps, maxnreg)


def fields(B: int) -> dict[str, dict[str, object]]:
    """The variants of a call that change the compiled code."""
    zeros = torch.zeros(3, dtype=torch.int64)
    rows: dict[str, object] = {
        "temperature": torch.ones(B), "seed": torch.zeros(B, dtype=torch.int64),
        "position": torch.zeros(B, dtype=torch.int64),
    }  # fmt: skip
    mass: dict[str, object] = {"want_logprob": True, "want_lse": True}
    return {
        "plain": {},
        "keys": {},
        "linked 2": {},
        "linked 8": {},
        "rows": rows,
        "transforms": {"head_bias": torch.zeros(V).bfloat16(), "logit_scale": 0.5, "softcap": 30.0},
        "bias": {"logit_bias": torch.zeros(B, V)},
        "sparse": {"sparse_bias": (zeros, zeros, torch.zeros(3))},
        "mask": {"mask": torch.zeros(B, V, dtype=torch.bool)},
        "bits": {"bitmask": torch.zeros(B, V // 32, dtype=torch.int32)},
        "stored": {"store_logits": True},
        "mass": mass,
        "exact": {"math": "exact"},
        "samples": {"num_samples": 2},
        "samples mass": rows | mass | {"num_samples": 2},
        "element": {"noise": "element"},
        "element rows": rows | {"noise": "element"},
    }
