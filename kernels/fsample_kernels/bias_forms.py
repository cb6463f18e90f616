"""Every form that `logit_bias` may have, checked, as a dense table or as one sparse triple on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .checks import (
    FLOATING,
    bias_tensor,
    check_tensor,
    dtype_name,
    either,
    first_few,
    is_fp32,
    is_index,
    same_device,
    shape_of,
)

SparseTriple = tuple[Tensor, Tensor, Tensor] | tuple[Sequence[int], Sequence[int], Sequence[float]]
LogitBias = Tensor | SparseTriple | Mapping[int, float] | Sequence[Mapping[int, float]]


def split_logit_bias(
    bias: LogitBias | None, rows: Tensor, num_rows: int, num_columns: int, bound: int
) -> tuple[Tensor | None, tuple[Tensor, Tensor, Tensor] | None]:
    """(dense, None), (None, sparse triple) or (None, None)."""
    if bias is None:
        return None, None
    if isinstance(bias, Tensor):
        bias_tensor("logit_bias", bias, rows, [(num_columns,), (num_rows, num_columns)])
        return bias, None
    if isinstance(bias, Mapping):
        every_row = [bias] * num_rows
        _check_host_triples([0] * len(bias), list(bias), list(bias.values()), max(num_rows, 1), bound)
        return None, _from_mappings(every_row, rows)
    if isinstance(bias, Sequence) and not isinstance(bias, str):
        if all(isinstance(entry, Mapping) for entry in bias) and (len(bias) or not num_rows):
            if len(bias) != num_rows:
                raise ValueError(
                    f"logit_bias as a sequence of mappings must have one a row, B = {num_rows}, "
                    f"got {len(bias)}; pass one mapping alone to serve every row"
                )
            mappings: list[Mapping[int, float]] = [entry for entry in bias if isinstance(entry, Mapping)]
            for row, mapping in enumerate(mappings):
                _check_host_triples(
                    [row] * len(mapping), list(mapping), list(mapping.values()), num_rows, bound
                )
            return None, _from_mappings(mappings, rows)
        if len(bias) == 3:
            return None, _triple(bias, rows, num_rows, bound)
    raise ValueError(
        "logit_bias must be a tensor [V] or [B, V], a triple (rows, ids, values), a mapping {id: value} "
        f"or a sequence of B mappings, got {type(bias).__name__}"
    )


def _triple(bias: Sequence[object], rows: Tensor, num_rows: int, bound: int) -> tuple[Tensor, Tensor, Tensor]:
    row, ids, values = bias
    if isinstance(row, Tensor) and isinstance(ids, Tensor) and isinstance(values, Tensor):
        for name, tensor, dtypes in (
            ("logit_bias rows", row, (torch.int32, torch.int64)),
            ("logit_bias ids", ids, (torch.int32, torch.int64)),
            ("logit_bias values", values, FLOATING),
        ):
            check_tensor(name, tensor)
            same_device(name, tensor, rows)
            if tensor.dtype not in dtypes or tensor.shape != (ids.numel(),):
                raise ValueError(
                    f"{name} must have shape [N] with N = {ids.numel()} (from ids) and dtype "
                    f"{either(dtypes)}, got {shape_of(tensor)} {dtype_name(tensor.dtype)}"
                )
        return row.to(torch.int64), ids.to(torch.int64), values.to(torch.float32)
    for entry in bias:
        if isinstance(entry, (Tensor, str)) or not isinstance(entry, Sequence):
            raise ValueError(
                "logit_bias as a triple must be three tensors or three sequences of numbers, got "
                f"{', '.join(type(part).__name__ for part in bias)}; convert all three"
            )
    host = tuple(list(entry) for entry in bias if isinstance(entry, Sequence))
    if len({len(entry) for entry in host}) != 1:
        raise ValueError(
            "logit_bias rows, ids and values must be equally long, "
            f"got {', '.join(str(len(part)) for part in host)} entries"
        )
    _check_host_triples(host[0], host[1], host[2], num_rows, bound)
    return _upload(host[0], host[1], host[2], rows)


def _from_mappings(mappings: Sequence[Mapping[int, float]], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = [row for row, mapping in enumerate(mappings) for _ in mapping]
    ids = [token for mapping in mappings for token in mapping]
    values = [value for mapping in mappings for value in mapping.values()]
    return _upload(rows, ids, values, like)


def _upload(
    rows: list[int], ids: list[int], values: list[float], like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Host lists on the device, through pinned memory: a copy from pageable memory waits for the stream."""
    pin = like.device.type == "cuda"
    host = (
        torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=pin),
        torch.tensor(ids, dtype=torch.int64, device="cpu", pin_memory=pin),
        torch.tensor(values, dtype=torch.float32, device="cpu", pin_memory=pin),
    )
    row, token, value = (tensor.to(like.device, non_blocking=True) for tensor in host)
    return row, token, value


def _check_host_triples(
    rows: Sequence[object], ids: Sequence[object], values: Sequence[object], num_rows: int, bound: int
) -> None:
    bad_rows = [row for row in rows if not is_index(row, num_rows)]
    if bad_rows:
        raise ValueError(f"logit_bias rows must be integers in [0, {num_rows}), got {first_few(bad_rows)}")
    bad_ids = [token for token in ids if not is_index(token, bound)]
    bad_values = [value for value in values if not is_fp32(value)]
    if bad_ids or bad_values:
        wrong = [f"ids {first_few(bad_ids)}"] if bad_ids else []
        wrong += [f"values {first_few(bad_values)}"] if bad_values else []
        raise ValueError(
            f"logit_bias must have ids in [0, {bound}) and values finite in fp32, got {' and '.join(wrong)}; "
            "to forbid an id use mask"
        )
