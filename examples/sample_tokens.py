"""Hidden states in, tokens out, and no logits in between. Runs anywhere; on the GPU where there is one."""

import torch

from fsample_kernels import sample

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
hidden = torch.randn(4, 512, device=device, dtype=dtype)  # [B, D], what the last layer gives
weight = torch.randn(32_000, 512, device=device, dtype=dtype) / 512**0.5  # [V, D], the LM head
drawn = sample(hidden, weight, temperature=0.8, seed=1, position=0)
print(f"tokens {drawn.ids[:, 0].tolist()}, drawn by {drawn.implementation} on the {device}")
