"""A decoding step captured once as a CUDA graph and replayed: new tokens each time, no launch from Python.

What must change between replays lives on the device: `seed` and `position` are tensors, and the graph itself
moves the position on. A Python number would be frozen by the capture, and every step would draw the same.
"""

from __future__ import annotations

import torch

from fsample_kernels import sample


def main() -> None:
    if not torch.cuda.is_available():
        print("cuda_graph.py needs a GPU that torch can use; there is none here, so nothing was run")
        return
    B, V, D = 8, 32_000, 1_024
    hidden = torch.randn(
        B, D, device="cuda", dtype=torch.bfloat16
    )  # [B, D]; an engine overwrites it in place
    weight = torch.randn(V, D, device="cuda", dtype=torch.bfloat16) / D**0.5  # [V, D]
    seed = torch.arange(B, device="cuda")  # [B], one stream a request
    position = torch.zeros((), dtype=torch.int64, device="cuda")

    sample(hidden, weight, seed=seed, position=position)  # compiles outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(hidden, weight, seed=seed, position=position)
        position += 1

    for step in range(4):
        graph.replay()
        ids = tokens.ids[:, 0].clone()
        assert torch.equal(ids, sample(hidden, weight, seed=seed, position=step).ids[:, 0])
        print(f"step {step}: {ids.tolist()}")


if __name__ == "__main__":
    main()
