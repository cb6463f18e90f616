"""One choice that `fsample tune` measures: the library's call under a table with that single entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from torch import Tensor
from triton.errors import TritonError

from fsample_cli.samplers.fused import Fused
from fsample_cli.samplers.protocol import IDENTITY, ShapeUnsupported, Transform
from fsample_kernels import tables
from fsample_kernels.ops import arguments, candidates, hopper_configs
from fsample_kernels.types import Implementation

BUILT_IN = "built-in"
EVERY_BATCH = 1 << 24


class Candidate(Fused):
    """`fsample_kernels.sample` with one choice in the place of the built-in one."""

    def __init__(
        self,
        label: str,
        choice: Implementation | None,
        config: Mapping[str, int] | None,
        transform: Transform = IDENTITY,
    ) -> None:
        super().__init__(transform=transform)
        self.name = label
        self.description = f"fsample_kernels.sample, {label}"
        self._choice, self._config = choice, config

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None:
        if self._config is not None:
            shape = hopper_configs.HopperConfig(**self._config)
            problem = candidates.why_not(shape, hidden.shape[0], weight.shape[1])
            if problem:
                raise ShapeUnsupported(f"{self.name}: {problem}")
        try:
            super().prepare(hidden, weight, temperature=temperature)
        except TritonError as error:
            raise ShapeUnsupported(f"{self.name}: it does not compile: {type(error).__name__}") from error
        if self._choice is not None and self.implementation != self._choice:
            raise ShapeUnsupported(f"{self.name}: {self.implementation} ran in its place")

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        tables.use(() if self._choice is None else [self._entry(weight)])
        try:
            return super().sample(hidden, weight, temperature=temperature, seed=seed, position=position)
        finally:
            tables.use(())

    def _entry(self, weight: Tensor) -> tables.Entry:
        assert self._choice is not None
        return tables.Entry(
            arguments.architecture(weight.device), weight.shape[0], weight.shape[1],
            str(weight.dtype).removeprefix("torch."), EVERY_BATCH, self._choice, self._config,
        )  # fmt: skip


def choices(architecture: str) -> dict[str, tuple[Implementation | None, dict[str, int] | None]]:
    """Label -> (choice, config) of everything there is to measure on a GPU; the built-in choice first."""
    found: dict[str, tuple[Implementation | None, dict[str, int] | None]] = {
        BUILT_IN: (None, None), "triton": ("triton", None), "unfused": ("unfused", None),
    }  # fmt: skip
    if architecture == "sm_90":
        for shape in candidates.HOPPER:
            fields = asdict(shape)
            label = "hopper " + " ".join(f"{name}={value}" for name, value in fields.items())
            found[label] = ("hopper", fields)
    return found
