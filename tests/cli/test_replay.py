"""`fsample replay`: the token of one draw, made again without the batch it came from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from fsample_cli.measure import inputs
from fsample_cli.records import Record
from fsample_cli.workloads import Workload
from fsample_kernels import sample, sample_logits

Fsample = Callable[..., Any]
SEED = 2**63 + 12345
WORDS = ("--seed", SEED, "--position", 9, "--temperature", 0.7)
NOISES = ("grouped", "element", "online")


def one(fsample: Fsample, *arguments: object, code: int = 0) -> Any:
    done = fsample("replay", *arguments, "--format", "json")
    assert done.code == code, done
    return Record.from_dict(json.loads(done.out)).results[0]


@pytest.fixture
def logits(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A file of five rows over 9,000 tokens, and the rows."""
    rows = torch.randn(5, 9_000, generator=torch.Generator().manual_seed(3)) * 2
    numpy.save(tmp_path / "logits.npy", rows.numpy())
    return tmp_path / "logits.npy", rows


@pytest.mark.parametrize("noise", NOISES)
def test_every_row_and_sample_of_a_batch(
    fsample: Fsample, logits: tuple[Path, torch.Tensor], noise: Any
) -> None:
    path, rows = logits
    ids = sample_logits(rows, seed=SEED, position=9, temperature=0.7, num_samples=3, noise=noise).ids
    for row, number in ((0, 0), (3, 0), (4, 2)):
        arguments = ("--logits", path, "--row", row, "--sample", number, "--noise", noise, *WORDS)
        found = one(fsample, *arguments, "--token", int(ids[row, number]))
        assert found.verdict in ("same", "explained") and found.token == ids[row, number]
        assert found.runner_up not in (None, found.token) and found.margin > 0 and found.budget > 0
        wrong = one(fsample, *arguments, "--token", (found.token + 1) % 9_000, code=1)
        assert wrong.verdict == "wrong" and wrong.given_margin > wrong.given_budget


def test_a_seed_of_the_row_leaves_its_index_out(fsample: Fsample, logits: tuple[Path, torch.Tensor]) -> None:
    path, rows = logits
    seeds = torch.tensor([5, 6, 7, 8, SEED - 2**64])
    want = int(sample_logits(rows, seed=seeds, position=9, temperature=0.7).ids[4, 0])
    arguments = ("--logits", path, "--row", 4, *WORDS)
    assert one(fsample, *arguments, "--per-row-seed").token == want
    assert one(fsample, *arguments).token != want


@pytest.mark.parametrize("noise", NOISES)
def test_the_runner_up_is_what_comes_out_when_it_gains_the_margin(
    fsample: Fsample, tmp_path: Path, noise: Any
) -> None:
    rows = torch.randn(1, 300, generator=torch.Generator().manual_seed(11))
    for seed in range(8):
        numpy.save(tmp_path / "row.npy", rows[0].numpy())
        found = one(fsample, "--logits", tmp_path / "row.npy", "--seed", seed, "--noise", noise)
        raised = rows.clone()
        raised[0, found.runner_up] += 40.0  # certain now; the old winner is not
        assert sample_logits(raised, seed=seed, noise=noise).ids.item() == found.runner_up
        if noise == "element":  # the margin is in powers of 2: a bit less changes nothing, a bit more does
            for change, winner in ((-1e-3, found.token), (1e-3, found.runner_up)):
                raised = rows.clone()
                raised[0, found.runner_up] += found.margin * math.log(2) + change
                assert sample_logits(raised, seed=seed, noise=noise).ids.item() == winner


def test_a_tie_within_rounding_is_explained(fsample: Fsample, tmp_path: Path) -> None:
    row = numpy.zeros(64, dtype=numpy.float32)
    row[[7, 40]] = 10.0, numpy.nextafter(numpy.float32(10.0), numpy.float32(0))
    numpy.save(tmp_path / "row.npy", row)
    greedy = ("--logits", tmp_path / "row.npy", "--temperature", 0)
    found = one(fsample, *greedy, "--token", 40)
    assert (found.token, found.runner_up, found.verdict, found.decided) == (7, 40, "explained", "logit")
    assert 0 < found.given_margin <= found.given_budget
    assert one(fsample, *greedy, "--token", 41, code=1).verdict == "wrong"


def test_random_inputs_are_those_of_bench(fsample: Fsample) -> None:
    workload = Workload("custom", 700, 48, "fp32")
    weight = inputs.load_weight(workload, "cpu", 4)
    ids = sample(inputs.make_hidden(workload, 6, "cpu", 4), weight, seed=4, position=2).ids
    shape = ("--vocab", 700, "--hidden", 48, "--seed", 4, "--position", 2, "--batch", 6)
    for row in (0, 5):
        found = one(fsample, "--row", row, *shape, "--token", int(ids[row, 0]))
        assert found.verdict == "same" and found.budget > 0


