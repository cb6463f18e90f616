"""Bad input: one ValueError that names argument, rule and value, before anything runs."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from fsample_kernels import sample, sample_logits, validation

B, V, D = 4, 100, 16
HIDDEN, WEIGHT = torch.randn(B, D), torch.randn(V, D)
LOGITS = HIDDEN @ WEIGHT.t()
# A view of ones: what lies there has the other sign. Not drawn, since it is in the names of tests.
NEGATED = torch.complex(torch.zeros(B * V), -torch.ones(B * V)).conj().imag
# What a functional collective returns, and every view of it: its address is 0.
GATHERED = AsyncCollectiveTensor(LOGITS).view(B, V)[:, :]


def refused(call: Callable[[], object], *parts: object) -> None:
    """The message must hold every part; it is one line."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert re.search(re.escape(str(part)), message), (part, message)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ({"temperature": math.nan}, ["temperature", "finite", "nan"]),
        ({"temperature": math.inf}, ["temperature", "finite", "inf"]),
        ({"temperature": -math.inf}, ["temperature", "finite", "-inf"]),
        ({"temperature": 1e309}, ["temperature", "finite"]),
        ({"temperature": 1e39}, ["temperature", "finite in fp32", "1e+39"]),
        ({"temperature": -0.5}, ["temperature", "0 (greedy) or above", "-0.5"]),
        ({"temperature": "1"}, ["temperature", "'1'"]),
        ({"temperature": True}, ["temperature", "True"]),
        ({"temperature": torch.ones(B + 1)}, ["temperature", f"B = {B}", f"[{B + 1}]"]),
        ({"temperature": torch.ones(1)}, ["temperature", f"B = {B}", "[1]"]),
        ({"temperature": torch.ones(B, dtype=torch.int64)}, ["temperature", "float32", "int64"]),
        ({"seed": 2**64}, ["seed", "64 bits", 2**64]),
        ({"seed": -(2**63) - 1}, ["seed", "64 bits"]),
        ({"seed": 1.5}, ["seed", "integer", "1.5"]),
        ({"seed": torch.ones(2, dtype=torch.int64)}, ["seed", f"B = {B}", "[2]"]),
        ({"seed": torch.ones(B, dtype=torch.int32)}, ["seed", "int64", "int32"]),
        ({"position": 5 + 2**32}, ["position", "2**32", 5 + 2**32]),
        ({"position": -1}, ["position", "-1"]),
        ({"position": torch.zeros(B)}, ["position", "int32 or int64", "float32"]),
        ({"position": torch.zeros(1, B, dtype=torch.int64)}, ["position", f"[1, {B}]"]),
        ({"num_samples": -1}, ["num_samples", "-1"]),
        ({"num_samples": 2.0}, ["num_samples", "2.0"]),
        ({"logit_scale": math.nan}, ["logit_scale", "nan"]),
        ({"logit_scale": 1e39}, ["logit_scale", "in fp32", "1e+39"]),
        ({"softcap": 0.0}, ["softcap", "0.0", "None"]),
        ({"softcap": 1e39}, ["softcap", "2**126", "1e+39"]),
        ({"softcap": 1e-39}, ["softcap", "2**-126", "1e-39"]),
        ({"temperature": NEGATED[:B]}, ["temperature", "negative bit", ".resolve_neg()"]),
        ({"logit_bias": NEGATED[:V]}, ["logit_bias", "negative bit"]),
        (
            {"logit_bias": (torch.zeros(2).long(), torch.zeros(2).long(), NEGATED[:2])},
            ["logit_bias values", "negative bit"],
        ),
        ({"softcap": -30.0}, ["softcap", "-30"]),
        ({"softcap": math.inf}, ["softcap", "inf"]),
        ({"logit_bias": torch.zeros(V + 1)}, ["logit_bias", f"[{V}] or [{B}, {V}]", V + 1]),
        ({"logit_bias": torch.zeros(V, dtype=torch.int64)}, ["logit_bias", "floating", "int64"]),
        (
            {"logit_bias": {V: 5.0, -1: 5.0, 0: math.nan, 1: 1e40}},
            ["logit_bias", f"[{V}, -1]", "[nan, 1e+40]"],
        ),
        ({"logit_bias": {3: 10**400}}, ["logit_bias", "values"]),
        ({"logit_bias": {2.5: 1.0}}, ["logit_bias", "[2.5]"]),
        ({"logit_bias": [{1: 1.0}] * (B - 1)}, ["logit_bias", f"B = {B}", B - 1]),
        ({"logit_bias": [{}, {}, {}, {V: 1.0}]}, ["logit_bias", f"[{V}]"]),
        ({"logit_bias": ([B], [0], [1.0])}, ["logit_bias", "rows", f"[{B}]"]),
        ({"logit_bias": ([0], [0, 1], [1.0])}, ["logit_bias", "equally long", "1, 2, 1"]),
        ({"logit_bias": ([0], torch.tensor([0]), [1.0])}, ["logit_bias", "three tensors or three sequences"]),
        ({"logit_bias": 3.0}, ["logit_bias", "float"]),
        (
            {"logit_bias": (torch.zeros(2), torch.zeros(2), torch.zeros(2))},
            ["logit_bias rows", "int32 or int64"],
        ),
        (
            {
                "logit_bias": (
                    torch.zeros(3, dtype=torch.int64),
                    torch.zeros(2, dtype=torch.int64),
                    torch.zeros(2),
                )
            },
            ["logit_bias rows", "N = 2", "[3]"],
        ),
        ({"mask": torch.ones(V - 1, dtype=torch.bool)}, ["mask", V, V - 1]),
        ({"mask": torch.ones(B + 1, V, dtype=torch.bool)}, ["mask", f"B = {B}", B + 1]),
        ({"mask": torch.ones(V, dtype=torch.uint8)}, ["mask", "uint8", "mask.bool()"]),
        ({"mask": torch.ones(B, 3, dtype=torch.int32)}, ["mask", "4 words", "[4, 3]"]),
        ({"mask": torch.ones(B, 3, dtype=torch.int32), "vocab_size": 97}, ["mask", "4 words"]),
        ({"mask": torch.ones(4, dtype=torch.int32)}, ["mask", "[4]"]),
        ({"vocab_size": 0}, ["vocab_size", "[1, V]", "got 0"]),
        ({"vocab_size": -3}, ["vocab_size", "-3"]),
        ({"vocab_size": V + 1}, ["vocab_size", f"V = {V}", V + 1]),
        ({"noise": "gumbel"}, ["noise", "grouped, element, online", "gumbel"]),
        ({"math": "sloppy"}, ["math", "fast, exact", "sloppy"]),
        ({"math": torch.zeros(2).numpy()}, ["math", "fast, exact", "array"]),
        ({"implementation": "cuda"}, ["implementation", "auto, reference, triton, hopper", "cuda"]),
        ({"want_lse": 1}, ["want_lse", "True or False"]),
    ],
    ids=str,
)
def test_arguments_of_both_functions(arguments: dict[str, Any], parts: list[object]) -> None:
    refused(lambda: sample(HIDDEN, WEIGHT, **arguments), *parts)
    refused(lambda: sample_logits(LOGITS, **arguments), *parts)


