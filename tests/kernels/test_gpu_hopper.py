"""The Hopper kernel on a GPU of compute capability 9.0, against the float64 oracle fed the same noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fsample_kernels import sample, validation
from fsample_kernels.testing import assert_ids_in_range, assert_same_ids, assert_same_rows
from fsample_kernels.types import Problem, SampleResult

pytestmark = pytest.mark.gpu

# One row and one odd batch a class of tile; V = 1000 and 129 end inside a block, 50257 leaves 47 lanes, 4097
# opens a unit for one id; D = 264 and 2880 end inside a stage, 640 is five of them; 300 and 1024 rows are
# several row blocks.
SHAPES = [
    (1, 1000, 64), (3, 129, 264), (17, 5000, 640), (33, 50257, 128), (64, 151936, 512), (65, 4097, 2880),
    (128, 32000, 1024), (200, 128256, 256), (256, 151936, 256), (300, 3000, 512), (1024, 8192, 128),
    (1, 1, 16), (5, 127, 24),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def inputs(B: int, V: int, D: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(B * 1009 + V)
    hidden = torch.randn(B, D, device="cuda", dtype=dtype, generator=generator) * (3.0 / D**0.5)
    return hidden, torch.randn(V, D, device="cuda", dtype=dtype, generator=generator)


def run(problem: Problem) -> SampleResult:
    from fsample_kernels.ops import hopper_sample

    assert hopper_sample.why_not(problem) is None
    return hopper_sample.run(problem)


DEFAULTS: dict[str, object] = {
    "temperature": 1.0, "seed": 7, "position": 3, "num_samples": 1, "head_bias": None, "logit_scale": 1.0,
    "softcap": None, "logit_bias": None, "mask": None, "vocab_size": None, "noise": "grouped", "math": "fast",
    "want_logprob": False, "want_lse": False, "store_logits": False,
}  # fmt: skip


def problem_of(hidden: torch.Tensor, weight: torch.Tensor, **arguments: object) -> Problem:
    return validation.head_problem(hidden, weight, **{**DEFAULTS, **arguments})  # type: ignore[arg-type]


def check(hidden: torch.Tensor, weight: torch.Tensor, **arguments: object) -> SampleResult:
    problem = problem_of(hidden, weight, **arguments)
    result = run(problem)
    print(assert_same_ids(problem, result.ids))
    assert_same_rows(problem, result)
    return result


@pytest.mark.parametrize(("B", "V", "D"), SHAPES)
def test_ids_are_the_oracles(B: int, V: int, D: int) -> None:
    hidden, weight = inputs(B, V, D)
    for seed in (1, (1 << 63) + 5):
        check(hidden, weight, seed=seed, position=seed % 1000)


FEATURES = [
    "temperature", "rows", "head_bias", "bias_v", "bias_bv", "sparse", "mask_v", "mask_bv", "bits",
    "vocab_size", "samples", "mass", "mass_samples", "store", "exact", "fp16", "everything",
    "element", "element_rows", "element_mass", "element_everything",
]  # fmt: skip


def size_d(B: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """D of a test over 5,000 ids; at 260 rows such that tiles are parted, as on a GPU of 48 SMs."""
    if B < 260:
        return 320
    from fsample_kernels.ops import hopper_sample, hopper_workspace

    monkeypatch.setattr(hopper_sample, "sm_count", lambda device: 48)
    monkeypatch.setattr(hopper_workspace, "_of_stream", {})
    monkeypatch.setattr(hopper_workspace, "_spares", {})
    return 1024


@pytest.mark.parametrize("B", [5, 64, 100, 130, 260])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, B: int, monkeypatch: pytest.MonkeyPatch) -> None:
    V, D = 5003, size_d(B, monkeypatch)
    hidden, weight = inputs(B, V, D, torch.float16 if feature == "fp16" else torch.bfloat16)
    g = torch.Generator("cuda").manual_seed(B)
    rows = torch.arange(B, device="cuda")
    temperature = torch.where(rows % 3 == 0, 0.0, 0.5 + 0.1 * (rows % 7))
    allowed = torch.rand(B, V, device="cuda", generator=g) < 0.1
    allowed[:, 17] = True
    bits = torch.zeros(B, (V + 31) // 32 * 32, dtype=torch.int64, device="cuda")
    bits[:, :V] = allowed.long()
    shifts = torch.arange(32, device="cuda")
    words = (bits.view(B, -1, 32) << shifts).sum(2)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    ids = torch.cat([rows * 31 % V, rows * 0 + 4999, rows * 7 % V])
    sparse = (rows.repeat(3), ids, torch.randn(3 * B, device="cuda", generator=g) * 8)
    dense = torch.randn(B, V, device="cuda", generator=g) * 3
    head_bias = torch.randn(V, device="cuda")
    arguments: dict[str, dict[str, object]] = {
        "temperature": {"temperature": 0.7},
        "rows": {"temperature": temperature, "seed": rows * 1_000_003 - 5, "position": rows + 11},
        "head_bias": {"head_bias": head_bias.bfloat16(), "logit_scale": 0.7, "softcap": 5.0},
        "bias_v": {"logit_bias": dense[0]},
        "bias_bv": {"logit_bias": dense},
        "sparse": {"logit_bias": sparse},
        "mask_v": {"mask": allowed[0]},
        "mask_bv": {"mask": allowed},
        "bits": {"mask": words},
        "vocab_size": {"vocab_size": 4111},
        "samples": {"num_samples": 3},
        "mass": {"want_logprob": True, "want_lse": True, "temperature": temperature},
        "mass_samples": {"want_logprob": True, "want_lse": True, "num_samples": 2},
        "store": {"store_logits": True, "vocab_size": 5000},
        "exact": {"math": "exact"},
        "fp16": {},
        "element": {"noise": "element"},
        "element_rows": {
            "noise": "element", "temperature": temperature, "seed": rows * 1_000_003 - 5,
            "position": rows + 11, "mask": words,
        },
        "element_mass": {
            "noise": "element", "want_logprob": True, "want_lse": True, "temperature": temperature,
        },
        "everything": {
            "temperature": temperature, "seed": rows * 3 + 1, "position": rows, "head_bias": head_bias,
            "logit_scale": 1.5, "softcap": 9.0, "logit_bias": sparse, "mask": words, "vocab_size": 4999,
            "num_samples": 2, "want_logprob": True, "want_lse": True, "store_logits": True,
        },
    }  # fmt: skip
    keep = sparse[1] < 4999
    arguments["everything"]["logit_bias"] = tuple(part[keep] for part in sparse)
    arguments["element_everything"] = {**arguments["everything"], "noise": "element"}
    check(hidden, weight, **arguments[feature])


@pytest.mark.parametrize("B", [5, 64, 100, 130, 260])
@pytest.mark.parametrize("tables", ["pairs", "narrow", "row", "odd", "strided"])
def test_tables_by_pairs(tables: str, B: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A V that is a multiple of 16, but not of 128: neighbours are loaded at once, where the tables are at
    even addresses, and stored at once. Poison before and after the tables must not come in."""
    V, D = 5008, size_d(B, monkeypatch)
    hidden, weight = inputs(B, V, D)
    g = torch.Generator("cuda").manual_seed(B)
    head = torch.randn(V, device="cuda", generator=g)
    dense = torch.randn(B, V, device="cuda", generator=g) * 3
    poisoned = torch.full((B, V + 16), torch.nan, device="cuda")
    poisoned[:, 1 : V + 1] = dense
    spread = torch.full((V, 2), torch.nan, device="cuda")
    spread[:, 0] = head
    allowed = torch.rand(B, V + 16, device="cuda", generator=g) < 0.3
    arguments: dict[str, dict[str, object]] = {
        "pairs": {"head_bias": head, "logit_bias": dense, "mask": allowed[:, :V]},
        "narrow": {"head_bias": head.bfloat16(), "logit_bias": dense.bfloat16()},
        "row": {"head_bias": head.half(), "logit_bias": dense[0], "mask": allowed[0, :V]},
        "odd": {
            "head_bias": poisoned[0, 1 : V + 1], "logit_bias": poisoned[:, 1 : V + 1],
            "mask": allowed[:, 1 : V + 1],
        },
        "strided": {
            "head_bias": spread[:, 0], "logit_bias": dense.t().contiguous().t(),
            "mask": allowed[:, :V].t().contiguous().t(),
        },
    }  # fmt: skip
    for vocab_size in (V, 4111):
        check(hidden, weight, **arguments[tables], store_logits=True, vocab_size=vocab_size)


