"""LM heads and hidden states from files: the right tensor, nothing else read, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fsample_cli import checkpoint
from fsample_cli.errors import InputError
from fsample_cli.measure import inputs
from fsample_cli.request import build_workload
from fsample_cli.workloads import PRESETS

HEAD = torch.arange(24, dtype=torch.float32).reshape(6, 4) / 8  # [V, D], exact in bf16
OTHER = torch.ones(6, 4)


def folder(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def read(path: Path) -> tuple[checkpoint.Head, torch.Tensor]:
    head = checkpoint.find_head(path)
    return head, checkpoint.load_head(head, "fp32", "cpu")


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "output.weight", "embed_out.weight", "language_model.lm_head.weight"]
)
def test_untied_head(tmp_path: Path, name: str) -> None:
    head, weight = read(folder(tmp_path, {name: HEAD, "model.embed_tokens.weight": OTHER}))
    assert (head.tensor, head.tied, head.vocab, head.hidden, head.dtype) == (name, False, 6, 4, "fp32")
    assert torch.equal(weight, HEAD)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "transformer.wte.weight",
        "wte.weight",
        "model.language_model.embed_tokens.weight",
    ],
)
@pytest.mark.parametrize(
    "config", [{}, {"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}]
)
def test_tied_embeddings(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    extra = {
        "vision_tower.embed_tokens.weight": OTHER,
        "model.embed_tokens_per_layer.weight": torch.ones(6, 9),
    }
    head, weight = read(folder(tmp_path, {name: HEAD, **extra}, **config))
    assert (head.tensor, head.tied) == (name, True)
    assert torch.equal(weight, HEAD)


def test_several_files_and_only_the_heads_file_is_opened(tmp_path: Path) -> None:
    save_file({"lm_head.weight": HEAD.bfloat16()}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"not needed, and not readable")
    index = {
        "weight_map": {
            "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
            "lm_head.weight": "model-00002-of-00002.safetensors",
        }
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    head, weight = read(tmp_path)
    assert (head.dtype, weight.dtype) == ("bf16", torch.float32)
    assert torch.equal(weight, HEAD)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    save_file({"a.weight": OTHER}, tmp_path / "one.safetensors")
    save_file({"lm_head.weight": HEAD}, tmp_path / "two.safetensors")
    assert torch.equal(read(tmp_path)[1], HEAD)


def test_single_file_with_or_without_a_known_name(tmp_path: Path) -> None:
    for name in ("lm_head.weight", "weight"):
        file = tmp_path / f"{name}.safetensors"
        save_file({name: HEAD, "step": torch.ones(1)}, file)
        assert torch.equal(read(file)[1], HEAD)


def test_a_single_matrix_of_another_name_is_no_head(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    save_file({"layers.0.mlp.up_proj.weight": HEAD}, file)
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.up_proj\.weight.*save it as lm_head\.weight"):
        checkpoint.find_head(file)


@pytest.mark.parametrize(
    ("config", "softcap", "scale"),
    [
        ({}, None, 1.0),
        ({"final_logit_softcapping": 30.0}, 30.0, 1.0),
        ({"final_logit_softcapping": None}, None, 1.0),
        ({"text_config": {"final_logit_softcapping": 20}}, 20.0, 1.0),
        ({"logit_scale": 0.0625}, None, 0.0625),  # Cohere
        ({"logits_scaling": 8.0}, None, 0.125),  # Granite divides
        ({"lm_head_multiplier": 0.5}, None, 0.5),  # Falcon-H1
    ],
)
def test_softcap_and_scale(
    tmp_path: Path, config: dict[str, Any], softcap: float | None, scale: float
) -> None:
    head = checkpoint.find_head(folder(tmp_path, {"lm_head.weight": HEAD}, **config))
    assert (head.softcap, head.logit_scale) == (softcap, scale)


def test_padding_rows_are_left_out(tmp_path: Path) -> None:
    head, weight = read(folder(tmp_path, {"lm_head.weight": HEAD}, vocab_size=5))
    assert head.vocab == 5 and torch.equal(weight, HEAD[:5])
    head, weight = read(folder(tmp_path, {"lm_head.weight": HEAD}, vocab_size=9))
    assert head.vocab == 6 and torch.equal(weight, HEAD)


def test_no_head(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no LM head: no lm_head.weight, and config.json says"):
        checkpoint.find_head(folder(tmp_path, {"model.embed_tokens.weight": HEAD}, tie_word_embeddings=False))
    with pytest.raises(InputError, match=r"has no LM head: none of lm_head.weight"):
        checkpoint.find_head(folder(tmp_path, {"layers.0.weight": HEAD, "layers.1.weight": OTHER}))
    with pytest.raises(InputError, match="bias"):
        checkpoint.find_head(folder(tmp_path, {"lm_head.weight": HEAD, "lm_head.bias": torch.ones(6)}))


def test_unusable_files(tmp_path: Path) -> None:
    cases: dict[str, Path] = {}
    cases["does not exist"] = tmp_path / "none"
    (tmp_path / "empty").mkdir()
    cases["holds none"] = tmp_path / "empty"
    (tmp_path / "model.bin").write_bytes(b"x")
    cases["must be a folder or a .safetensors file"] = tmp_path / "model.bin"
    for number, content in enumerate(
        (b"", b"abc", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"version https://git-lfs")
    ):
        broken = tmp_path / f"{number}.safetensors"
        broken.write_bytes(content)
        with pytest.raises(InputError, match="is not a safetensors file"):
            checkpoint.find_head(broken)
    for name, (tensor, words) in {
        "int": (torch.ones(6, 4, dtype=torch.int8), "BF16, F16 or F32, got I8"),
        "flat": (torch.ones(6), r"shape \[rows, D\]"),
        "void": (torch.ones(0, 4), r"shape \[rows, D\]"),
    }.items():
        save_file({"lm_head.weight": tensor}, tmp_path / f"{name}.safetensors")
        cases[words] = tmp_path / f"{name}.safetensors"
    for config in (
        "[]",
        "{",
        "[" * 100_000,
        '{"logit_scale": "high"}',
        '{"logits_scaling": 0}',
        '{"final_logit_softcapping": NaN}',
    ):
        with pytest.raises(InputError, match=r"config\.json") as error:
            place = folder(tmp_path / "empty", {"lm_head.weight": HEAD})
            (place / "config.json").write_text(config)
            checkpoint.find_head(place)
        assert error.value.hint
    (tmp_path / "empty" / "model.safetensors").unlink()
    for words, path in cases.items():
        with pytest.raises(InputError, match=words) as error:
            checkpoint.find_head(path)
        assert error.value.exit_code == 2 and str(path) in str(error.value) and error.value.hint


def test_index_that_names_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"lm_head.weight": "gone.safetensors"}}'
    )
    with pytest.raises(InputError, match=r"gone\.safetensors is named by the checkpoint"):
        checkpoint.find_head(tmp_path)


def test_states(tmp_path: Path) -> None:
    states = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "s.npy", states.numpy())
    save_file({"hidden_states": states, "ids": torch.ones(3, 4)}, tmp_path / "named.safetensors")
    save_file({"x": states}, tmp_path / "single.safetensors")
    for name in ("s.npy", "named.safetensors", "single.safetensors"):
        assert checkpoint.states_shape(tmp_path / name) == (3, 4)
        assert torch.equal(checkpoint.load_states(tmp_path / name, "fp32", "cpu"), states)


@pytest.mark.filterwarnings("error")
def test_unusable_states(tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.ones(4))
    np.save(tmp_path / "none.npy", np.ones((0, 4)))
    np.save(tmp_path / "ids.npy", np.ones((2, 4), np.int64))
    np.save(tmp_path / "nan.npy", np.array([[1.0, np.nan]]))
    np.save(tmp_path / "big.npy", np.array([[1.0, 1e6]]))
    np.save(tmp_path / "double.npy", np.array([[1.0, 1e300]]))
    np.save(tmp_path / "objects.npy", np.array([[None]], dtype=object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("hello")
    save_file({"a": torch.ones(2, 4), "b": torch.ones(2, 4)}, tmp_path / "two.safetensors")
    cases = {
        "flat.npy": r"\[N, D\]", "none.npy": r"\[N, D\]", "ids.npy": "floating numbers, got int64",
        "nan.npy": "finite numbers", "big.npy": "finite numbers in fp16",
        "double.npy": "finite numbers", "objects.npy": "not a .npy file",
        "text.npy": "not a .npy file",
        "two.safetensors": "a tensor hidden_states or one tensor", "gone.npy": "does not exist",
    }  # fmt: skip
    for name, words in cases.items():
        with pytest.raises(InputError, match=words) as error:
            checkpoint.load_states(tmp_path / name, "fp16", "cpu")
        assert "--states" in str(error.value) and name in str(error.value) and error.value.hint
    with pytest.raises(InputError, match="drop the rows"):  # a wider dtype would not help
        checkpoint.load_states(tmp_path / "nan.npy", "fp32", "cpu")


def test_inputs_from_files(tmp_path: Path) -> None:
    folder(tmp_path, {"lm_head.weight": HEAD.bfloat16()}, final_logit_softcapping=5.0)
    np.save(tmp_path / "s.npy", np.arange(8, dtype=np.float32).reshape(2, 4))
    workload = build_workload(
        preset=None, vocab=None, hidden=None, checkpoint=tmp_path, states=tmp_path / "s.npy", device="cpu",
        dtype="auto", default=PRESETS["cpu-small"].workload(),
    )  # fmt: skip
    assert (workload.vocab, workload.hidden, workload.dtype, workload.softcap) == (6, 4, "fp32", 5.0)
    assert torch.equal(inputs.load_weight(workload, "cpu", 0), HEAD)
    hidden = inputs.make_hidden(workload, 5, "cpu", 0)
    assert torch.equal(
        hidden[:, 0], torch.tensor([0.0, 4.0, 0.0, 4.0, 0.0])
    )  # the rows again when they run out
    assert inputs.describe(workload).distribution == "hidden states from the file, weight from the checkpoint"


def test_random_inputs_make_realistic_logits_and_depend_on_the_seed_alone(tmp_path: Path) -> None:
    workload = PRESETS["cpu-small"].workload("fp32")
    weight, hidden = inputs.load_weight(workload, "cpu", 7), inputs.make_hidden(workload, 16, "cpu", 7)
    assert weight.shape == (32_000, 512) and hidden.shape == (16, 512)
    assert 1.7 < float((hidden @ weight.T).std()) < 2.3
    assert torch.equal(weight, inputs.load_weight(workload, "cpu", 7))
    assert torch.equal(hidden, inputs.make_hidden(workload, 16, "cpu", 7))
    assert not torch.equal(hidden, inputs.make_hidden(workload, 16, "cpu", 8))
    inputs.make_hidden(workload, 1, "cpu", 2**64 - 1)  # the whole range of --seed works
    generator = torch.Generator().manual_seed(1)
    folder(tmp_path, {"lm_head.weight": 30 * torch.randn(5000, 64, generator=generator)}, logit_scale=0.5)
    head = build_workload(
        preset=None, vocab=None, hidden=None, checkpoint=tmp_path, states=None, device="cpu", dtype="auto",
        default=workload,
    )  # fmt: skip
    weight = inputs.load_weight(head, "cpu", 0)
    hidden = inputs.make_hidden(head, 64, "cpu", 0, weight)
    assert 1.7 < float((0.5 * hidden @ weight.T).std()) < 2.3


def test_a_head_that_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsample_cli.errors import MissingError

    monkeypatch.setattr(inputs, "_free_host_bytes", lambda: 10**6)
    with pytest.raises(MissingError, match=r"\[32000, 512\] in fp32 needs 0.1 GB, cpu has 0.0 GB free"):
        inputs.load_weight(PRESETS["cpu-small"].workload("fp32"), "cpu", 0)
