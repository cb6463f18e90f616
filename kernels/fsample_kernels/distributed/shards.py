"""Which ids each rank holds, and whether all ranks ask for the same draw: compared, not assumed."""

from __future__ import annotations

import struct
from typing import get_args

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..checks import finite
from ..types import Noise
from ..validation import Shard
from ..words import MAX_ID
from .collectives import Team
from .exchanges import EXCHANGES, Exchange

_FIELDS = (  # every rank must give the same, the first two aside
    "rows of weight_shard", "first_id", "rows B of hidden", "hidden size D", "dtype", "D of weight_shard",
    "dtype of weight_shard", "hidden on the device of weight_shard", "num_samples", "want_logprob",
    "want_lse", "noise", "exchange", "vocab_size", "logit_scale", "softcap", "head_bias (given or not)",
    "logit_bias (given or not)", "mask (given or not)", "seed (given or not)", "seed", "position",
    "temperature",
)  # fmt: skip
OF_A_STEP = 3  # the last ones change from step to step
Header = tuple[int, ...]
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_NOISES: tuple[Noise, ...] = get_args(Noise)


def make_header(
    hidden: Tensor,
    weight_shard: Tensor,
    first_id: int | None,
    num_samples: int,
    want_logprob: bool,
    want_lse: bool,
    noise: Noise,
    exchange: Exchange,
    vocab_size: int | None,
    logit_scale: float,
    softcap: float | None,
    features: tuple[object, object, object],
    seed: int | Tensor | None,
    position: int | Tensor,
    temperature: float | Tensor,
) -> Header:
    """What ranks compare, before anything that could differ is checked on one of them alone.

    features: head_bias, logit_bias and mask, of which it counts whether they are there.
    """
    for name, tensor in (("hidden", hidden), ("weight_shard", weight_shard)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 2:
            raise ValueError(f"{name} must be a tensor with two dimensions; weight_shard is [V_r, D]")
    if first_id is not None and (isinstance(first_id, bool) or not isinstance(first_id, int) or first_id < 0):
        raise ValueError(f"first_id must be an integer, 0 or above, or None, got {first_id!r}")
    if noise not in _NOISES:
        raise ValueError(f"noise must be one of {', '.join(_NOISES)}, got {noise!r}")
    return (
        weight_shard.shape[0], -1 if first_id is None else first_id, hidden.shape[0], hidden.shape[1],
        _DTYPES.get(hidden.dtype, -1), weight_shard.shape[1], _DTYPES.get(weight_shard.dtype, -1),
        int(hidden.device == weight_shard.device), _signed(num_samples), int(bool(want_logprob)),
        int(bool(want_lse)), _NOISES.index(noise), EXCHANGES.index(exchange), _signed(vocab_size),
        _real(logit_scale), _real(softcap), *(int(feature is not None) for feature in features),
        int(seed is not None), _signed(seed), _signed(position), _real(temperature),
    )  # fmt: skip


def agree(team: Team, header: Header, weight: Tensor) -> tuple[Shard, bool]:
    """This rank's shard, and whether the call is the first of its shape; compared where that is not known.

    Raises ValueError, on every rank alike, naming the argument and what each rank gave; RankError when a rank
    does not take part.
    """
    place = (weight.storage_offset(), weight.stride(), weight.device)
    storage = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
    key = (storage, (*place, *header[:-OF_A_STEP]))
    held = team.agreed.get(key)
    is_new = held is None
    if is_new:
        for old in list(team.agreed):
            if old[0].expired():  # type: ignore[no-untyped-call]
                del team.agreed[old]
    always = compares_always(team, weight.device)
    if always:
        team.arrive()
    elif is_new and weight.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a call must be made once outside of a CUDA graph before it is captured, for this group, "
            "weight_shard and shape; ranks compare what they hold in it"
        )
    if held is None or always:
        held = team.agreed[key] = _compare(team, header, weight.device)
    return held, is_new


def compares_always(team: Team, device: torch.device) -> bool:
    """Whether ranks compare at every call: on a GPU that would wait for the device at every step."""
    return device.type == "cpu" or team.backend == "gloo"


def _compare(team: Team, header: Header, device: torch.device) -> Shard:
    """Compare the headers of all ranks and lay out the vocabulary.

    Without first_id, shards follow each other in the order of ranks; with it, it must say just that, so that
    a wrong offset is found here and not in the tokens.
    """
    table = team.gather(torch.tensor(header, dtype=torch.int64, device=device)).tolist()
    for at in range(2, len(_FIELDS)):
        given = [row[at] for row in table]
        if len(set(given)) > 1:
            raise ValueError(
                f"{_FIELDS[at]} must be the same on every rank, got {_by_rank(given)}; "
                "a call of `distributed.sample` is one draw that all ranks make together"
            )
    lengths, given_firsts = [row[0] for row in table], [row[1] for row in table]
    total = sum(lengths)
    if not 1 <= total <= MAX_ID:
        raise ValueError(f"the shards must hold 1 to 2**31 - 1 tokens together, got {_by_rank(lengths)}")
    firsts = [sum(lengths[:rank]) for rank in range(team.size)]
    for rank, given_first in enumerate(given_firsts):
        if given_first >= 0 and lengths[rank] and given_first != firsts[rank]:
            raise ValueError(
                f"first_id of rank {rank} must be {firsts[rank]}, the rows of the ranks before it, got "
                f"{given_first}; shards are contiguous and rise with the rank, lengths {_by_rank(lengths)}"
            )
    return Shard(firsts[team.rank], total)


def _signed(value: object) -> int:
    """A host value as an int64 to compare. What is no number, or on a device, counts as equal."""
    if isinstance(value, int):
        bits = value % (1 << 64)
        return bits - (1 << 64) if bits >> 63 else bits
    if isinstance(value, float):
        return int.from_bytes(struct.pack("<d", value), "little", signed=True)
    return -1


def _real(value: object) -> int:
    """Of a number however it was given. What is none, or finite in no float, is refused after ranks agree."""
    return _signed(finite(value))


def _by_rank(values: list[int]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