@pytest.mark.parametrize(
    "hidden, weight, parts",
    [
        (HIDDEN[0], WEIGHT, ["hidden", "two dimensions", [D]]),
        (HIDDEN, WEIGHT.t(), ["hidden", f"D = {V}", [B, D]]),
        (HIDDEN[:, :0], WEIGHT[:, :0], ["hidden", "D = 0"]),
        (HIDDEN, WEIGHT[:0], ["weight", "V = 0"]),
        (HIDDEN, WEIGHT.bfloat16(), ["one dtype", "float32 and bfloat16"]),
        (HIDDEN.double(), WEIGHT.double(), ["one dtype", "float64"]),
        (HIDDEN, WEIGHT.to(torch.float8_e4m3fn), ["float8_e4m3fn", "scales"]),
        (HIDDEN.char(), WEIGHT.char(), ["int8"]),
        (HIDDEN, WEIGHT.to("meta"), ["weight", "meta"]),
        (HIDDEN.numpy(), WEIGHT, ["hidden", "torch.Tensor", "ndarray"]),
        (HIDDEN.to_sparse(), WEIGHT, ["hidden", "dense"]),
    ],
    ids=["1-d", "transposed", "D=0", "V=0", "mixed", "fp64", "fp8", "int8", "meta", "numpy", "sparse"],
)
def test_head_shapes_and_dtypes(hidden: Any, weight: Any, parts: list[object]) -> None:
    refused(lambda: sample(hidden, weight), *parts)


