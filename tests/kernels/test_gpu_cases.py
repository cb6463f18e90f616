"""Faults of other samplers that a GPU alone can show, at the sizes where they were seen."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fsample_kernels import sample, sample_logits
from fsample_kernels.noise import row_streams
from fsample_kernels.oracle import Oracle
from fsample_kernels.testing import explain
from fsample_kernels.types import Implementation, Noise, Problem

pytestmark = pytest.mark.gpu
GPU = "cuda"
DTYPE = torch.bfloat16
noises = pytest.mark.parametrize("noise", ["grouped", "element"])


@pytest.fixture(params=["hopper", "triton"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    yield request.param


def exact(logits: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Rows (1, 0, ...) and a head with the logits in column 0: the products are the logits, in bf16."""
    hidden = torch.zeros(rows, 16, dtype=DTYPE, device=GPU)
    hidden[:, 0] = 1
    weight = torch.zeros(len(logits), 16, dtype=DTYPE, device=GPU)
    weight[:, 0] = logits.to(GPU, DTYPE)
    return hidden, weight


# grouped draws with 64 bits; element is documented to end at gap 22.87, and must keep 20.5
@pytest.mark.parametrize(
    ("gap", "noise", "calls"), [(20.5, "grouped", 100), (23.0, "grouped", 1000), (20.5, "element", 100)]
)
def test_a_crowd_of_unlikely_ids_keeps_its_mass(
    kernel: Implementation, gap: float, noise: Noise, calls: int
) -> None:
    """One id at the top of 262,145: 24-bit noise would draw none of the rest, a 2**-31 grid about one."""
    logits = torch.zeros(262_145)
    logits[0] = gap
    hidden, weight = exact(logits, 1000)
    tail = torch.zeros((), dtype=torch.int64, device=GPU)
    for seed in range(calls):
        tail += (sample(hidden, weight, seed=seed, noise=noise, implementation=kernel).ids != 0).sum()
    top = float(weight[0, 0])
    mass = 262_144 * math.exp(-top) / (1 + 262_144 * math.exp(-top))
    expected = calls * 1000 * mass
    assert abs(int(tail) - expected) < 4.5 * math.sqrt(expected), (int(tail), expected)


@noises
def test_masked_ids_among_a_million_rows(kernel: Implementation, noise: Noise) -> None:
    """Half of 151,936 ids masked: no word of the noise brings one back or leaves the vocabulary."""
    hidden, weight = exact(torch.zeros(151_936), 8192)
    words = torch.full((1, 4748), 0x55555555, dtype=torch.int32, device=GPU).expand(8192, -1)  # even ids
    wrong = torch.zeros((), dtype=torch.int64, device=GPU)
    for position in range(123):
        ids = sample(
            hidden, weight, seed=1, position=position, mask=words, noise=noise, implementation=kernel
        ).ids
        wrong += ((ids % 2 != 0) | (ids < 0) | (ids >= 151_936)).sum()
    assert int(wrong) == 0


