"""The LM head of a checkpoint, and files of hidden states. Finding reads headers, loading one tensor."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsample_cli.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")
EMBEDDINGS = (
    "embed_tokens.weight",
    "tok_embeddings.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "embeddings.weight",
)
DTYPE_NAMES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
SAVE_STATES = "save the states a row a token, in fp32 or fp16"
STATES = ("hidden_states", "states", "hidden")


@dataclass(frozen=True)
class Head:
    """Where the LM head lies, its shape, and what the model does to its logits."""

    file: Path
    tensor: str
    vocab: int  # V: rows of the tensor, without the padding rows past config.json's vocab_size
    hidden: int
    dtype: str  # bf16, fp16 or fp32
    tied: bool  # the input embeddings serve as the head
    softcap: float | None = None
    logit_scale: float = 1.0


def find_head(path: Path) -> Head:
    """The LM head of a Hugging Face folder (one or several .safetensors files) or of one .safetensors file.

    An `lm_head` wins; without one the input embeddings serve, unless config.json says that they are not tied.
    Reads headers and config.json, no weights. Raises InputError.
    """
    if not path.exists():
        raise InputError(
            f"--checkpoint must be a folder or a .safetensors file, {path} does not exist",
            "give the folder that holds the model's config.json",
        )
    folder = path if path.is_dir() else path.parent
    files = _files_by_tensor(path)
    config = _read_config(folder / "config.json")
    name, tied = _choose(path, files, config)
    entry = _header(files[name])[name]
    rows, hidden = _matrix(entry, f"{name} in --checkpoint {files[name]}")
    if not tied and name.removesuffix(".weight") + ".bias" in files:
        raise InputError(
            f"--checkpoint {path} has an LM head with a bias ({name.removesuffix('.weight')}.bias), "
            "which the compared samplers do not take",
            "save its weight alone as a .safetensors file to look at that part",
        )
    size = config.get("vocab_size")
    return Head(
        file=files[name],
        tensor=name,
        vocab=min(size, rows) if isinstance(size, int) and size > 0 else rows,
        hidden=hidden,
        dtype=DTYPE_NAMES[entry["dtype"]],
        tied=tied,
        softcap=_number(config, "final_logit_softcapping", folder),
        logit_scale=_logit_scale(config, folder),
    )


def load_head(head: Head, dtype: str, device: str) -> Tensor:
    """The head's weight [V, D] in `dtype` (bf16, fp16, fp32) on `device`. Reads that one tensor."""
    return _load(head.file, head.tensor, dtype, device, rows=head.vocab)


def states_shape(path: Path) -> tuple[int, int]:
    """(N, D) of a .npy or .safetensors file of hidden states, from its header. Raises InputError."""
    _check_states_file(path)
    if path.suffix == ".npy":
        shape = _open_npy(path).shape
        if len(shape) != 2 or 0 in shape:
            raise InputError(
                f"--states must hold one array [N, D] with N and D above 0, got {list(shape)} in {path}",
                SAVE_STATES,
            )
        return int(shape[0]), int(shape[1])
    name, entry = _states_entry(path)
    return _matrix(entry, f"{name} in --states {path}")


def load_states(path: Path, dtype: str, device: str) -> Tensor:
    """Hidden states [N, D] in `dtype` on `device`. Raises InputError, also for values that are not finite."""
    import numpy
    import torch

    states_shape(path)
    if path.suffix == ".npy":
        array = _open_npy(path)
        if array.dtype.kind != "f":
            raise InputError(f"--states must hold floating numbers, got {array.dtype} in {path}", SAVE_STATES)
        with numpy.errstate(over="ignore"):  # past fp32 it is inf, which is refused below
            tensor = torch.from_numpy(array.astype("float32")).to(device, _torch_dtype(dtype))
    else:
        tensor = _load(path, _states_entry(path)[0], dtype, device)
    if not bool(torch.isfinite(tensor).all()):
        hint = "drop the rows that hold NaN or inf" if dtype == "fp32" else "try --dtype fp32"
        raise InputError(f"--states must hold finite numbers in {dtype}, {path} does not", hint)
    return tensor


def _torch_dtype(name: str) -> Any:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


def _load(file: Path, tensor: str, dtype: str, device: str, rows: int | None = None) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            loaded: Tensor = handle.get_slice(tensor)[:rows]
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file} cannot be read: {error}", "fetch the file again") from None
    return loaded.to(device, _torch_dtype(dtype)).contiguous()


