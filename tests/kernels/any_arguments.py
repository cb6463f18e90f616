"""Arguments of any kind at all, as the tests of properties draw them, and what a refusal of them must say."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import numpy
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

EXAMPLES = int(os.environ.get("FSAMPLE_EXAMPLES", "200")) // 2
PROFILE = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=timedelta(seconds=30),  # a hang shows; a busy machine does not
    suppress_health_check=list(HealthCheck),
)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def nested() -> Tensor:
    """Of two tensors: it has no shape."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are a prototype
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


# Of no argument a value, of no type either, and tensors whose values lie in no memory as they are
VALUES: list[Any] = [
    None, "", "1", b"1", object(), [], {}, (), [1.0], 1j, math.nan, True, -1, 0.5, print, numpy.zeros(2),
    numpy.zeros((2, 2)), 10**400, torch.zeros(2, 2), torch.zeros(0), torch.zeros(2, 3, 4), torch.float32,
    nested(), torch.zeros(2, 8).to_sparse(), torch.zeros(2, 8, dtype=torch.uint8).view(torch.bits8),
    torch.zeros(2, 8, device="meta"), torch.zeros((), device="meta", dtype=torch.int64),
    torch.complex(torch.zeros(2, 8), -torch.ones(2, 8)).conj().imag, torch._efficientzerotensor((2, 8)),
]  # fmt: skip
RUBBISH = st.sampled_from(VALUES)


class Call(NamedTuple):
    """Arguments of a call; `broken` are those with a value that may be outside the contract."""

    tensors: dict[str, Any]
    options: dict[str, Any]
    broken: frozenset[str]


