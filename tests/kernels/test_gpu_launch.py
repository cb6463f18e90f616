"""The portable kernels as a serving engine launches them: graphs, memory, compiled variants, devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
import triton

from fsample_kernels import sample, sample_logits
from fsample_kernels.ops import lm_head_sample, logits_sample
from fsample_kernels.ops.arguments import Launch
from fsample_kernels.ops.reduce_candidates import reduce_candidates
from fsample_kernels.types import Implementation, Problem, SampleResult

pytestmark = pytest.mark.gpu

MakeProblem = Callable[..., Problem]


def capture(call: Callable[[], SampleResult]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of one call, and the ids that its replays write."""
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = call().ids
    return graph, ids


@pytest.mark.parametrize("noise", ["grouped", "element"])
def test_replays_advance_with_the_position_on_the_device(make_problem: MakeProblem, noise: str) -> None:
    position = torch.zeros((), dtype=torch.int64, device="cuda")
    seed = torch.arange(8, device="cuda")
    problem = make_problem(
        8, 32000, 64, torch.bfloat16, "cuda", noise=noise, temperature=5.0, seed=seed, position=position,
        sparse_bias=(torch.zeros(1, dtype=torch.int64).cuda(), torch.ones(1, dtype=torch.int64).cuda(),
                     torch.ones(1).cuda()),
    )  # fmt: skip
    graph, ids = capture(lambda: lm_head_sample.run(problem))
    bigger = make_problem(256, 32000, 64, torch.bfloat16, "cuda")
    seen = []
    for step in range(20):
        position.fill_(step)
        lm_head_sample.run(bigger)  # a larger call between replays must not take the graph's memory
        graph.replay()
        eager = lm_head_sample.run(dataclasses.replace(problem, position=step)).ids
        assert torch.equal(ids, eager)
        seen.append(tuple(ids[:, 0].tolist()))
    assert len(set(seen)) == 20
    seed += 100
    graph.replay()
    assert torch.equal(ids, lm_head_sample.run(dataclasses.replace(problem, seed=seed, position=19)).ids)


