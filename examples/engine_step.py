"""One decoding step of a serving engine: every request with its own seed, temperature, bias and grammar.

A request's tokens depend on its own seed, step and logits alone. So it may move in the batch, leave it, or be
computed in other company, and still says the same: the last lines show it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsample_kernels import sample

V, D = 32_000, 512
WORDS = -(-V // 32)  # of 32 bits, what grammar libraries hand out


@dataclass
class Request:
    name: str
    seed: int
    temperature: float  # 0 is greedy
    step: int = 0  # tokens written so far
    bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit
    allowed: range | None = None  # token ids that the grammar allows now


def bitmask(requests: list[Request], device: torch.device) -> Tensor:
    """int32 [B, ceil(V / 32)]: bit i of word w allows token 32 w + i."""
    allowed = torch.zeros(len(requests), WORDS * 32, dtype=torch.int64)  # [B, V rounded up]
    for row, request in enumerate(requests):
        ids = request.allowed or range(V)
        allowed[row, ids.start : ids.stop] = 1
    bits = allowed.view(len(requests), WORDS, 32) << torch.arange(32)  # [B, words, 32]
    return bits.sum(-1).to(torch.int32).to(device)  # the top bit is the sign: the cast keeps the bits


def decode_step(requests: list[Request], hidden: Tensor, weight: Tensor) -> Tensor:
    """The next token of each request, [B]."""
    device = hidden.device
    tokens = sample(
        hidden,
        weight,
        temperature=torch.tensor([r.temperature for r in requests], device=device),
        seed=torch.tensor([r.seed for r in requests], device=device),
        position=torch.tensor([r.step for r in requests], device=device),
        logit_bias=[r.bias for r in requests],
        mask=bitmask(requests, device),
    )
    return tokens.ids[:, 0]


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(V, D, generator=generator) / D**0.5).to(device, dtype)  # [V, D]
    requests = [
        Request("greedy", seed=0, temperature=0.0),
        Request("chat", seed=11, temperature=0.8, step=5),
        Request("story", seed=12, temperature=1.3, step=2, bias={13: -100.0}),
        Request("json", seed=13, temperature=1.0, allowed=range(100, 110)),
    ]
    hidden = torch.randn(len(requests), D, generator=generator).to(device, dtype)  # [B, D]
    ids = decode_step(requests, hidden, weight).tolist()
    for request, token in zip(requests, ids, strict=True):
        print(f"{request.name:>6}: token {token}")

    order = [3, 1]  # two requests in another batch, in another order
    again = decode_step([requests[k] for k in order], hidden[order], weight).tolist()
    print("the same in other company:", again == [ids[k] for k in order])


if __name__ == "__main__":
    main()
