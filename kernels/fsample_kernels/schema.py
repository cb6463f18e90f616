"""The values of a call as the schema of `fsample::sample` carries them, found while torch.compile traces.

What a schema cannot carry as it is (a bool for a number, a seed of 65 bits) becomes the message of an error
that the operator raises when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import checks, validation
from .bias_forms import LogitBias


def columns_of(weight: Tensor | None, logits: Tensor | None) -> tuple[int, str]:
    """V, and the argument that has it."""
    if weight is not None:
        return weight.shape[0], "weight"
    assert logits is not None
    return logits.shape[-1], "logits"


def refusal(
    numbers: Sequence[tuple[str, object]],
    seed: int | Tensor | None,
    position: int | Tensor,
    num_samples: int,
    vocab_size: int | None,
    columns: tuple[int, str],
    flags: Sequence[tuple[str, object]],
) -> str:
    """What an eager call would say of values that the schema cannot carry; "" where it carries all.

    A float may be a symbol here, of which little can be asked: its range is checked when the operator runs.
    """
    try:
        for name, value in numbers:
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float, Tensor))):
                checks.number(name, value)
        if seed is not None and not isinstance(seed, Tensor):
            checks.seed_word(seed)
        if not isinstance(position, Tensor):
            checks.step_number(position)
        checks.sample_count(num_samples)
        if vocab_size is not None:
            validation.id_bound(vocab_size, *columns)
        for name, value in flags:
            checks.flag(name, value)
    except ValueError as error:
        return str(error.args[0])
    return ""


def split_bias(
    bias: LogitBias | None,
) -> tuple[Tensor | None, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """The dense bias, and the triple (rows, ids, values) of a sparse one; None for what it is not.

    Raises ValueError for a bias in any other form, such as lists.
    """
    if bias is None:
        return None, (None, None, None)
    if isinstance(bias, Tensor):
        return bias, (None, None, None)
    if isinstance(bias, Sequence) and len(bias) == 3 and all(isinstance(part, Tensor) for part in bias):
        rows, ids, values = bias
        return None, (rows, ids, values)  # type: ignore[return-value]
    raise ValueError(
        "logit_bias inside torch.compile must be a tensor or a triple of tensors (rows, ids, values), "
        f"got {type(bias).__name__}; build the tensors outside the compiled function"
    )


def signed(seed: int) -> int:
    """The same 64 bits, in a schema's int."""
    return seed - 2**64 if seed >= 2**63 else seed


def detached(tensor: Tensor | None) -> Tensor | None:
    """Without its history: the operator has no gradient."""
    return None if tensor is None else tensor.detach()
