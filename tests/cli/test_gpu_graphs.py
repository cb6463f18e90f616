"""`bench --graph` on a GPU: what is captured, what is not and leaves no harm, what replays repeat."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fsample_cli.measure import session
from fsample_cli.measure.graphs import CudaCapture, NotCaptured
from fsample_cli.measure.settings import Progress
from fsample_cli.results import BenchResult
from fsample_cli.samplers.seeding import seed_default_generator
from fsample_cli.workloads import Workload
from fsample_kernels import sample
from tests.cli import rank_jobs
from tests.cli.conftest import Fsample
from tests.kernels.ranks import run_ranks

SHAPE = ("--device", "cuda", "--vocab", 8192, "--hidden", 512, "--batch", "1,64")
COUNTS = ("--iterations", 5, "--warmup", 2, "--quiet", "--format", "json")


def rows_of(*names: str) -> dict[str, BenchResult]:
    """Rows of a run in this process, at one batch size."""
    done = session.run(
        names, Workload("custom", 8192, 512, "bf16"), [64], device="cuda", timer="events", warmup=1,
        iterations=3, cold=True, temperature=1.0, seed=0, baseline=None, progress=Progress(), graph=True,
    )  # fmt: skip
    assert done.outcome.problems == ()
    return dict(zip(names, done.outcome.results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("timer", ["auto", "events"])  # cupti where it is there
def test_every_sampler_is_captured_or_says_why(shell: Fsample, timer: str) -> None:
    names = "fused,fused:element,unfused,gemm,race,multinomial-eager"
    done = shell("bench", "--graph", *SHAPE, *COUNTS, "--sampler", names, "--timer", timer)
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["settings"]["graph"] is True and data["settings"]["timer"].endswith("+graph")
    assert len(data["results"]) == 12
    for row in data["results"]:
        assert row["timer"] == data["settings"]["timer"]
        if row["sampler"] == "multinomial-eager" and row["median_us"] is None:
            assert row["note"].startswith("not captured: ")
            continue
        assert len(row["samples_us"]) == 5 and 0 < row["median_us"] < 1000, row


@pytest.mark.gpu
def test_features_are_captured() -> None:
    rows = rows_of(
        "fused", "fused+seeds", "fused+bool-mask", "fused+shared-bias", "fused+sparse-bias", "fused+scale",
        "fused+bound", "fused+samples",
    )  # fmt: skip
    assert all(row.median_us is not None for row in rows.values()), rows


MINE = """
import torch
from fsample_kernels import sample
def right(hidden, weight, temperature, seed):
    return sample(hidden, weight, temperature=temperature, seed=seed).ids
def waits(hidden, weight, temperature, seed):
    ids = right(hidden, weight, temperature, seed)
    assert ids.sum().item() >= 0
    return ids
def breaks(hidden, weight, temperature, seed):
    ids = right(hidden, weight, temperature, seed)
    torch.cuda.synchronize()
    return ids
def own_generator(hidden, weight, temperature, seed):
    noise = torch.rand(1, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    return right(hidden, weight, temperature, seed) + (noise > 1).long()
"""


@pytest.mark.gpu
def test_what_cannot_be_captured_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    waits, breaks, own, right = (f"{path}:{name}" for name in ("waits", "breaks", "own_generator", "right"))
    rows = rows_of(waits, "fused", breaks, own, "gemm", "race", right)
    assert rows[waits].note == "not captured: it waits for the device, which nothing in a graph can"
    assert rows[breaks].note.startswith("not captured: ") and rows[breaks].median_us is None
    assert rows[own].note.startswith("not captured: ") or rows[own].median_us is not None  # as torch has it
    for name in ("fused", "gemm", "race", right):
        assert rows[name].median_us is not None, rows[name].note
    assert torch.rand(3, device="cuda").isfinite().all()  # the generator is out of the capture


@pytest.mark.gpu
def test_a_failed_capture_is_put_right_at_once() -> None:
    capture = CudaCapture(torch.device("cuda"))
    stream = torch.cuda.current_stream()
    ones = torch.ones(4, device="cuda")

    def breaks() -> Tensor:
        total = ones + torch.rand(4, device="cuda")
        torch.cuda.synchronize()
        return total

    for _ in range(3):
        with pytest.raises(NotCaptured):
            capture(breaks)
        assert torch.cuda.current_stream() == stream
        torch.cuda.empty_cache()
        torch.rand(4, device="cuda")
        found = capture(lambda: ones * 2)
        found.output.zero_()
        found.replay()
        assert found.output.tolist() == [2.0] * 4
        found.free()


@pytest.mark.gpu
def test_replays_go_on_with_torch_s_generator_and_repeat_our_seed() -> None:
    device = torch.device("cuda")
    capture = CudaCapture(device)

    def random() -> Tensor:
        seed_default_generator(device, 3, 1)
        return torch.rand(8, device=device)

    found = capture(random)
    seed_default_generator(device, 3, 1)
    drawn = []
    for _ in range(2):
        found.replay()
        drawn.append(found.output.clone())
    assert torch.equal(drawn[0], found.eager) and not torch.equal(drawn[0], drawn[1])
    found.free()

    hidden, weight = torch.randn(64, 512, device=device).bfloat16(), torch.randn(8192, 512, device=device)
    ours = capture(lambda: sample(hidden, weight.bfloat16(), seed=3, position=1).ids)
    for _ in range(2):
        ours.output.fill_(-1)
        ours.replay()
        assert torch.equal(ours.output, ours.eager)
    ours.free()


@pytest.mark.gpu
def test_the_memory_of_a_graph_comes_back() -> None:
    device = torch.device("cuda")
    capture = CudaCapture(device)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    found = capture(lambda: torch.ones(2**28, dtype=torch.uint8, device=device).amax())
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() >= before + 2**28
    found.free()
    del found
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**22


@pytest.mark.multi_gpu
def test_ranks_replay_in_step(shell: Fsample) -> None:
    names = (
        "fused:p2p,fused:p2p_after,fused:candidates,fused:log_mass,shard,one-rank,gemm,unfused,"
        "multinomial-eager"
    )
    done = shell("bench", "--tp", 2, "--graph", *SHAPE, *COUNTS, "--runs", 2, "--sampler", names)
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["settings"]["timer"] == "events+graph" and data["settings"]["problems"] == []
    assert len(data["results"]) == 18
    for row in data["results"]:
        if row["sampler"] == "multinomial-eager" and row["median_us"] is None:
            assert row["note"].startswith("not captured: ")
            continue
        assert len(row["samples_us"]) == 10 and 0 < row["median_us"] < 2000, row


@pytest.mark.multi_gpu
def test_ranks_compile_ahead_and_then_draw_what_one_draws() -> None:
    first, second = run_ranks(2, rank_jobs.compile_then_draw, backend="nccl", wait_s=300)
    assert not isinstance(first, Exception), first
    kernels, later, drawn = first
    assert "exchange_kernel" in kernels and "pick_rank_kernel" in kernels
    assert later == second[1] == []
    hidden, weight = (x.bfloat16().cuda() for x in rank_jobs.head_of_ranks())
    for (exchange, batch), ids in drawn.items():
        assert torch.equal(ids, second[2][exchange, batch])
        if exchange != "log_mass":
            assert torch.equal(ids, sample(hidden[:batch], weight, seed=5, position=2).ids[:, 0].cpu())
