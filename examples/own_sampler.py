"""A sampler of your own for `fsample verify` and `fsample bench`: an exponential race in double precision.

fsample verify --sampler examples/own_sampler.py:double_race
"""

import torch
from torch import Tensor


def double_race(hidden: Tensor, weight: Tensor, temperature: float, seed: int) -> Tensor:
    """Token i wins with probability softmax(hidden @ weight.T / temperature)[i]: argmax of p_i / E_i.

    hidden [B, D], weight [V, D] -> ids [B]. In float64 an E_i has 53 bits, and a rare token its whole tail.
    """
    logits = (hidden.float() @ weight.float().T).double()
    if temperature == 0:
        return logits.argmax(dim=1)
    generator = torch.Generator(logits.device).manual_seed(seed)
    race = torch.empty_like(logits).exponential_(generator=generator)
    return (torch.softmax(logits / temperature, dim=1) / race).argmax(dim=1)