def _files_by_tensor(path: Path) -> dict[str, Path]:
    """Every tensor name and the file that holds it."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise InputError(
                f"--checkpoint must be a folder or a .safetensors file, got {path}",
                "safetensors.torch.save_file writes one",
            )
        return dict.fromkeys(_header(path), path)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise InputError(
                f"{index} must hold an object weight_map of tensor names to files", "fetch it again"
            )
        return {name: path / file for name, file in names.items()}
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise InputError(
            f"--checkpoint needs .safetensors files, the folder {path} holds none",
            "save the model with safe_serialization=True",
        )
    return {name: file for file in found for name in _header(file)}


def _choose(path: Path, files: dict[str, Path], config: dict[str, Any]) -> tuple[str, bool]:
    """(tensor name, tied) of the head."""
    # towers of other modalities have embeddings too; the shortest name is the text model's own
    names = sorted((n for n in files if "vision" not in n and "audio" not in n), key=len)
    for ending in HEADS:
        for name in names:
            if name == ending or name.endswith("." + ending) and ending == HEADS[0]:
                return name, False
    embedding = next(
        (n for ending in EMBEDDINGS for n in names if n == ending or n.endswith("." + ending)), None
    )
    if embedding is not None:
        if config.get("tie_word_embeddings") is False:
            raise InputError(
                f"--checkpoint {path} has no LM head: no lm_head.weight, and config.json says that "
                f"{embedding} is not tied to it",
                "give the folder of the whole model",
            )
        return embedding, True
    if path.is_file():
        if "weight" in files:  # of a head saved alone
            return "weight", False
        matrices = [n for n, entry in _header(path).items() if len(entry["shape"]) == 2]
        if len(matrices) == 1:
            raise InputError(
                f"--checkpoint {path}: its one matrix is called {matrices[0]}, which no LM head is",
                "if it is one, save it as lm_head.weight",
            )
    raise InputError(
        f"--checkpoint {path} has no LM head: none of {', '.join(HEADS)} and no input embeddings "
        f"among its {len(files)} tensors",
        "give a causal language model, or save its head as lm_head.weight",
    )


def _header(file: Path) -> dict[str, Any]:
    """Tensor name -> {"dtype", "shape"}: the JSON after the first eight bytes of a .safetensors file."""
    try:
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > file.stat().st_size:
                raise ValueError("the header's length is past the end of the file")
            header = json.loads(handle.read(length))
            header.pop("__metadata__", None)
            if not all(len(entry["shape"]) >= 0 and entry["dtype"] for entry in header.values()):
                raise ValueError("an entry lacks dtype or shape")
    except FileNotFoundError:
        raise InputError(f"{file} is named by the checkpoint but is not there", "fetch it again") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}", "give a file that can be") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{file} is not a safetensors file: {error}", "fetch it again; a Git LFS pointer is not the file"
        ) from None
    return dict(header)


def _matrix(entry: dict[str, Any], what: str) -> tuple[int, int]:
    shape = entry["shape"]
    if len(shape) != 2 or 0 in shape:
        raise InputError(
            f"{what} must have shape [rows, D] with both above 0, got {shape}",
            "save one matrix, a row a token",
        )
    if entry["dtype"] not in DTYPE_NAMES:
        raise InputError(
            f"{what} must be BF16, F16 or F32, got {entry['dtype']}",
            "save it in bf16; packed formats are not read",
        )
    return int(shape[0]), int(shape[1])


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}", "give a file that can be") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}", "fetch it again") from None
    if not isinstance(data, dict):
        raise InputError(f"{file} must hold one JSON object, got {type(data).__name__}", "fetch it again")
    return data


def _read_config(file: Path) -> dict[str, Any]:
    """config.json with the text model's part laid over the rest; empty when there is no such file."""
    if not file.is_file():
        return {}
    config = _read_json(file)
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _number(config: dict[str, Any], key: str, folder: Path) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise InputError(
            f"{folder / 'config.json'}: {key} must be a number above 0, got {value!r}", "correct it there"
        )
    return float(value)


def _logit_scale(config: dict[str, Any], folder: Path) -> float:
    """Factor on the logits: Cohere's logit_scale, Falcon-H1's lm_head_multiplier, or Granite's, inverted."""
    factor = _number(config, "logit_scale", folder) or _number(config, "lm_head_multiplier", folder)
    divisor = _number(config, "logits_scaling", folder)
    return factor or (1.0 / divisor if divisor else 1.0)


def _check_states_file(path: Path) -> None:
    if not path.is_file():
        raise InputError(
            f"--states must be a .safetensors or .npy file, {path} "
            + ("is none" if path.exists() else "does not exist"),
            "numpy.save writes one",
        )
    if path.suffix not in (".npy", ".safetensors"):
        raise InputError(f"--states must be a .safetensors or .npy file, got {path}", "numpy.save writes one")


def _states_entry(path: Path) -> tuple[str, dict[str, Any]]:
    header = _header(path)
    named = [name for name in STATES if name in header]
    names = named or [name for name, entry in header.items() if len(entry["shape"]) == 2]
    if not named and len(names) != 1:
        raise InputError(
            f"--states {path} must hold a tensor {STATES[0]} or one tensor [N, D], "
            f"got {', '.join(header) or 'nothing'}",
            f"name it {STATES[0]}",
        )
    return names[0], header[names[0]]


def _open_npy(path: Path) -> Any:
    import numpy

    try:
        return numpy.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"--states {path} is not a .npy file: {error}", "numpy.save writes one") from None