@noises
@pytest.mark.parametrize("samples", [1, 5])
def test_both_halves_of_a_flat_vocabulary(kernel: Implementation, samples: int, noise: Noise) -> None:
    """Winners of tiles kept in 16 bits would tie, and the earlier one then always win: 0.508."""
    hidden, weight = exact(torch.zeros(151_936), 4000)
    low = torch.zeros((), dtype=torch.int64, device=GPU)
    for position in range(50 // samples):
        ids = sample(
            hidden,
            weight,
            seed=2,
            position=position,
            num_samples=samples,
            noise=noise,
            implementation=kernel,
        ).ids
        low += ids.lt(151_936 // 2).sum()
    assert abs(int(low) / 200_000 - 0.5) < 4 * 0.5 / math.sqrt(200_000)


@pytest.mark.parametrize(("rows", "vocab", "samples"), [(4096, 151_936, 8)])
def test_more_words_than_32_bits_number(
    kernel: Implementation, make_problem: Callable[..., Problem], rows: int, vocab: int, samples: int
) -> None:
    """A word an id, 5e9 in one call, at the last position. Flat logits: the ids are those of the best words.

    No numbering of the words is cut: the row of word 2**32 and the last have the oracle's ids, and rows
    repeat no others', which would cost distinct ids.
    """
    hidden, weight = exact(torch.zeros(vocab), rows)
    seed, position = (1 << 64) - 5, (1 << 32) - 1
    ids = sample(
        hidden,
        weight,
        seed=seed,
        position=position,
        num_samples=samples,
        noise="element",
        implementation=kernel,
    ).ids
    checked = torch.tensor([0, 1, (1 << 32) // (vocab * samples) % rows, rows - 2, rows - 1], device=GPU)
    fields = {"hidden": hidden[checked], "weight": weight, "num_samples": samples, "noise": "element"}
    problem = make_problem(len(checked), 1, 16, seed=seed, position=position, vocab_size=vocab, **fields)
    oracle = Oracle(problem)
    oracle.streams = row_streams(seed, position, rows, checked.device).take(checked)
    want, got = oracle.result().ids, ids[checked]
    for row, k in (got != want).nonzero().tolist():  # scores that rounding makes equal
        assert explain(oracle, row, k, int(got[row, k]), int(want[row, k]), 0.0).explained, (row, k)
    load = ids.numel() / vocab
    distinct, expected = len(torch.unique(ids)), vocab * -math.expm1(-load)
    deviation = math.sqrt(vocab * math.exp(-load) * (1 - (1 + load) * math.exp(-load)))
    assert abs(distinct - expected) < 5 * deviation, (distinct, expected)


@noises
@pytest.mark.parametrize("samples", [50_000])
def test_sampled_rows_beside_greedy_ones(kernel: Implementation, noise: Noise, samples: int) -> None:
    """Temperatures 0, 1, 0, 0.7 over 32,000 ids, some at exactly 0, some masked: chi-squared, solo runs."""
    logits = torch.randn(32_000, generator=torch.Generator().manual_seed(4)) - 3
    logits[::7] = 0.0
    logits[17_000:17_200] = torch.linspace(9, 4, 200)
    allowed = torch.arange(32_000, device=GPU) % 11 != 5
    hidden, weight = exact(logits, 4)
    seeds = torch.tensor([5, 6, 7, 8], device=GPU)
    temperature = torch.tensor([0.0, 1.0, 0.0, 0.7], device=GPU)

    def draw(rows: slice) -> Tensor:
        return sample(
            hidden[rows],
            weight,
            temperature=temperature[rows],
            seed=seeds[rows],
            num_samples=samples,
            mask=allowed,
            noise=noise,
            implementation=kernel,
        ).ids

    ids = draw(slice(0, 4))
    y = weight[:, 0].double().masked_fill(~allowed, -torch.inf)
    for seed in (0, 1, -1, 1 << 62):
        others = seeds + seed
        few = sample(
            hidden, weight, temperature=temperature, seed=others, num_samples=8, mask=allowed, noise=noise,
            implementation=kernel,
        ).ids  # fmt: skip
        assert (few[[0, 2]] == y.argmax()).all() and len(set(few[1].tolist())) > 1
    assert (ids[[0, 2]] == y.argmax()).all()
    for row in (1, 3):
        assert torch.equal(draw(slice(row, row + 1))[0], ids[row])
        expected = torch.softmax(y / temperature[row].double(), 0) * samples
        counts = torch.bincount(ids[row], minlength=32_000).double()
        assert (counts[~allowed] == 0).all()
        large = expected >= 10
        cells, wanted = (torch.cat([of[large], of[~large].sum()[None]]) for of in (counts, expected))
        statistic, freedom = float(((cells - wanted).square() / wanted).sum()), len(cells) - 1
        assert statistic <= freedom + 6 * math.sqrt(2 * freedom), (row, statistic, freedom)


# 17 rows leave a part of a row tile empty, 33 and 129 fill one and open another.
@noises
@pytest.mark.parametrize("rows", [5, 17, 33, 129])
def test_rows_of_a_request_use_its_parameters(kernel: Implementation, noise: Noise, rows: int) -> None:
    """Requests of two, two and one rows at successive positions, again and again: each row is as alone.

    The parameters are views: what lies around them would be seen in a row that took it.
    """
    row = torch.arange(rows, device=GPU)
    request = torch.tensor([0, 0, 1, 1, 2], device=GPU)[row % 5]
    temperature = torch.tensor([0.5, 1.5, 0.0], device=GPU)[request]
    seed = torch.tensor([1, 2, 3], device=GPU)[request]
    position = torch.tensor([10, 11, 3, 4, 8], device=GPU)[row % 5] + 20 * (row // 5)
    hidden, weight = exact(torch.randn(3000, generator=torch.Generator().manual_seed(9)), rows)

    def inside(of: Tensor, other: float) -> Tensor:
        around = torch.full_like(of, other)
        return torch.cat([around, of, around])[rows : 2 * rows]

    ids = sample(
        hidden, weight, temperature=inside(temperature, math.nan), seed=inside(seed, 99),
        position=inside(position, -1), num_samples=2, noise=noise, implementation=kernel,
    ).ids  # fmt: skip
    assert int(ids.min()) >= 0
    for one in range(rows):
        alone = sample(
            hidden[:1], weight, temperature=float(temperature[one]), seed=seed[one : one + 1],
            position=int(position[one]), num_samples=2, noise=noise, implementation=kernel,
        ).ids  # fmt: skip
        assert torch.equal(alone[0], ids[one]), one


@pytest.mark.parametrize("implementation", ["auto", "hopper", "triton", "unfused", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
def test_a_head_bias_is_added_once_on_every_path(implementation: Implementation, dtype: torch.dtype) -> None:
    """50 at id 17 of 50,257, then at the last, whose block is not full; the logit says that it came once."""
    if implementation == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    generator = torch.Generator(GPU).manual_seed(10)
    weight = torch.randn(50_257, 64, generator=generator, device=GPU).to(DTYPE)
    hidden = (torch.randn(33, 64, generator=generator, device=GPU) / 8).to(DTYPE)
    for planted in (17, 50_256):
        bias = torch.zeros(50_257, dtype=dtype, device=GPU)
        bias[planted] = 50
        result = sample(
            hidden, weight, temperature=0.0, head_bias=bias, want_lse=True, implementation=implementation
        )
        assert result.ids.tolist() == [[planted]] * 33 and result.lse is not None
        want = hidden.double() @ weight[planted].double() + 50
        torch.testing.assert_close(result.lse.double(), want, rtol=0, atol=1e-3)


def test_greedy_ids_are_those_of_a_float64_product(kernel: Implementation) -> None:
    """Logits rounded to bf16 would change a few percent of these ids."""
    generator = torch.Generator(GPU).manual_seed(3)
    weight = torch.randn(129_280, 4096, generator=generator, device=GPU).to(DTYPE)
    hidden = torch.randn(512, 4096, generator=generator, device=GPU).to(DTYPE)
    ids = sample(hidden, weight, temperature=0.0, implementation=kernel).ids[:, 0]
    parts = [hidden.double() @ part.double().T for part in torch.split(weight, 16_160)]
    y = torch.cat(parts, 1)
    best = y.topk(2, 1).values
    clear = best[:, 0] - best[:, 1] > 1e-3  # fp32 sums of 4096 products of size 1
    assert clear.float().mean() > 0.98 and torch.equal(ids[clear], y.argmax(1)[clear])


# zero rows that pad a head whose logits are all negative; untrained rows behind a tokenizer's last id
@pytest.mark.parametrize(("columns", "bound", "padding"), [(153_600, 151_936, 0.0), (248_320, 248_077, 3.0)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_a_head_is_never_drawn(
    kernel: Implementation, columns: int, bound: int, padding: float, temperature: float
) -> None:
    logits = torch.randn(columns, generator=torch.Generator().manual_seed(0)) - 12
    logits[bound:] = padding
    hidden, weight = exact(logits, 1000)
    for seed in range(100):
        ids = sample(
            hidden, weight, seed=seed, temperature=temperature, vocab_size=bound, implementation=kernel
        ).ids
        assert int(ids.min()) >= 0 and int(ids.max()) < bound


@pytest.mark.parametrize(("vocab", "cap"), [(50_257, 30.0), (1000, 1.0)])
def test_spare_lanes_and_masked_ids_stay_out_after_a_softcap(
    kernel: Implementation, vocab: int, cap: float
) -> None:
    """All logits at -1000 under the cap: -inf set before it would come back as -cap, a logit like any."""
    hidden, weight = exact(torch.full((vocab,), -1000.0), 1000)
    allowed = torch.arange(vocab, device=GPU) % 3 != 1
    for mask in (None, allowed):
        for seed in range(100):
            ids = sample(hidden, weight, seed=seed, softcap=cap, mask=mask, implementation=kernel).ids
            assert int(ids.min()) >= 0 and int(ids.max()) < vocab
            assert mask is None or bool(mask[ids].all())


@pytest.mark.parametrize("vocab", [151_936, 151_937])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_row_is_minus_one_at_size(kernel: Implementation, vocab: int, temperature: float) -> None:
    generator = torch.Generator(GPU).manual_seed(5)
    weight = torch.randn(vocab, 64, generator=generator, device=GPU).to(DTYPE)
    hidden = torch.randn(4, 64, generator=generator, device=GPU).to(DTYPE)
    clean = sample(hidden, weight, seed=2, temperature=temperature, implementation=kernel).ids
    hidden[2, 0] = math.nan
    ids = sample(hidden, weight, seed=2, temperature=temperature, implementation=kernel).ids
    assert int(ids[2]) == -1
    others = torch.tensor([0, 1, 3], device=GPU)
    assert torch.equal(ids[others], clean[others]) and int(clean.min()) >= 0


@noises
def test_winners_of_samples_and_rows_meet_at_no_shift(kernel: Implementation, noise: Noise) -> None:
    """Flat logits over 151,936 ids, 64 equal rows in blocks, 4 samples, 50 steps: 12,800 ids.

    Noise reused between rows, tiles or samples would make one difference of two ids frequent. Of N pairs
    a difference holds N / V on average; 12 standard deviations and 8 more are room for the largest of V.
    """
    vocab = 151_936
    hidden, weight = exact(torch.zeros(vocab), 64)
    drawn = [
        sample(hidden, weight, seed=9, position=step, num_samples=4, noise=noise, implementation=kernel).ids
        for step in range(50)
    ]
    ids = torch.stack(drawn)  # [steps, B, K]
    pairs = {
        "samples": (ids[..., :-1], ids[..., 1:]),
        "rows": (ids[:, :-1], ids[:, 1:]),
        "row blocks": (ids[:, :-16], ids[:, 16:]),
        "steps": (ids[:-1], ids[1:]),
    }
    for name, (first, second) in pairs.items():
        shift = (second - first).remainder(vocab).flatten()
        expected = shift.numel() / vocab
        most = int(torch.bincount(shift, minlength=vocab).max())
        assert most < expected + 12 * math.sqrt(expected) + 8, (name, most, expected)


@pytest.mark.parametrize("rows", [65_536, 70_000])
def test_more_rows_than_a_grid_side_holds(rows: int) -> None:
    """Rows lie on the first axis of a grid, of 2**31 - 1. The last rows are drawn as they are alone."""
    weight = torch.randn(300, 16, generator=torch.Generator(GPU).manual_seed(1), device=GPU).to(DTYPE)
    hidden = torch.randn(rows, 16, generator=torch.Generator(GPU).manual_seed(2), device=GPU).to(DTYPE)
    seeds = torch.arange(rows, device=GPU)
    ids = sample(hidden, weight, seed=seeds).ids
    assert int(ids.min()) >= 0 and int(ids.max()) < 300
    assert torch.equal(ids[-9:], sample(hidden[-9:], weight, seed=seeds[-9:]).ids)
    logits = (hidden @ weight.T)[:, :129]
    ids = sample_logits(logits, seed=seeds).ids
    assert int(ids.min()) >= 0 and torch.equal(ids[-9:], sample_logits(logits[-9:], seed=seeds[-9:]).ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_more_tiles_than_a_grid_side_holds(kernel: Implementation, temperature: float) -> None:
    """Ten million ids, 78,125 tiles: a winner in the last and in the first of them is found."""
    for planted in (0, 9_999_999):
        logits = torch.zeros(10_000_000)
        logits[planted] = 60.0
        hidden, weight = exact(logits, 2)
        result = sample(hidden, weight, seed=4, temperature=temperature, implementation=kernel)
        assert result.ids.tolist() == [[planted], [planted]]
        over_logits = sample_logits(weight[None, :, 0].float(), seed=4, temperature=temperature)
        assert over_logits.ids.tolist() == [[planted]]


@noises
@pytest.mark.parametrize("vocab", [1, 100, 256, 512])
def test_ten_thousand_samples_of_a_small_problem(kernel: Implementation, noise: Noise, vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)).to(DTYPE)
    hidden, weight = exact(logits.float(), 1)
    ids = sample(hidden, weight, seed=6, num_samples=10_000, noise=noise, implementation=kernel).ids
    assert ids.shape == (1, 10_000) and int(ids.min()) >= 0 and int(ids.max()) < vocab
    expected = torch.softmax(logits.double(), 0) * 10_000
    counts = torch.bincount(ids[0].cpu(), minlength=vocab).double()
    statistic = float(((counts - expected).square() / expected).sum())
    assert statistic <= (vocab - 1) + 6 * math.sqrt(2 * max(vocab - 1, 1))
    few = sample(hidden, weight, seed=6, num_samples=7, noise=noise, implementation=kernel).ids
    assert torch.equal(few, ids[:, :7])


# Row strides that TMA cannot load go by pointers; fp32 rows of 2, 3 and 5 are 8, 12 and 20 bytes.
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.bfloat16, D) for D in (16, 20, 63, 64, 65, 300, 511, 2880, 2881)]
    + [(torch.float32, D) for D in (2, 3, 5)],
)
def test_rows_of_any_stride(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator(GPU).manual_seed(size)
    weight = torch.randn(1000, size, generator=generator, device=GPU).to(dtype)
    hidden = torch.randn(3, size, generator=generator, device=GPU).to(dtype)
    y = hidden.double() @ weight.double().T
    ids = sample(hidden, weight, temperature=0.0).ids
    assert (y.gather(1, ids) >= y.amax(1, keepdim=True) - 1e-4 * size**0.5).all()
    assert torch.equal(ids[:, 0], y.argmax(1)) or size >= 300


@pytest.fixture
def tf32_products() -> Iterator[None]:
    """What a user may have asked of fp32 products; torch's own are full fp32 without it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("tf32_products")
@pytest.mark.parametrize(
    ("implementation", "noise"),
    [("auto", "grouped"), ("triton", "grouped"), ("triton", "element"), ("reference", "grouped"),
     ("reference", "element"), ("auto", "online")],
)  # fmt: skip
def test_fp32_products_are_full_fp32(implementation: Implementation, noise: Noise) -> None:
    """Two rows of W that differ by 1e-5: TF32, with ten bits, cannot tell them apart."""
    generator = torch.Generator(GPU).manual_seed(8)
    weight = torch.randn(4096, 4096, generator=generator, device=GPU)
    hidden = torch.randn(16, 4096, generator=generator, device=GPU)
    weight[7] = hidden[0] * 3
    weight[4000] = weight[7] * (1 + 1e-5)
    y = hidden.double() @ weight.double().T
    result = sample(
        hidden, weight, temperature=0.0, noise=noise, store_logits=True, implementation=implementation
    )
    assert torch.equal(result.ids[:, 0], y.argmax(1)) and int(result.ids[0]) == 4000
    assert result.logits is not None
    # Of these sums fp32 loses 2e-4 at most on a CPU, TF32 0.2.
    assert float((result.logits[1:] - y[1:]).abs().max()) < 1e-2
    assert torch.get_float32_matmul_precision() == "high"


def test_fp16_sums_stay_in_fp32(kernel: Implementation) -> None:
    """8,192 products of 16: the sum, 131,072, is past fp16."""
    weight = torch.full((300, 8192), 4.0, dtype=torch.float16, device=GPU)
    weight[222, 0] = 8.0
    hidden = torch.full((5, 8192), 4.0, dtype=torch.float16, device=GPU)
    result = sample(hidden, weight, temperature=0.0, want_lse=True, implementation=kernel)
    assert result.ids.tolist() == [[222]] * 5 and result.lse is not None
    assert result.lse.tolist() == [131_088.0] * 5


def test_empty_calls_launch_nothing() -> None:
    weight = torch.zeros(10, 16, dtype=DTYPE, device=GPU)
    for rows, samples in ((0, 1), (3, 0), (0, 0)):
        ids = sample(torch.zeros(rows, 16, dtype=DTYPE, device=GPU), weight, seed=0, num_samples=samples).ids
        assert ids.shape == (rows, samples) and ids.dtype == torch.int64 and ids.device.type == "cuda"


def first_calls(implementation: Implementation) -> tuple[list[int], list[int]]:
    """The ids of two equal calls, the first of them the first of its process."""
    generator = torch.Generator(GPU).manual_seed(11)
    weight = torch.randn(5000, 64, generator=generator, device=GPU).to(DTYPE)
    hidden = torch.randn(8, 64, generator=generator, device=GPU).to(DTYPE)
    first, second = (
        sample(hidden, weight, seed=3, want_lse=True, implementation=implementation).ids[:, 0].tolist()
        for _ in range(2)
    )
    return first, second


def test_the_first_call_of_a_spawned_worker(kernel: Implementation) -> None:
    """No allocator set, nothing tuned, nothing compiled: the first call draws what the second one does."""
    with multiprocessing.get_context("spawn").Pool(1) as workers:
        first, second = workers.apply_async(first_calls, (kernel,)).get(timeout=300)
    assert first == second == first_calls(kernel)[0]


def test_a_users_allocator_stays(kernel: Implementation) -> None:
    import triton
    from triton.runtime import _allocation

    def mine(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=GPU)

    before = _allocation._allocator.get()
    triton.set_allocator(mine)
    try:
        first_calls(kernel)
        assert _allocation._allocator.get() is mine
    finally:
        triton.set_allocator(before)


def test_a_graph_outlives_larger_calls(kernel: Implementation) -> None:
    """Capture B = 8, run B = 256, replay 100 times: the memory is the graph's own, the tokens are eager's."""
    weight = torch.randn(32_000, 64, generator=torch.Generator(GPU).manual_seed(1), device=GPU).to(DTYPE)
    hidden = torch.randn(256, 64, generator=torch.Generator(GPU).manual_seed(2), device=GPU).to(DTYPE)
    position = torch.zeros((), dtype=torch.int64, device=GPU)
    seeds = torch.arange(8, device=GPU)

    def call() -> Tensor:
        return sample(
            hidden[:8], weight, seed=seeds, position=position, want_lse=True, implementation=kernel
        ).ids

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for step in range(100):
        position.fill_(step)
        sample(hidden, weight, seed=step, want_lse=True, implementation=kernel)
        graph.replay()
        replayed = captured.clone()
        eager = sample(
            hidden[:8], weight, seed=seeds, position=step, want_lse=True, implementation=kernel
        ).ids
        assert torch.equal(replayed, eager), step
