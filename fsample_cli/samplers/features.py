"""Each option of `fsample_kernels.sample` alone, beside the plain call: what it costs.

Options get values that change no token: a mask that allows every id, biases of 0, a soft-cap far above the
logits. So a feature's ids must be the plain call's: in greedy rows those of temperature 0, with a bound those
of a head that ends there, with a seed a row those of calls with one row and its numbers. A kernel does the
same work whatever the values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fsample_kernels
from fsample_cli.errors import UsageError
from fsample_cli.samplers.fused import Fused
from fsample_cli.samplers.protocol import IDENTITY, Transform

# Dividing by a power of two and multiplying by it rounds nothing, and tanh z = z in fp32 for z < 2^-13.
NO_CAP = 2.0**24
HALF = 0.5  # of the logits and of the temperature
SPARSE = 16  # biased ids a row
GREEDY = slice(1, None, 4)  # rows that are greedy: one in four, from two rows on
TAIL = 100  # ids at and above the bound
FEATURES = {
    "temperature": "temperature a tensor [B], rows 1, 5, 9, ... greedy",
    "seeds": "seed and position tensors [B]",
    "mask": "a packed mask [B, V / 32]",
    "bool-mask": "a bool mask [B, V]",
    "bias": "a dense fp16 logit bias [B, V]",
    "shared-bias": "a dense fp16 logit bias [V]",
    "sparse-bias": f"a sparse logit bias, {SPARSE} ids a row",
    "head-bias": "a bias of the head [V]",
    "scale": "a logit scale",
    "softcap": "a soft-cap",
    "bound": f"vocab_size, {TAIL} ids less than V",
    "logprob": "want_logprob",
    "lse": "want_lse",
    "samples": "num_samples=4",
}
CALLS = 8  # compared with the plain call's
ROWS = 8  # of those with a seed of their own, each drawn by itself
# Two kernels may round a logit's last bits differently; two scores as close as that are rarer than this.
ROUNDED = 0.01


class Featured(Fused):
    """`fsample_kernels.sample` with one option more than the plain call."""

    def __init__(self, feature: str, transform: Transform = IDENTITY) -> None:
        super().__init__(transform=transform)
        if feature in ("scale", "softcap") and transform.softcap is not None:
            raise UsageError("--features: this head has a soft-cap already", "take another preset")
        self.name = f"fused+{feature}"
        self.feature = feature
        self.description = f"{self.description.removesuffix(')')}, {FEATURES[feature]})"
        self._held: dict[str, Any] = {}

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None:
        self._held = options(self.feature, hidden, weight, temperature, self._transform.logit_scale)
        super().prepare(hidden, weight, temperature=temperature)

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        asked: dict[str, Any] = {"temperature": temperature, "seed": seed, "position": position}
        asked |= {"logit_scale": self._transform.logit_scale, "softcap": self._transform.softcap}
        result = fsample_kernels.sample(hidden, weight, **(asked | self._held))
        self.implementation = result.implementation
        return result.ids[:, 0]  # [B], a view

    def problem(self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int) -> str:
        """Empty, or how the ids differ from those of the plain call; after `prepare`."""
        wrong = torch.zeros((), dtype=torch.int64, device=hidden.device)
        compared = 0
        for position in range(CALLS):
            # the timed calls repeat the last of these: a launch more would be timed
            if self.feature == "seeds":
                rows = torch.arange(hidden.shape[0], device=hidden.device)
                self._held["seed"].copy_(rows + (seed - (seed >> 63 << 64)))
                self._held["position"].copy_(rows + position)
            ids = self.sample(hidden, weight, temperature=temperature, seed=seed, position=position)
            every, right = self._plain(hidden, weight, temperature, seed, position)
            wrong += (ids[::every] != right).sum()
            compared += len(right)
        found = int(wrong)
        return (
            ""
            if found <= max(1, ROUNDED * compared)
            else f"{found} of {compared} ids differ from the plain call's"
        )

    def _plain(
        self, hidden: Tensor, weight: Tensor, temperature: float, seed: int, position: int
    ) -> tuple[int, Tensor]:
        """(n, ids that plain calls give to every n-th row)."""
        plain = Fused(transform=self._transform)
        if self.feature == "bound":
            weight = weight[: self._held["vocab_size"]]
        if self.feature == "seeds":
            every = -(-hidden.shape[0] // ROWS)
            ids = [
                plain.sample(
                    hidden[row : row + 1], weight, temperature=temperature,
                    seed=(seed + row) % 2**64, position=position + row,
                )
                for row in range(0, hidden.shape[0], every)
            ]  # fmt: skip
            return every, torch.cat(ids)
        right = plain.sample(hidden, weight, temperature=temperature, seed=seed, position=position)
        if self.feature == "temperature":
            top = plain.sample(hidden, weight, temperature=0.0, seed=seed, position=position)
            right = torch.where(self._held["temperature"] == 0, top, right)
        return 1, right


def options(
    feature: str, hidden: Tensor, weight: Tensor, temperature: float, logit_scale: float = 1.0
) -> dict[str, Any]:
    """The arguments that a feature adds or replaces, for hidden [B, D] and weight [V, D]."""
    device, B, V = hidden.device, hidden.shape[0], weight.shape[0]
    if feature == "temperature":
        heat = torch.full((B,), temperature, device=device)
        heat[GREEDY] = 0.0
        return {"temperature": heat}
    if feature == "seeds":
        return {"seed": torch.zeros(B, dtype=torch.int64, device=device),
                "position": torch.zeros(B, dtype=torch.int64, device=device)}  # fmt: skip
    if feature == "mask":
        return {"mask": torch.full((B, -(-V // 32)), -1, dtype=torch.int32, device=device)}
    if feature == "bool-mask":
        return {"mask": torch.ones(B, V, dtype=torch.bool, device=device)}
    if feature == "bias":
        return {"logit_bias": torch.zeros(B, V, dtype=torch.float16, device=device)}
    if feature == "sparse-bias":
        rows = torch.arange(B, device=device).repeat_interleave(SPARSE)
        ids = torch.arange(B * SPARSE, device=device) * 7919 % V
        return {"logit_bias": (rows, ids, torch.zeros(B * SPARSE, device=device))}
    plain: dict[str, dict[str, Any]] = {
        "head-bias": {"head_bias": torch.zeros(V, dtype=weight.dtype, device=device)},
        "shared-bias": {"logit_bias": torch.zeros(V, dtype=torch.float16, device=device)},
        "scale": {"logit_scale": HALF * logit_scale, "temperature": HALF * temperature},
        "softcap": {"softcap": NO_CAP},
        "bound": {"vocab_size": V - min(TAIL, V // 2)},
        "logprob": {"want_logprob": True},
        "lse": {"want_lse": True},
        "samples": {"num_samples": 4},
    }
    return plain[feature]