@pytest.mark.parametrize(("B", "num_samples"), [(3, 1), (3, 3), (260, 1)])
def test_a_shard_past_the_vocabulary_draws_nothing(B: int, num_samples: int) -> None:
    hidden, weight = inputs(B, 128, 64)
    shard = validation.Shard(128, 256)
    result = run(problem_of(
        hidden, weight, shard=shard, vocab_size=100, num_samples=num_samples, want_logprob=True, want_lse=True
    ))  # fmt: skip
    assert bool((result.ids == -1).all())
    assert result.lse is not None and bool((result.lse == -torch.inf).all())


@pytest.mark.parametrize("B", [2, 260])
def test_the_least_masses_are_masses(B: int) -> None:
    """Logits of -1e38 have a log-sum-exp of that size, and one of a greedy row is its largest logit. The ids
    hang on the rounding of scores, which is larger than any noise."""
    hidden, weight = inputs(B, 256, 64)
    problem = problem_of(
        hidden * 0, weight, logit_bias=torch.full((256,), -1e38, device="cuda"), want_logprob=True,
        want_lse=True, temperature=torch.tensor([1.0, 0.0], device="cuda").repeat(B // 2),
    )  # fmt: skip
    result = run(problem)
    assert_ids_in_range(result.ids, 256)
    assert_same_rows(problem, result)
    assert result.lse is not None and result.lse.tolist() == [pytest.approx(-1e38)] * B


@pytest.mark.parametrize("B", [3, 100, 160, 260])
def test_of_equal_logits_a_greedy_row_takes_the_lowest_id(B: int) -> None:
    """In two lanes of a block, in a later block, and in another tile."""
    hidden, weight = inputs(B, 5000, 64)
    weight[[134, 131, 700, 4000]] = (hidden[0] * 20).to(weight.dtype)
    hidden[:] = hidden[0]
    temperature = torch.where(torch.arange(B, device="cuda") % 2 == 0, 0.0, 0.01)
    ids = sample(hidden, weight, temperature=temperature, seed=3, implementation="hopper").ids[:, 0]
    assert ids[::2].unique().tolist() == [131]  # type: ignore[no-untyped-call]
    assert set(ids[1::2].tolist()) <= {131, 134, 700, 4000}


def test_store_logits_changes_no_id() -> None:
    hidden, weight = inputs(64, 32000, 512)
    plain = sample(hidden, weight, seed=3, implementation="hopper")
    stored = sample(hidden, weight, seed=3, implementation="hopper", store_logits=True)
    assert torch.equal(plain.ids, stored.ids)
    assert stored.logits is not None and stored.logits.isfinite().all()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("B", [1, 20, 200])
def test_nothing_is_read_that_no_program_wrote(B: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer of a call holds NaN or -99999 beforehand: a slot without a store would show, or win."""
    from fsample_kernels.ops import hopper_workspace

    monkeypatch.setattr(hopper_workspace, "_of_stream", {})  # the sums of parted tiles are empty memory, too
    hidden, weight = inputs(B, 50257, 128)
    check(hidden, weight)
    check(hidden, weight, want_logprob=True, want_lse=True)
    full = check(hidden, weight, num_samples=2, want_logprob=True, want_lse=True, store_logits=True)
    for values in (full.logprob, full.lse, full.logits):
        assert values is not None and values.isfinite().all()


@pytest.mark.parametrize("B", [70, 260])
def test_bad_rows_disturb_no_other(B: int) -> None:
    hidden, weight = inputs(B, 5000, 256)
    want = sample(hidden, weight, seed=1, implementation="hopper").ids
    hidden[2, 5] = float("nan")
    temperature = torch.ones(B, device="cuda")
    temperature[7], temperature[8], temperature[9] = float("nan"), float("inf"), -1.0
    position = torch.zeros(B, dtype=torch.int64, device="cuda")
    position[11], position[12] = 1 << 32, -1
    mask = torch.ones(B, 5000, dtype=torch.bool, device="cuda")
    mask[20] = False
    bad = torch.zeros(B, dtype=torch.bool, device="cuda")
    bad[[2, 7, 8, 9, 11, 12, 20]] = True
    for mass in (False, True):
        got = sample(
            hidden, weight, seed=1, temperature=temperature, position=position, mask=mask,
            implementation="hopper", want_logprob=mass, want_lse=mass,
        )  # fmt: skip
        assert_ids_in_range(got.ids, 5000, bad)
        assert torch.equal(got.ids[~bad], want[~bad])
        assert got.logprob is None or torch.equal(got.logprob[:, 0].isnan(), bad)
    greedy = sample(hidden, weight, temperature=0.0, seed=1, implementation="hopper").ids
    assert greedy[2, 0] == -1 and (greedy[3:] >= 0).all()


def test_rows_do_not_depend_on_batch_or_order() -> None:
    """Another batch class sums in another order; the margin of scores is then that of the oracle's check."""
    hidden, weight = inputs(200, 50304, 256)
    seed = torch.arange(200, device="cuda") * 17
    whole = sample(hidden, weight, seed=seed, implementation="hopper").ids
    order = torch.randperm(200, device="cuda")
    shuffled = sample(hidden[order], weight, seed=seed[order], implementation="hopper").ids
    assert torch.equal(shuffled, whole[order])
    for rows in (1, 3, 16, 17, 64, 100, 150):
        part = sample(hidden[:rows], weight, seed=seed[:rows], implementation="hopper").ids
        assert torch.equal(part, whole[:rows]), rows


@pytest.mark.parametrize(("rows", "V"), [(193, 17_000), (256, 17_000), (256, 25_601), (300, 12_300)])
def test_parted_tiles_have_the_bits_of_whole_ones(rows: int, V: int) -> None:
    """67 tiles of 256 ids on 66 CTAs, 101 on 66, 49 on 44: sums pass from CTA to CTA, launch after launch."""
    _, weight = inputs(1, V, 2048)
    expected, found = [], []
    for step in range(40):
        hidden, _ = inputs(rows + step, 8, 2048)
        hidden, seed = hidden[:rows], torch.arange(rows, device="cuda") + step
        found.append(sample(hidden, weight, seed=seed, implementation="hopper").ids)
        few = [slice(first, first + 64) for first in range(0, rows, 64)]
        expected.append(torch.cat([sample(hidden[i], weight, seed=seed[i]).ids for i in few]))
    assert torch.equal(torch.stack(found), torch.stack(expected))
    whole = sample(hidden, weight, seed=1, store_logits=True, implementation="hopper").logits
    assert whole is not None
    for i in few:
        part = sample(hidden[i], weight, seed=1, store_logits=True).logits
        assert part is not None and torch.equal(whole[i], part)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = sample(hidden, weight, seed=seed, implementation="hopper").ids
    for _ in range(20):
        ids.zero_()
        graph.replay()
        assert torch.equal(ids, expected[-1])


def test_shards_at_multiples_of_128_give_the_same_tokens() -> None:
    hidden, weight = inputs(40, 8192, 256)
    arguments = {"seed": 5, "want_lse": True, "want_logprob": True}
    whole = run(problem_of(hidden, weight, **arguments))
    parts = []
    for first in (0, 2048, 5120):
        last = {0: 2048, 2048: 5120, 5120: 8192}[first]
        problem = problem_of(hidden, weight[first:last], **arguments)
        parts.append(run(dataclasses.replace(problem, first_id=first, vocab_size=8192)).ids)
    assert ((torch.stack(parts) == whole.ids).any(0)).all()


def test_graph_replay_advances() -> None:
    hidden, weight = inputs(8, 32000, 256)
    seed = torch.full((), 9, dtype=torch.int64, device="cuda")
    position = torch.zeros((), dtype=torch.int64, device="cuda")
    sample(hidden, weight, seed=seed, position=position)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = sample(hidden, weight, seed=seed, position=position, implementation="hopper").ids
    for step in range(20):
        position.fill_(step)
        graph.replay()
        torch.cuda.synchronize()
        eager = sample(hidden.repeat(8, 1)[:8], weight, seed=9, position=step).ids
        assert torch.equal(ids, eager)
    big, _ = inputs(256, 8, 256)
    sample(big, weight, seed=1)  # a larger workspace must not take the graph's away
    position.fill_(3)
    graph.replay()
    assert torch.equal(ids, sample(hidden, weight, seed=9, position=3).ids)


@pytest.mark.parametrize("B", [8, 200])
def test_captured_calls_start_from_what_an_earlier_one_filled(
    B: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a workspace of its own, and no fill in the graph but where spares ran out."""
    from fsample_kernels.ops import hopper_workspace

    hidden, weight = inputs(B, 32000, 256)
    made: list[int] = []
    make = hopper_workspace.make

    def noted(count: int, *sizes: Any) -> list[hopper_workspace.Workspace]:
        made.append(count)
        return make(count, *sizes)

    monkeypatch.setattr(hopper_workspace, "_of_stream", {})
    monkeypatch.setattr(hopper_workspace, "_spares", {})
    monkeypatch.setattr(hopper_workspace, "SPARES", 3)
    monkeypatch.setattr(hopper_workspace, "make", noted)
    want = [sample(hidden, weight, seed=5, position=i).ids for i in range(4)]
    assert made == [1, 3]
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    ids: list[torch.Tensor] = []
    for graph in graphs:  # the last of four calls finds none
        with torch.cuda.graph(graph):
            ids += [sample(hidden, weight, seed=5, position=len(ids) + i).ids for i in range(2)]
    assert made == [1, 3, 1]
    # would take the memory of the spares, had it been given back with the last of them
    others = [torch.ones(size, device="cuda", dtype=torch.int32) for size in (1 << 9, 3900, 6144) * 20]
    streams = [torch.cuda.Stream() for _ in graphs]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for _ in range(200):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(ids, want, strict=True))
    assert all(bool((other == 1).all()) for other in others)
    sample(hidden, weight, seed=5)
    assert made == [1, 3, 1, 3]


def test_unseeded_graph_draws_anew() -> None:
    hidden, weight = torch.zeros(8, 64, device="cuda", dtype=torch.bfloat16), inputs(1, 32000, 64)[1]
    sample(hidden, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = sample(hidden, weight, implementation="hopper").ids
    seen = set()
    for _ in range(100):
        graph.replay()
        seen.add(tuple(ids[:, 0].tolist()))
    assert len(seen) == 100


def test_two_streams_at_once() -> None:
    """64 tiles leave half of the SMs to the other stream; both start when all calls are queued."""
    hidden, weight = inputs(16, 8192, 1024)
    want = [sample(hidden, weight, seed=s).ids for s in range(40)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            sample(hidden, weight, seed=0, implementation="hopper")  # makes what the stream keeps
            torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # cycles: 50 ms
    got = []
    for s in range(40):
        with torch.cuda.stream(streams[s % 2]):
            got.append(sample(hidden, weight, seed=s, implementation="hopper").ids)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_strided_hidden_and_padded_weight_rows() -> None:
    hidden, weight = inputs(6, 3000, 512)
    wide = torch.zeros(6, 1025, device="cuda", dtype=torch.bfloat16)
    wide[:, 1:513] = hidden  # odd address, odd stride: copied
    padded = torch.zeros(3000, 520, device="cuda", dtype=torch.bfloat16)
    padded[:, :512] = weight
    want = sample(hidden, weight, seed=2, implementation="hopper").ids
    assert torch.equal(sample(wide[:, 1:513], padded[:, :512], seed=2, implementation="hopper").ids, want)
    row = hidden[:1].expand(8, -1)  # one row in memory
    want = sample(row.contiguous(), weight, seed=2, implementation="hopper").ids
    assert torch.equal(sample(row, weight, seed=2, implementation="hopper").ids, want)


def test_compiles_once_a_batch_class() -> None:
    from fsample_kernels.ops.hopper_kernel import hopper_kernel

    _, weight = inputs(1, 3000, 384)
    device = torch.cuda.current_device()

    def variants() -> int:
        return len(hopper_kernel.device_caches[device][0])

    for rows in (1, 65, 129, 256):  # one a class
        hidden = torch.zeros(rows, 384, device="cuda", dtype=torch.bfloat16)
        sample(hidden, weight, seed=1, implementation="hopper")
    before = variants()
    for rows in range(1, 257, 3):
        for seed in (1, 2, 16, 17, 1 << 31, 1 << 40):
            hidden = torch.zeros(rows, 384, device="cuda", dtype=torch.bfloat16)
            sample(hidden, weight, seed=seed, position=seed % 100, implementation="hopper")
    assert variants() == before


def test_peak_memory() -> None:
    hidden, weight = inputs(256, 151936, 1024)
    sample(hidden, weight, seed=1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for arguments in ({}, {"want_logprob": True, "want_lse": True}):
        result = sample(
            hidden, weight, seed=1, implementation="hopper", **arguments  # type: ignore[arg-type]
        )  # fmt: skip
        assert result.implementation == "hopper"
        peak = torch.cuda.max_memory_allocated() - before
        print(f"peak {peak / 1e6:.3f} MB {arguments}")
        assert peak < 16e6
