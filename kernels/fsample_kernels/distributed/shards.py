"""Which ids each rank holds, and whether all ranks ask for the same draw: compared, not assumed."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..checks import check_tensor, dtype_name, finite, flag, integer, matrix, one_of, shown
from ..types import Implementation, Math, Noise
from ..validation import MAX_COLUMNS, Shard
from .collectives import Agreed, Team
from .exchanges import EXCHANGES, Exchange

_DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_NOISES: tuple[Noise, ...] = get_args(Noise)
_MATHS: tuple[Math, ...] = get_args(Math)
_IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


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


def _real_said(code: int) -> object:
    return "no number" if code == -1 else struct.unpack("<d", struct.pack("<q", code))[0]


def _dtype_code(dtype: torch.dtype) -> int:
    return _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES)


def _dtype_said(code: int) -> str:
    return dtype_name(_DTYPES[code]) if code < len(_DTYPES) else "another dtype"


def _form_code(value: object, shape: Sequence[int] | None = None) -> int:
    """What decides, beside the values, which kernel an argument takes and whether it is taken at all: 0 none,
    1 values on the host, else dtype and shape of a tensor, its own unless given."""
    if not isinstance(value, Tensor):
        return int(value is not None)
    sizes = value.shape if shape is None else shape
    rows, columns = (0, 0, *sizes)[-2:]
    kind = 2 + 4 * _dtype_code(value.dtype) + min(len(sizes), 3)  # 6 bits
    return kind + (columns % (1 << 32) << 6) + (rows % (1 << 25) << 38)


def _form_said(code: int) -> str:
    kind = code % 64
    if kind < 2:
        return ("none", "values on the host")[kind]
    dims, rows, columns = (kind - 2) % 4, code >> 38, code >> 6 & 0xFFFFFFFF
    shape = ([], [columns], [rows, columns], "of 3 dimensions or more")[dims]
    return f"{_dtype_said((kind - 2) // 4)} tensor {shape}"


def _bias_code(head_bias: object, rows: int) -> int:
    """Its form with, in place of its length, whether that is the shard's: of two shards these may differ."""
    fits = isinstance(head_bias, Tensor) and tuple(head_bias.shape) == (rows,)
    return _form_code(head_bias, [int(fits)])


def _bias_said(code: int) -> str:
    said = _form_said(code)
    return said.replace("[1]", "of weight_shard's rows").replace("[0]", "not of weight_shard's rows")


def _hopper_reads(weight: Tensor) -> bool:
    """Whether rows lie as implementation="hopper" loads them."""
    if importlib.util.find_spec("triton") is None:
        return False
    from ..ops import hopper_sample

    return weight.shape[1] % 8 == 0 and hopper_sample.tma_fits(weight)


# What ranks compare, and how it is said. Every rank must give the same, the first two aside.
_FIELDS: tuple[tuple[str, Callable[[int], object]], ...] = (
    ("rows of weight_shard", int), ("first_id", int), ("rows B of hidden", int), ("hidden size D", int),
    ("dtype", _dtype_said), ("D of weight_shard", int), ("dtype of weight_shard", _dtype_said),
    ("hidden on the device of weight_shard", bool), ("num_samples", int), ("want_logprob", bool),
    ("want_lse", bool), ("store_logits", bool), ("noise", _NOISES.__getitem__), ("math", _MATHS.__getitem__),
    ("exchange", EXCHANGES.__getitem__), ("vocab_size", int), ("logit_scale", _real_said),
    ("softcap", _real_said), ("implementation", _IMPLEMENTATIONS.__getitem__),
    ("whether implementation='hopper' can read weight_shard", bool), ("head_bias", _bias_said),
    ("logit_bias", _form_said), ("mask", _form_said), ("seed", _form_said), ("position", _form_said),
    ("temperature", _form_said), ("seed", int), ("position", int), ("temperature", _real_said),
)  # fmt: skip
_IMPLEMENTATION_AT = [name for name, _ in _FIELDS].index("implementation")
OF_A_STEP = 3  # the last ones change from step to step
Header = tuple[int, ...]