SPARSE = torch.eye(B, V).to_sparse()


@pytest.mark.parametrize(
    "arguments",
    [
        {"mask": SPARSE.bool()},
        {"logit_bias": SPARSE},
        {"head_bias": SPARSE[0]},
        {"temperature": SPARSE[:, 0]},
    ],
    ids=["mask", "logit_bias", "head_bias", "temperature"],
)
def test_tables_without_their_values_side_by_side(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    refused(lambda: sample(HIDDEN, WEIGHT, **arguments), name, "dense tensor", ".to_dense()")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_memory_that_holds_no_values() -> None:
    nested = torch.nested.nested_tensor([HIDDEN, HIDDEN[:2]])
    refused(lambda: sample(nested, WEIGHT), "hidden", "dense tensor", "nested")
    refused(
        lambda: sample(HIDDEN, WEIGHT, logit_bias=torch._efficientzerotensor((V,))), "logit_bias", ".clone()"
    )


def test_the_rest() -> None:
    refused(lambda: sample(HIDDEN, WEIGHT, head_bias=torch.zeros(V + 1)), "head_bias", f"[{V}]", V + 1)
    refused(lambda: sample(HIDDEN, WEIGHT, head_bias=torch.zeros(V, dtype=torch.int8)), "head_bias", "int8")
    refused(lambda: sample(NEGATED[: B * D].view(B, D), WEIGHT), "hidden", "negative bit", ".resolve_neg()")
    refused(lambda: sample_logits(NEGATED.view(B, V)), "logits", "negative bit")
    refused(lambda: sample_logits(GATHERED), "logits", "plain", "AsyncCollectiveTensor", ".wait()")
    refused(lambda: sample_logits(LOGITS, mask=GATHERED > 0, logit_bias=GATHERED), "logit_bias", "plain")
    refused(
        lambda: sample_logits(torch.empty(1, 1).expand(1, 2**31 - 4095)),
        "logits",
        "2**31 - 4096",
        2**31 - 4095,
    )
    refused(lambda: sample(HIDDEN, WEIGHT[:1].expand(2**31, D)), "weight", "2**31 - 4096", 2**31)
    refused(lambda: sample_logits(LOGITS.double()), "logits", "float64", "logits.float()")
    refused(lambda: sample_logits(LOGITS[:, :0]), "logits", "V = 0")
    refused(lambda: sample_logits(torch.empty(2**24 + 1, 1, dtype=torch.float16)), "2**24", 2**24 + 1)
    refused(
        lambda: sample(HIDDEN, WEIGHT, logit_bias=torch.zeros(V, device="meta")), "logit_bias", "cpu", "meta"
    )


def test_a_rank_calls_its_part_of_the_head_a_shard() -> None:
    options = {name: p.default for name, p in inspect.signature(sample).parameters.items()}
    for name in ("hidden", "weight", "implementation"):
        del options[name]

    def call(hidden: torch.Tensor, shard: torch.Tensor) -> object:
        return validation.head_problem(hidden, shard, shard=validation.Shard(0, 2 * V), **options)

    refused(lambda: call(HIDDEN[:, :-1], WEIGHT), "hidden", "(from weight_shard)")
    refused(lambda: call(HIDDEN, WEIGHT[0]), "weight_shard", "two dimensions")
    refused(lambda: call(HIDDEN, WEIGHT.double()), "hidden and weight_shard", "float64")

    def of_all(total: int, **changes: object) -> None:
        held = validation.Shard(0, total)
        validation.head_problem(HIDDEN, WEIGHT[:total], shard=held, **{**options, **changes})

    refused(lambda: of_all(0), "weight_shard of all ranks", "at least one token", "V = 0")
    refused(lambda: of_all(2**31), "weight_shard of all ranks", "at most 2**31 - 4096 tokens", 2**31)
    refused(lambda: of_all(V, vocab_size=V + 1), "vocab_size", "(from weight_shard of all ranks)", V + 1)


def test_values_of_any_length_make_one_short_line() -> None:
    for value in (
        torch.zeros(9, 9),
        torch.zeros(9, 9).to_sparse(),
        torch.zeros(9, 9).numpy(),
        [10**5000],
        "x\n" * 999,
        {"a": "b" * 9999},
    ):
        for name in ("num_samples", "logit_scale", "noise", "want_lse"):
            wrong: Any = {name: value}
            with pytest.raises(ValueError, match=f"^{name} must") as caught:
                sample_logits(LOGITS, **wrong)
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    for name in ("seed", "position", "num_samples", "vocab_size", "temperature", "softcap"):
        number: Any = {name: 10**5000}  # more digits than Python writes out
        refused(lambda number=number: sample_logits(LOGITS, **number), name, "very many digits")  # type: ignore[misc]
    refused(lambda: sample_logits(LOGITS, logit_bias={10**5000: 1.0}), "logit_bias", "very many digits")


def test_a_refusal_reads_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repr would, and wait for a GPU."""

    def read(*_: object) -> str:
        raise AssertionError("a message read a tensor's values")

    monkeypatch.setattr(torch.Tensor, "__repr__", read)
    for name in ("num_samples", "logit_scale", "noise", "want_lse"):
        wrong: Any = {name: torch.zeros(2)}
        with pytest.raises(ValueError, match=f"^{name} must .* got a tensor with 1 dimensions, float32"):
            sample_logits(LOGITS, **wrong)


# Nothing is read from the device: on "meta" a read raises, and the same code serves every device.
def test_parameters_are_checked_without_reading_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("validation read a tensor's values")

    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, read)
    problem = validation.head_problem(
        HIDDEN,
        WEIGHT,
        temperature=torch.full((B,), math.nan),
        seed=torch.arange(B),
        position=torch.arange(B, dtype=torch.int32),
        num_samples=2,
        head_bias=torch.zeros(V),
        logit_scale=1,
        softcap=30,
        logit_bias=(torch.tensor([9]), torch.tensor([9]), torch.tensor([9.0])),
        mask=torch.ones(V, dtype=torch.bool),
        vocab_size=V,
        noise="grouped",
        math="fast",
        want_logprob=True,
        want_lse=True,
        store_logits=True,
    )
    assert isinstance(problem.position, torch.Tensor) and problem.position.dtype == torch.int64


def test_accepted_forms() -> None:
    """Numbers of other libraries, -0.0, every width of a mask, every form of a bias: one meaning each."""
    import numpy as np

    want = sample_logits(LOGITS, seed=3, temperature=0.7, num_samples=5).ids
    numpy: Any = {"seed": np.int64(3), "temperature": np.float32(0.7), "num_samples": np.int64(5)}
    got = sample_logits(LOGITS, **numpy).ids
    assert torch.equal(got, want)
    for temperature in (torch.tensor(0.7), torch.full((B,), 0.7), torch.full((B,), 0.7, dtype=torch.float64)):
        assert torch.equal(sample_logits(LOGITS, seed=3, temperature=temperature, num_samples=5).ids, want)
    greedy = LOGITS.argmax(1, keepdim=True)
    for zero in (0, 0.0, -0.0, torch.tensor(-0.0)):
        assert torch.equal(sample_logits(LOGITS, seed=3, temperature=zero).ids, greedy)
    bound = 70
    masks = [torch.ones(bound), torch.ones(V), torch.ones(B, bound), torch.ones(B, V)]
    words = [torch.full((B, 3), -1, dtype=torch.int32), torch.full((B, 4), -1, dtype=torch.int32)]
    want = sample_logits(LOGITS, seed=3, vocab_size=bound, num_samples=9).ids
    for mask in [*(mask.bool() for mask in masks), *words]:
        assert torch.equal(
            sample_logits(LOGITS, seed=3, vocab_size=bound, mask=mask, num_samples=9).ids, want
        )
    dense = torch.zeros(B, V)
    dense[:, 5], dense[:, 8] = 2.5, -1.5
    entries = [(row, token, value) for row in range(B) for token, value in ((5, 2.5), (8, -1.5))]
    rows, ids, values = ([entry[i] for entry in entries] for i in range(3))
    want = sample_logits(LOGITS, seed=3, logit_bias=dense, num_samples=9).ids
    forms: list[Any] = [
        dense[0], {5: 2.5, 8: -1.5}, [{5: 2.5, 8: -1.5}] * B, (rows, ids, values), [rows, ids, values],
        (torch.tensor(rows), torch.tensor(ids, dtype=torch.int32), torch.tensor(values, dtype=torch.float64)),
    ]  # fmt: skip
    for form in forms:
        assert torch.equal(sample_logits(LOGITS, seed=3, logit_bias=form, num_samples=9).ids, want)
