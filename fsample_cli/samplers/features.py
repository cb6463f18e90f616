"""Each option of `fsample_kernels.sample` alone, beside the plain call: what it costs.

Options get values that change no token: a mask that allows every id, biases of 0, a soft-cap far above the
logits. So a feature's ids must be the plain call's, and the greedy rows' those of temperature 0; a kernel
does the same work whatever the values.
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
SPARSE = 16  # biased ids a row
GREEDY = 4  # every fourth row is greedy
FEATURES = {
    "temperature": f"temperature a tensor [B], every {GREEDY}th row greedy",
    "seeds": "seed and position tensors",
    "mask": "a packed mask [B, V / 32]",
    "bias": "a dense fp16 logit bias [B, V]",
    "sparse-bias": f"a sparse logit bias, {SPARSE} ids a row",
    "head-bias": "a bias of the head [V]",
    "softcap": "a soft-cap",
    "logprob": "want_logprob",
    "lse": "want_lse",
    "samples": "num_samples=4",
}
CALLS = 8  # compared with the plain call's
# Two kernels may round a logit's last bits differently; two scores as close as that are rarer than this.
ROUNDED = 0.01


class Featured(Fused):
    """`fsample_kernels.sample` with one option more than the plain call."""

    def __init__(self, feature: str, transform: Transform = IDENTITY) -> None:
        super().__init__(transform=transform)
        if feature == "softcap" and transform.softcap is not None:
            raise UsageError("--features: this head has a soft-cap already", "take another preset")
        self.name = f"fused+{feature}"
        self.feature = feature
        self.description = f"{self.description.removesuffix(')')}, {FEATURES[feature]})"
        self._held: tuple[tuple[object, ...], dict[str, Any]] = ((), {})

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None:
        key = (hidden.shape[0], weight.shape[0], hidden.device, temperature)
        self._held = (key, options(self.feature, hidden, weight, temperature))
        super().prepare(hidden, weight, temperature=temperature)

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        asked: dict[str, Any] = {"temperature": temperature, "seed": seed, "position": position}
        asked |= {"softcap": self._transform.softcap} | self._held[1]
        result = fsample_kernels.sample(hidden, weight, logit_scale=self._transform.logit_scale, **asked)
        self.implementation = result.implementation
        return result.ids[:, 0]  # [B], a view

    def problem(self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int) -> str:
        """Empty, or how the ids differ from those of the plain call; after `prepare`."""
        plain = Fused(transform=self._transform)
        wrong = torch.zeros((), dtype=torch.int64, device=hidden.device)
        for position in range(CALLS):
            if (
                self.feature == "seeds"
            ):  # the timed calls repeat the last of these: a launch more would be timed
                self._held[1]["seed"].fill_(seed - (seed >> 63 << 64))
                self._held[1]["position"].fill_(position)
            ids = self.sample(hidden, weight, temperature=temperature, seed=seed, position=position)
            right = plain.sample(hidden, weight, temperature=temperature, seed=seed, position=position)
            if self.feature == "temperature":
                top = plain.sample(hidden, weight, temperature=0.0, seed=seed, position=position)
                right = torch.where(self._held[1]["temperature"] == 0, top, right)
            wrong += (ids != right).sum()
        rows = hidden.shape[0] * CALLS
        found = int(wrong)
        return (
            "" if found <= max(1, ROUNDED * rows) else f"{found} of {rows} ids differ from the plain call's"
        )


def options(feature: str, hidden: Tensor, weight: Tensor, temperature: float) -> dict[str, Any]:
    """The arguments that a feature adds or replaces, for hidden [B, D] and weight [V, D]."""
    device, B, V = hidden.device, hidden.shape[0], weight.shape[0]
    if feature == "temperature":
        heat = torch.full((B,), temperature, device=device)
        heat[GREEDY - 1 :: GREEDY] = 0.0
        return {"temperature": heat}
    if feature == "seeds":
        return {"seed": torch.zeros((), dtype=torch.int64, device=device),
                "position": torch.zeros((), dtype=torch.int64, device=device)}  # fmt: skip
    if feature == "mask":
        return {"mask": torch.full((B, -(-V // 32)), -1, dtype=torch.int32, device=device)}
    if feature == "bias":
        return {"logit_bias": torch.zeros(B, V, dtype=torch.float16, device=device)}
    if feature == "sparse-bias":
        rows = torch.arange(B, device=device).repeat_interleave(SPARSE)
        ids = torch.arange(B * SPARSE, device=device) * 7919 % V
        return {"logit_bias": (rows, ids, torch.zeros(B * SPARSE, device=device))}
    plain: dict[str, dict[str, Any]] = {
        "head-bias": {"head_bias": torch.zeros(V, dtype=weight.dtype, device=device)},
        "softcap": {"softcap": NO_CAP},
        "logprob": {"want_logprob": True},
        "lse": {"want_lse": True},
        "samples": {"num_samples": 4},
    }
    return plain[feature]