def test_an_unseeded_capture_draws_anew_at_every_replay() -> None:
    hidden = torch.zeros(8, 64, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(32000, 64, dtype=torch.bfloat16, device="cuda")
    graph, ids = capture(lambda: sample(hidden, weight, implementation="triton"))
    seen = set()
    for _ in range(100):
        graph.replay()
        seen.add(tuple(ids[:, 0].tolist()))
    assert len(seen) == 100


def test_only_candidates_are_allocated(make_problem: MakeProblem) -> None:
    problem = make_problem(256, 151936, 64, torch.bfloat16, "cuda")
    lm_head_sample.run(problem)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lm_head_sample.run(problem)
    peak = (torch.cuda.max_memory_allocated() - before) / 1e6
    print(f"peak {peak:.2f} MB at B=256, V=151936")
    assert peak < 16


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of the kernels compiled while the test runs."""
    names: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook

    def hook(*, fn: object, **_: object) -> bool:
        names.append(str(getattr(fn, "name", fn)))
        return False

    triton.knobs.runtime.jit_post_compile_hook = hook
    yield names
    triton.knobs.runtime.jit_post_compile_hook = before


def test_batches_and_seeds_compile_nothing_new(make_problem: MakeProblem, compilations: list[str]) -> None:
    """A variant a batch class, and one for several row tiles: none for a batch, seed, position or length."""
    D = 136  # used by no other test, so that nothing is compiled yet
    base = make_problem(256, 20000, D, torch.bfloat16, "cuda")
    assert base.hidden is not None and base.weight is not None

    def run(B: int, V: int, seed: int, position: int) -> None:
        assert base.hidden is not None and base.weight is not None
        lm_head_sample.run(dataclasses.replace(
            base, hidden=base.hidden[:B], weight=base.weight[:V], seed=seed, position=position, vocab_size=V
        ))  # fmt: skip

    for B in (1, 17, 33, 65, 129):
        run(B, 20000, 5, 5)
    first = len(compilations)
    assert first <= 6  # five of the matmul and one of the reduction
    for B in range(1, 257):
        run(B, 20000, 1 << (B % 64), B)
    for V, seed, position in ((1, 0, 0), (16, 1, 1), (19999, 2**63, 2**32 - 1), (17, 2**64 - 1, 16)):
        run(3, V, seed, position)
    assert compilations[first:] == []


@pytest.mark.usefixtures("poisoned_empty")
def test_every_candidate_is_written(make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Launch] = []

    def record(problem: Problem, launch: Launch, keys: None) -> SampleResult:
        launches.append(launch)
        return reduce_candidates(problem, launch, keys)

    monkeypatch.setattr(lm_head_sample, "reduce_candidates", record)
    for B in (1, 20, 200):
        result = lm_head_sample.run(make_problem(B, 151936, 64, torch.bfloat16, "cuda", want_logprob=True))
        launch = launches.pop()
        for buffer in (launch.scores, launch.winner_logits, launch.tile_max, launch.tile_sum, result.logprob):
            assert buffer is not None and not buffer.isnan().any()
        for ids in (launch.ids, result.ids):
            assert ids.min() >= 0 and ids.max() < 151936


def test_one_node_in_a_compiled_graph() -> None:
    hidden = torch.randn(8, 64, device="cuda").bfloat16()
    weight = torch.randn(5000, 64, device="cuda").bfloat16()

    def call(seed: torch.Tensor) -> torch.Tensor:
        return sample(hidden * 2, weight, seed=seed, implementation="triton").ids + 1

    compiled = torch.compile(call, fullgraph=True)
    for seed in range(3):
        given = torch.tensor(seed, device="cuda")
        assert torch.equal(compiled(given), call(given))


@pytest.mark.parametrize("rows", [8, 200])
@pytest.mark.parametrize("implementation", ["triton", "auto"])
def test_torch_captures_what_it_compiles(
    rows: int, implementation: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first call is made within a pool of memory of which nothing may live on, our state neither."""
    from fsample_kernels.ops import hopper_workspace

    monkeypatch.setattr(hopper_workspace, "_of_stream", {})
    monkeypatch.setattr(hopper_workspace, "_spares", {})
    hidden = torch.randn(rows, 256, device="cuda").bfloat16()
    weight = torch.randn(32000, 256, device="cuda").bfloat16()
    seed, position = (torch.full((), value, device="cuda", dtype=torch.int64) for value in (5, 0))

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def step(position: torch.Tensor) -> torch.Tensor:
        return sample(hidden, weight, seed=seed, position=position, implementation=implementation).ids

    for i in range(6):
        position.fill_(i)
        ids = step(position).clone()
        assert torch.equal(ids, sample(hidden, weight, seed=5, position=i).ids)


@pytest.mark.parametrize("implementation", ["triton", "hopper"])
def test_the_first_call_of_a_thread(implementation: Implementation) -> None:
    """Triton's allocator is a variable of the context, which a thread begins anew."""
    from concurrent.futures import ThreadPoolExecutor

    if implementation == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    hidden = torch.randn(8, 64, device="cuda").bfloat16()
    weight = torch.randn(5000, 64, device="cuda").bfloat16()

    def ids() -> torch.Tensor:
        return sample(hidden, weight, seed=3, want_lse=True, implementation=implementation).ids

    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(ids).result()
    assert torch.equal(first, ids())


def test_tensors_on_two_devices_are_refused() -> None:
    """Both are named, whichever is the first, and so for a tensor beside the head."""
    hidden, weight = torch.zeros(2, 16, device="cuda"), torch.zeros(300, 16, device="cuda")
    allowed = torch.ones(16, dtype=torch.bool, device="cuda")
    calls: list[tuple[Callable[[], SampleResult], str, str]] = [
        (lambda: sample(hidden.cpu(), weight), "cpu", "cuda:0"),
        (lambda: sample(hidden, weight.cpu()), "cuda:0", "cpu"),
        (lambda: sample(hidden, weight, head_bias=torch.zeros(300)), "cuda:0", "cpu"),
        (lambda: sample_logits(hidden, logit_bias=torch.zeros(16)), "cuda:0", "cpu"),
        (lambda: sample_logits(hidden.cpu(), mask=allowed), "cpu", "cuda:0"),
    ]
    for call, first, second in calls:
        with pytest.raises(ValueError, match=f"first argument, {first}, got {second}"):
            call()


@pytest.mark.multi_gpu
def test_a_head_and_rows_on_two_gpus_are_refused() -> None:
    hidden, weight = torch.zeros(2, 16, device="cuda:0"), torch.zeros(300, 16, device="cuda:1")
    with pytest.raises(ValueError, match="first argument, cuda:0, got cuda:1"):
        sample(hidden, weight)


@pytest.mark.multi_gpu
def test_tensors_on_another_gpu(make_problem: MakeProblem) -> None:
    first = make_problem(8, 5000, 64, torch.bfloat16, "cuda:0")
    second = make_problem(8, 5000, 64, torch.bfloat16, "cuda:1")
    with torch.cuda.device(0):
        assert lm_head_sample.run(second).ids.tolist() == lm_head_sample.run(first).ids.tolist()
        assert torch.cuda.current_device() == 0
        if torch.cuda.get_device_capability(1) == (9, 0):
            from fsample_kernels.ops import hopper_sample

            assert hopper_sample.run(second).ids.tolist() == hopper_sample.run(first).ids.tolist()
            assert torch.cuda.current_device() == 0
        assert second.hidden is not None and second.weight is not None
        given = dataclasses.replace(second, hidden=None, weight=None, logits=second.hidden @ second.weight.T)
        assert logits_sample.run(given).ids.device == torch.device("cuda:1")