def make_header(
    hidden: Tensor,
    weight_shard: Tensor,
    first_id: int | None,
    num_samples: int,
    want_logprob: bool,
    want_lse: bool,
    store_logits: bool,
    noise: Noise,
    math: Math,
    exchange: Exchange,
    vocab_size: int | None,
    logit_scale: float,
    softcap: float | None,
    implementation: Implementation,
    features: tuple[object, object, object],
    seed: int | Tensor | None,
    position: int | Tensor,
    temperature: float | Tensor,
) -> Header:
    """What ranks compare, before anything that could differ is checked on one of them alone.

    features: head_bias, logit_bias and mask. Of them, and of what a row has, it takes the form: another form
    may be another kernel, and before the first call of it no rank waits for one that still compiles.
    """
    matrix("hidden", hidden)
    matrix("weight_shard", weight_shard)
    first = -1 if first_id is None else integer("first_id", first_id)
    if first_id is not None and not 0 <= first <= MAX_COLUMNS:
        raise ValueError(
            f"first_id must be an integer, 0 or above, at most 2**31 - 4096, or None, got {shown(first)}; "
            "it is the id of the shard's first row"
        )
    head_bias, *others = features
    named = zip(
        ("head_bias", "logit_bias", "mask", "seed", "position", "temperature"),
        (*features, seed, position, temperature),
        strict=True,
    )
    for name, value in named:
        if isinstance(value, Tensor):
            check_tensor(name, value)
    one_of("noise", noise, _NOISES)
    one_of("math", math, _MATHS)
    one_of("exchange", exchange, EXCHANGES)
    one_of("implementation", implementation, _IMPLEMENTATIONS)
    return (
        weight_shard.shape[0], first, hidden.shape[0], hidden.shape[1],
        _dtype_code(hidden.dtype), weight_shard.shape[1], _dtype_code(weight_shard.dtype),
        int(hidden.device == weight_shard.device), _signed(num_samples),
        flag("want_logprob", want_logprob), flag("want_lse", want_lse), flag("store_logits", store_logits),
        _NOISES.index(noise), _MATHS.index(math),
        EXCHANGES.index(exchange), _signed(vocab_size), _real(logit_scale), _real(softcap),
        _IMPLEMENTATIONS.index(implementation),
        int(implementation != "hopper" or _hopper_reads(weight_shard)),
        _bias_code(head_bias, weight_shard.shape[0]),
        *(_form_code(value) for value in (*others, seed, position, temperature)),
        _signed(seed), _signed(position), _real(temperature),
    )  # fmt: skip


def agree(team: Team, header: Header, weight: Tensor) -> Agreed:
    """This rank's shard, and whether a call of this kind has been made; compared where that is not known.

    Raises ValueError, on every rank alike, naming the argument and what each rank gave; RankError when a rank
    does not take part.
    """
    place = (weight.storage_offset(), weight.stride(), weight.device)
    storage = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
    key = (storage, (*place, *header[:-OF_A_STEP]))
    held = team.agreed.get(key)
    if held is None:
        for old in list(team.agreed):
            if old[0].expired():  # type: ignore[no-untyped-call]
                del team.agreed[old]
    always = compares_always(team, weight.device)
    if always or held is None or not held.made:
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "a group of gloo sends through the host's memory, which no CUDA graph captures; use NCCL"
                if always
                else "a call must be made once outside of a CUDA graph before it is captured, for this "
                "group, weight_shard, shape and kinds of arguments; ranks compare what they hold in it"
            )
        team.arrive()
        if not always:
            team.meet()
    if held is None or always:
        shard = _compare(team, header, weight.device)
        held = team.agreed[key] = Agreed(shard, held is not None and held.made)
    return held


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
        name, said = _FIELDS[at]
        if len({row[at] for row in table}) > 1:
            given = [said(row[at]) for row in table]
            raise ValueError(
                f"{name} must be the same on every rank, got {_by_rank(given)}; "
                "a call of `distributed.sample` is one draw that all ranks make together"
            )
    lengths, given_firsts = [row[0] for row in table], [row[1] for row in table]
    total = sum(lengths)
    firsts = [sum(lengths[:rank]) for rank in range(team.size)]
    if _IMPLEMENTATIONS[header[_IMPLEMENTATION_AT]] == "hopper":
        for rank, first in enumerate(firsts):
            if lengths[rank] and first % 128:
                raise ValueError(
                    "implementation='hopper' needs shards that start at multiples of 128, that of rank "
                    f"{rank} starts at {first}; use 'auto' or 'triton', or split elsewhere"
                )
    for rank, given_first in enumerate(given_firsts):
        if given_first >= 0 and lengths[rank] and given_first != firsts[rank]:
            raise ValueError(
                f"first_id of rank {rank} must be {firsts[rank]}, the rows of the ranks before it, got "
                f"{given_first}; shards are contiguous and rise with the rank, lengths {_by_rank(lengths)}"
            )
    return Shard(firsts[team.rank], total)


def _by_rank(values: Sequence[object]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
