"""An LM head split over ranks: each reads its rows of a checkpoint, all draw the same tokens.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py [folder or file.safetensors of a checkpoint]

One GPU a rank where there are enough of them, else the CPU. Without a checkpoint the head is random. Only the
rows of a rank's own shard are read: a 2 GB head over two ranks is 1 GB each.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from fsample_kernels.distributed import sample

NAMES = ("lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight")  # the last two: tied heads


def my_rows(vocab: int) -> slice:
    """A shard that starts at a multiple of 128 draws the tokens that a single rank would draw."""
    width = -(-vocab // (128 * dist.get_world_size())) * 128
    first = min(vocab, dist.get_rank() * width)
    return slice(first, min(vocab, first + width))


def read_shard(path: Path) -> Tensor:
    """This rank's rows [V_r, D] of the head."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for name in NAMES:
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                if name in tensors.keys():  # noqa: SIM118 - not a dict
                    head = tensors.get_slice(name)
                    shard: Tensor = head[my_rows(head.get_shape()[0])]
                    return shard
    raise SystemExit(f"{path} holds none of {', '.join(NAMES)}")


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    if len(sys.argv) > 1 and not Path(sys.argv[1]).exists():
        raise SystemExit(f"{sys.argv[1]}: no such file or folder; leave it out for a random head")
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast: others share the host
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if len(sys.argv) > 1:
        shard = read_shard(Path(sys.argv[1]))
    else:
        whole = torch.randn(32_000, 256, generator=torch.Generator().manual_seed(0)) / 16
        shard = whole[my_rows(32_000)].clone()
    shard = shard.to(device, torch.bfloat16 if on_gpu else torch.float32)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, shard.shape[1], generator=generator)  # the same on every rank
    hidden = hidden.to(device, shard.dtype)
    rank = dist.get_rank()
    for position in range(3):
        drawn = sample(hidden, shard, seed=1, position=position, want_logprob=True)
        line = f"rank {rank}, step {position}: {drawn.ids[:, 0].tolist()} by {drawn.implementation}\n"
        sys.stdout.write(line)  # at once: print writes the end of a line by itself, between two ranks' lines
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