def test_states_and_checkpoint(fsample: Fsample, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(8)
    head, states = torch.randn(200, 16, generator=generator), torch.randn(3, 16, generator=generator)
    save_file({"lm_head.weight": head}, tmp_path / "head.safetensors")
    save_file({"hidden_states": states}, tmp_path / "states.safetensors")
    want = sample(states, head, seed=1).ids[2].item()
    files = (
        "--checkpoint", tmp_path / "head.safetensors", "--states", tmp_path / "states.safetensors",
    )  # fmt: skip
    found = one(fsample, *files, "--row", 2, "--seed", 1, "--token", want)
    assert found.verdict == "same"


def test_rows_without_a_token_and_tokens_out_of_range(fsample: Fsample, tmp_path: Path) -> None:
    row = torch.zeros(40)
    save_file({"logits": torch.stack([row, row.log(), row * torch.nan])}, tmp_path / "a.safetensors")
    file = ("--logits", tmp_path / "a.safetensors")
    assert one(fsample, *file, "--row", 1, "--token", -1).note == "no allowed token"
    assert "NaN" in one(fsample, *file, "--row", 2, "--token", -1).note
    assert one(fsample, *file, "--row", 2, "--token", 3, code=1).verdict == "wrong"
    found = one(fsample, *file, "--token", -1, code=1)
    assert found.verdict == "wrong" and found.given_margin is None
    for outside in (-5, 40, 127, 10**12):
        done = fsample("replay", *file, "--token", outside)
        assert done.code == 2 and f"--token must lie in 0..39, or be -1 for none, got {outside}" in done.error
    done = fsample("replay", "--vocab", 300, "--hidden", 64, "--token", 300)
    assert done.code == 2 and "--token must lie in 0..299" in done.error


def test_a_logit_past_fp32_is_infinite_and_says_nothing_on_stderr(shell: Fsample, tmp_path: Path) -> None:
    numpy.save(tmp_path / "row.npy", numpy.array([0.0, 1e300]))
    done = shell("replay", "--logits", tmp_path / "row.npy", "--format", "json")
    assert done.code == 0 and done.err == ""
    assert "inf among the logits" in json.loads(done.out)["results"][0]["note"]


def test_every_format_and_no_wide_table(fsample: Fsample) -> None:
    for format in ("table", "csv", "markdown"):
        done = fsample("replay", "--token", 0, "--format", format)
        assert "runner" in done.out and done.err == ""
        if format == "table":
            assert max(map(len, done.out.splitlines()[2:])) <= 84


def test_errors(fsample: Fsample, tmp_path: Path, logits: tuple[Path, torch.Tensor]) -> None:
    path, _ = logits
    numpy.save(tmp_path / "ints.npy", numpy.arange(4))
    numpy.save(tmp_path / "cube.npy", numpy.zeros((2, 2, 2)))
    (tmp_path / "broken.npy").write_bytes(b"no")
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "two.safetensors")
    for arguments, words in (
        (("--logits", path, "--vocab", 5), "--logits and --vocab exclude each other"),
        (("--logits", path, "--row", 5), "--row must lie in 0..4"),
        (("--logits", tmp_path / "none.npy"), "cannot be read"),
        (("--logits", tmp_path / "broken.npy"), "cannot be read"),
        (("--logits", tmp_path / "broken.safetensors"), "cannot be read"),
        (
            ("--logits", tmp_path / "ints.npy"),
            f"floating numbers, got int64 in {tmp_path / 'ints.npy'}; save the raw logits",
        ),
        (("--logits", tmp_path / "cube.npy"), "[V] or [N, V]"),
        (("--logits", tmp_path / "two.safetensors"), "one tensor, got a, b"),
        (("--logits", "logits.txt"), "--logits must be a .npy or .safetensors file"),
        (("--row", 3, "--batch", 3), "--batch must be above --row"),
        (("--row", 10**6), "--row of a random batch"),
        (("--temperature", "nan"), "--temperature must be"),
        (("--seed", 2**64), "--seed must lie"),
        (("--input-seed", 2**64), "--input-seed must lie in 0..2^64-1"),
        (("--input-seed", -1), "--input-seed must lie in 0..2^64-1"),
        (("--position", 2**32), "--position"),
        (("--noise", "gumbel"), "--noise"),
    ):
        done = fsample("replay", *arguments)
        assert done.code == 2 and words in done.error, (arguments, done)