def tensor(
    draw: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """Normal values, sometimes with odd ones and odd strides."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    values = (torch.randn(shape, generator=generator) * scale).to(dtype)
    if values.numel() and draw(st.integers(0, 5)) == 0:
        odd = draw(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e30, -1e30, 1e-40, 65504.0]))
        values.view(-1)[draw(st.integers(0, values.numel() - 1))] = odd
    if values.dim() == 2 and draw(st.integers(0, 3)) == 0:
        return values.t().contiguous().t()
    return values


def per_row(
    draw: Callable[..., Any], rows: int, values: list[Any], dtypes: tuple[torch.dtype, ...]
) -> Tensor:
    chosen = draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows))
    made = torch.tensor(chosen, dtype=draw(st.sampled_from(dtypes)))
    return made if draw(st.booleans()) or not rows else made[0]


def temperature(draw: Callable[..., Any], B: int, V: int) -> Any:
    values = [0.0, -0.0, 1e-30, 2.0**-64, 0.5, 1.0, 3.0, 1e30]
    if draw(st.booleans()):
        return draw(st.sampled_from([*values, 1, 0, numpy.float32(0.7)]))
    return per_row(draw, B, [*values, math.nan, math.inf, -1.0], (*FLOATS, torch.float64))


def seed(draw: Callable[..., Any], B: int, V: int) -> Any:
    if draw(st.booleans()):
        return draw(st.integers(-(2**63), 2**64 - 1))
    return per_row(draw, B, [0, 1, -1, 2**63 - 1, -(2**63)], (torch.int64,))


def position(draw: Callable[..., Any], B: int, V: int) -> Any:
    if draw(st.booleans()):
        return draw(st.integers(0, 2**32 - 1))
    if draw(st.booleans()):
        return per_row(draw, B, [0, 1, 2**31 - 1, -1], (torch.int32, torch.int64))
    return per_row(draw, B, [0, 2**32 - 1, 2**32, -(2**63)], (torch.int64,))


def logit_bias(draw: Callable[..., Any], B: int, V: int) -> Any:
    form = draw(st.sampled_from(["row", "all", "mapping", "mappings", "host", "device"]))
    if form in ("row", "all"):
        shape = (V,) if form == "row" else (B, V)
        return tensor(draw, shape, draw(st.sampled_from((*FLOATS, torch.float64))), 2.0)
    mapping = st.dictionaries(st.integers(0, V - 1), st.sampled_from([0.0, -3, 2.5, 1e30, -1e38]), max_size=4)
    if form == "mapping":
        return draw(mapping)
    if form == "mappings":
        return draw(st.lists(mapping, min_size=B, max_size=B))
    count = draw(st.integers(0, 4)) if B else 0
    low, high = (0, -1) if form == "host" else (-1, 0)  # on the device a bad entry spoils its row
    rows = draw(st.lists(st.integers(low, max(B + high, 0)), min_size=count, max_size=count))
    ids = draw(st.lists(st.integers(low, V + high), min_size=count, max_size=count))
    odd = [] if form == "host" else [math.nan, math.inf, -math.inf]
    values = draw(st.lists(st.sampled_from([1.0, -2.0, 30.0, *odd]), min_size=count, max_size=count))
    if form == "host":
        return draw(st.sampled_from([list, tuple]))((rows, ids, values))
    integer = draw(st.sampled_from([torch.int32, torch.int64]))
    floating = draw(st.sampled_from((*FLOATS, torch.float64)))
    return (
        torch.tensor(rows, dtype=integer), torch.tensor(ids, dtype=integer),
        torch.tensor(values, dtype=floating),
    )  # fmt: skip


def mask(draw: Callable[..., Any], B: int, V: int) -> Any:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    share = draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
    form = draw(st.sampled_from(["row", "all", "packed"]))
    if form == "packed":
        words = torch.randint(-(2**31), 2**31, (B, -(-V // 32)), generator=generator).to(torch.int32)
        return words if share else torch.zeros_like(words)
    return torch.rand((V,) if form == "row" else (B, V), generator=generator) < share


def choice(*values: Any) -> Callable[..., Any]:
    return lambda draw, B, V: draw(st.sampled_from(values))


OPTIONS: dict[str, Callable[..., Any]] = {
    "temperature": temperature,
    "seed": seed,
    "position": position,
    "num_samples": choice(0, 1, 2, 5, numpy.int64(2)),
    "logit_scale": choice(1.0, 0.0625, -1, 0.0, 1e30, 1e-30),
    "softcap": choice(None, 30.0, 1, 1e-3, 1e30),
    "logit_bias": logit_bias,
    "mask": mask,
    "vocab_size": lambda draw, B, V: draw(st.integers(1, V)),
    "noise": choice("grouped", "element", "online"),
    "math": choice("fast", "exact"),
    "want_logprob": choice(True, False),
    "want_lse": choice(True, False),
    "implementation": choice("auto", "reference"),
}
HEAD_OPTIONS: dict[str, Callable[..., Any]] = {
    **OPTIONS,
    "head_bias": lambda draw, B, V: tensor(draw, (V,), draw(st.sampled_from((*FLOATS, torch.float64)))),
    "store_logits": choice(True, False),
}
# Of `distributed.sample`, and of `warm_up`, beside those
SHARD_OPTIONS: dict[str, Callable[..., Any]] = {
    "first_id": choice(None, 0, numpy.int64(0)),
    "exchange": choice("auto", "candidates", "log_mass"),
    "group": choice(None),
}
WARM_OPTIONS: dict[str, Callable[..., Any]] = {
    "max_batch": choice(1, 7, 65, numpy.int64(5)),
    "workers": choice(None, 1, 3, numpy.int64(2)),
}
# Outside the contract, or inside it by chance; beside RUBBISH
WRONG: dict[str, list[Any]] = {
    "temperature": [math.inf, -math.inf, -0.5, 1e39, 10**400, torch.ones(1, 1), torch.ones(99),
                    torch.ones((), dtype=torch.int64), torch.ones((), device="meta")],
    "seed": [2**64, -(2**63) - 1, torch.zeros(99, dtype=torch.int64), torch.zeros(()),
             torch.zeros((), dtype=torch.int32), torch.zeros((), dtype=torch.int64, device="meta")],
    "position": [2**32, torch.zeros(99, dtype=torch.int64), torch.zeros(()), torch.tensor(True)],
    "num_samples": [-5, 2**32 + 1, 2.0, torch.tensor(2)],
    "logit_scale": [math.inf, -math.inf, 10**400, torch.ones(())],
    "softcap": [0, -30.0, math.inf, 10**400, torch.ones(())],
    "logit_bias": [{-1: 1.0}, {0: math.nan}, {0: 1e39}, {10**30: 1.0}, {"0": 1.0}, {0: "1"}, {0.0: 1.0},
                   {0: None}, [{}] * 99, ([0], [0], [math.inf]), ([0], [0, 1], [1.0]), ([99], [0], [1.0]),
                   ("a", "b", "c"), ([[0]], [[0]], [[1.0]]), (torch.zeros(1), torch.zeros(1), torch.zeros(1)),
                   (torch.zeros(1, dtype=torch.int64), [0], [1.0]), torch.zeros(99), torch.zeros(()),
                   (torch.zeros(1, 1, dtype=torch.int64),) * 2 + (torch.zeros(1, 1),), torch.zeros(3, 3, 3)],
    "mask": [torch.ones(()), torch.ones(99, dtype=torch.bool), torch.ones(1, 1, 1, dtype=torch.bool),
             torch.ones((), dtype=torch.bool), torch.ones(99, 1, dtype=torch.int32), [True],
             torch.ones(1, dtype=torch.int32), torch.ones(3, device="meta", dtype=torch.bool)],
    "vocab_size": [0, -3, 10**9, 2.0, torch.tensor(3)],
    "noise": ["Grouped", "gumbel"],
    "math": ["sloppy"],
    "want_logprob": [0, 1, torch.tensor(True)],
    "want_lse": ["yes"],
    "implementation": ["triton", "hopper", "cuda", "AUTO"],
    "head_bias": [torch.zeros(99), torch.zeros(()), torch.zeros(1, 1), torch.zeros(3, dtype=torch.int32)],
    "store_logits": [2],
    "hidden": [torch.zeros(3), torch.zeros(2, 99), torch.zeros(2, 0), torch.zeros(2, 3, 4), torch.zeros(()),
               torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.int64),
               torch.zeros(2, 8, device="meta"), torch.zeros(2, 8).to_sparse(), [[1.0]]],
    "weight": [torch.zeros(0, 8), torch.zeros(3), torch.zeros(5, 99), torch.zeros(5, 0),
               torch.zeros(5, 8, dtype=torch.complex64), torch.zeros(5, 8, device="meta"),
               torch.zeros(5, 8).to_sparse(), torch.zeros(5, 8).to(torch.float8_e4m3fn)],
    "max_batch": [0, -7, 1 << 15, 2.0, 10**400],
    "workers": [0, -1, 2.0, "2"],
    "first_id": [1, 128, -1, 2**31, 2**63, 1.0],
    "exchange": ["p2p", "p2p_after", "all"],
    "group": ["gloo", 0, -100],
    "logits": [torch.zeros(3), torch.zeros(2, 0), torch.zeros(2, 3, 4),
               torch.zeros(2, 5, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.bool),
               torch.zeros(2, 5, device="meta"), torch.zeros(2, 5).to_sparse()],
}  # fmt: skip
# Of `merge_log_mass`
MERGE_WRONG: dict[str, list[Any]] = {
    "ids": [torch.zeros(2, 3, 1), torch.zeros(2, 3, dtype=torch.int64),
            torch.zeros(0, 3, 1, dtype=torch.int64),
            torch.zeros(1, 1, 1, dtype=torch.int64).expand(1, 2**24 + 1, 1),
            torch.zeros(1, 0, 1, dtype=torch.int64).expand(1, 0, 2**32 + 1),
            torch.zeros(2, 3, 1, dtype=torch.int64, device="meta")],
    "lse": [torch.zeros(9, 9), torch.zeros(2), torch.zeros(2, 3, dtype=torch.float64),
            torch.zeros(2, 3, device="meta"), torch.zeros(3, 2).bool()],
    "seed": WRONG["seed"],
    "position": WRONG["position"],
    "greedy": ["x", 2, 0, torch.tensor(1), torch.ones(99).bool(), torch.ones(1, 1).bool(),
               torch.ones((), dtype=torch.bool, device="meta")],
}  # fmt: skip
# Words that name an argument in a message, where its own name does not have to be there
ALSO_NAMED = {
    "hidden": "hidden|weight|weight_shard|batch", "weight": "hidden|weight", "logits": "logits|batch",
    "weight_shard": "hidden|weight_shard", "ids": "ids|batch|num_samples", "source": "source|table",
}  # fmt: skip


@st.composite
def calls(
    draw: Callable[..., Any],
    head: bool,
    more: dict[str, Callable[..., Any]] | None = None,
    batches: tuple[int, ...] = (1, 2, 3, 4, 1, 2, 3, 0),
) -> Call:
    """Calls of `sample` or `sample_logits`, with `more` options of another function of that kind."""
    B, V = draw(st.sampled_from(batches)), draw(st.sampled_from([1, 2, 31, 33, 100, 128, 129, 300]))
    dtype = draw(st.sampled_from(FLOATS))
    tensors: dict[str, Any]
    if head:
        D = draw(st.sampled_from([1, 8, 17]))
        tensors = {"hidden": tensor(draw, (B, D), dtype, 2.0), "weight": tensor(draw, (V, D), dtype)}
    else:
        tensors = {"logits": tensor(draw, (B, V), dtype, 3.0)}
    known = (HEAD_OPTIONS if head else OPTIONS) | (more or {})
    # A few of them for most calls, so that not every row is spoiled; a generator needs a seed to be compared
    names = draw(st.sets(st.sampled_from(sorted(known)), max_size=5)) | {"seed"}
    options = {name: known[name](draw, B, V) for name in sorted(names)}
    broken = frozenset(
        draw(st.sets(st.sampled_from(sorted({*known, *tensors})), min_size=1, max_size=2))
        if draw(st.booleans())
        else ()
    )
    for name in sorted(broken):
        place = tensors if name in tensors else options
        place[name] = draw(RUBBISH | st.sampled_from(WRONG[name]))
    return Call(tensors, options, broken)


def each_alone(
    plain: Call, names: Iterable[str], wrong: dict[str, list[Any]] = WRONG
) -> Iterator[tuple[Call, bool]]:
    """A good call with one argument spoiled at a time, and whether it has to be refused.

    Chance leaves out a rule that one value of one argument shows; these calls show each.
    """
    for name in sorted(names):
        for number, value in enumerate([*wrong[name], *VALUES]):
            tensors, options = dict(plain.tensors), dict(plain.options)
            (tensors if name in tensors else options)[name] = value
            yield Call(tensors, options, frozenset({name})), number < len(wrong[name])


def check_refusal(message: str, call: Call) -> None:
    """One line, that names an argument which was given something outside the contract."""
    blamed = call.broken | (
        {"mask", "vocab_size", "logit_bias"} & set(call.options) if call.broken else set()
    )
    # A broken first argument, or vocab_size, changes the shapes that the others have to fit.
    if call.broken & {"hidden", "weight", "weight_shard", "logits", "ids"}:
        blamed |= set(call.options) | set(call.tensors)
    elif "vocab_size" in call.options:
        blamed |= {"mask", "logit_bias"} & set(call.options)
    words = "|".join(ALSO_NAMED.get(name, name) for name in sorted(blamed)) or "(?!)"
    assert re.search(rf"\b({words})\b", message), (message, call)
    assert "\n" not in message, message
