"""The device functions in the interpreter against `noise.py`: words exactly, exponentials to a few ulp."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fsample_kernels import block_draw, noise
from fsample_kernels.ops import device, epilogue

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

WORD = 1 << 32


@triton.jit
def words_kernel(words_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    word = lambda k: tl.load(words_ptr + k * N + i).to(tl.uint32)  # noqa: E731
    r0, r1, r2, r3 = device.philox(word(0), word(1), word(2), word(3), word(4), word(5))
    tl.store(out_ptr + i, r0.to(tl.int64))
    tl.store(out_ptr + N + i, r1.to(tl.int64))
    tl.store(out_ptr + 2 * N + i, r2.to(tl.int64))
    tl.store(out_ptr + 3 * N + i, r3.to(tl.int64))


@triton.jit
def exponential_kernel(high_ptr, low_ptr, out64_ptr, out32_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    high = tl.load(high_ptr + i).to(tl.uint32)
    low = tl.load(low_ptr + i).to(tl.uint32)
    tl.store(out64_ptr + i, device.log2_exponential(device.uniform64(high, low), False))
    tl.store(out32_ptr + i, device.log2_exponential(device.uniform32(high), False))


@triton.jit
def split_kernel(r0_ptr, r1_ptr, total_ptr, hi_ptr, lo_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    hi, lo = device.split_uniform(
        tl.load(r0_ptr + i).to(tl.uint32), tl.load(r1_ptr + i).to(tl.uint32), tl.load(total_ptr + i)
    )
    tl.store(hi_ptr + i, hi)
    tl.store(lo_ptr + i, lo)


@triton.jit
def draw_kernel(y_ptr, c_ptr, score_ptr, column_ptr, MODE: tl.constexpr, B: tl.constexpr, V: tl.constexpr):
    row = tl.arange(0, B)
    y = tl.load(y_ptr + row[:, None] * V + tl.arange(0, V)[None, :])
    c = tl.load(c_ptr + row)
    word = row.to(tl.uint32)
    zero = word * 0
    sample = tl.full((), 3, tl.uint32)
    if MODE == "grouped":
        score, column, _ = device.grouped_draw(
            y, c, 4 * 9, zero + 5, sample, word, zero + 11, zero + 13, 0, B, V, False, False
        )
    elif MODE == "element":
        score, column, _ = device.element_draw(
            y, c, 32 * 9, zero + 5, sample, word, zero + 11, zero + 13, B, V, False
        )
    else:
        score, column = device.greedy(y, V)
    tl.store(score_ptr + row, score)
    tl.store(column_ptr + row, column)


@triton.jit
def softcap_kernel(y_ptr, out_ptr, softcap_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, epilogue.soft_cap(tl.load(y_ptr + i), tl.load(softcap_ptr), False))


def draw(mode: str, y: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    B, V = y.shape
    score = torch.full((B,), torch.nan)
    column = torch.full((B,), -99999, dtype=torch.int32)
    draw_kernel[(1,)](y, c, score, column, mode, B, V)
    return score, column.long()


def random_words(n: int, seed: int) -> Tensor:
    return torch.randint(0, WORD, (n,), generator=torch.Generator().manual_seed(seed))


def end_words() -> Tensor:
    """2^14 words next to each end of [0, 2^32), and the neighbours of the branch at u = 2^-6."""
    return torch.cat([
        torch.arange(1 << 14), WORD - 1 - torch.arange(1 << 14),
        (1 << 26) - (1 << 13) + torch.arange(1 << 14),
        random_words(1 << 14, 1),
    ])  # fmt: skip


def test_philox_known_answers() -> None:
    # Random123 1.14, tests/kat_vectors, philox4x32 10: counter, key, output.
    inputs = torch.tensor([
        [0, 0, 0, 0, 0, 0],
        [0xFFFFFFFF] * 6,
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0],
        [0, 0, 0, 0, 0, 0],
    ])  # fmt: skip
    out = torch.zeros(4, 4, dtype=torch.int64)
    words_kernel[(1,)](inputs.T.contiguous(), out, 4)
    expected = [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]
    assert out.T[:3].tolist() == expected


def test_philox_words_equal_the_definition() -> None:
    words = random_words(6 * 1024, 2).view(6, 1024)
    out = torch.zeros(4, 1024, dtype=torch.int64)
    words_kernel[(1,)](words, out, 1024)
    assert torch.equal(out, torch.stack(noise.philox(*words)))


def test_exponentials_equal_the_definition() -> None:
    high = end_words()
    low = random_words(high.numel(), 3)
    low[:4] = torch.tensor([0, 1, WORD - 1, WORD >> 1])  # next to u = 0, where every bit counts
    out64, out32 = torch.zeros(2, high.numel()).unbind()
    exponential_kernel[(high.numel() // 4096,)](high, low, out64, out32, 4096)
    for out, u in (
        (out64, noise.uniform64(high, low, torch.float64)),
        (out32, noise.uniform32(high, torch.float64)),
    ):
        exact = noise.exponential(u.clamp(max=1 - 2.0**-24)).log2()  # log2 E, cut as the kernel cuts it
        error = (out.double() - exact).abs()
        assert out.isfinite().all()
        # Where draws are won: the rounding of log2 E itself, and of the series its fourth term, u^3 / 4 of E.
        # Above the branch 1 - u is rounded to 2^-25, which E feels most next to it, and where 1 - u is small.
        series, near_one = u < 2.0**-6, u > 1 - 2.0**-6
        allowed = 3 * 2.0**-24 * exact.abs().clamp(min=1.0) + torch.where(series, 0.4 * u**3, 2.0**-18)
        assert (error <= allowed)[~near_one].all()
        assert error[near_one].max() < 0.05


def test_split_uniform_equals_the_definition() -> None:
    r0, r1 = random_words(1024, 4), random_words(1024, 5)
    r0[:3], r1[:3] = torch.tensor([0, WORD - 1, 1 << 31]), torch.tensor([0, WORD - 1, 0])
    total = 1 + 31 * torch.rand(1024, generator=torch.Generator().manual_seed(6))
    hi, lo = torch.zeros(2, 1024).unbind()
    split_kernel[(1,)](r0, r1, total, hi, lo, 1024)
    want_hi, want_lo = noise.split_uniform(r0, r1, total)
    # The interpreter's fma rounds twice, so the product's own rounding is not repaired there; compiled it is.
    error = (hi.double() + lo.double() - want_hi.double() - want_lo.double()).abs()
    assert (error <= 2.0**-23 * want_hi.double().abs() + 1e-30).all()
    assert (lo.abs() <= 2.0**-23 * hi.abs()).all()


def test_grouped_draw_equals_the_reference() -> None:
    generator = torch.Generator().manual_seed(7)
    y = torch.randn(16, 128, generator=generator) * 3
    y[1] = -torch.inf
    y[2, 1:] = -torch.inf
    y[3] = 0.0  # ties everywhere
    y[4, ::2] = -torch.inf
    c = torch.linspace(0.5, 2.0, 16)
    score, column = draw("grouped", y, c)
    streams = noise.RowStreams(11, 13, 5, torch.arange(16))
    ids, _ = block_draw.draw_in_block(y * c[:, None], torch.full((16,), 9), streams, torch.tensor(3))
    live = torch.arange(16) != 1
    assert torch.equal(column[live] + 9 * 128, ids[live])
    assert score[1] == -torch.inf and score[live].isfinite().all()


def test_element_draw_equals_the_definition() -> None:
    y = torch.randn(16, 128, generator=torch.Generator().manual_seed(8)) * 3
    y[1] = -torch.inf
    c = torch.linspace(0.5, 2.0, 16)
    score, column = draw("element", y, c)
    units = 9 * 32 + torch.arange(32)
    words = noise.RowStreams(11, 13, 5, torch.arange(16)[:, None]).words(
        units, 3, noise.ELEMENT
    )  # each [16, 32]
    scores = y * c[:, None] - noise.exponential(noise.uniform32(torch.stack(words, -1).flatten(1))).log2()
    assert torch.equal(column[2:], scores[2:].argmax(1))
    torch.testing.assert_close(score, scores.max(1).values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["grouped", "element", "greedy"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_poisoned_row_scores_infinity(mode: str, bad: float) -> None:
    y = torch.zeros(4, 128)
    for row, column in ((0, 0), (1, 77), (3, 127)):
        y[row, column] = bad
    score, _ = draw(mode, y, torch.ones(4))
    assert (score == torch.inf).tolist() == [True, True, False, True]


def test_greedy_takes_the_lowest_id() -> None:
    y = torch.zeros(4, 128)
    y[0, [9, 40]] = 2.0
    y[1] = -torch.inf
    y[1, 127] = -5.0
    assert draw("greedy", y, torch.ones(4))[1].tolist() == [9, 127, 0, 0]


@pytest.mark.parametrize("cap", [1.0, 30.0, 1e-3, 1e30])
def test_softcap(cap: float) -> None:
    """To 6e-7 of its own size and 2^-22 of the cap; never above the cap. Dense about the change of branch."""
    z = torch.cat([
        torch.linspace(-12, 12, 1 << 16), torch.linspace(0.45, 0.55, 1 << 16),
        torch.logspace(-6, 2, (1 << 17) - 4), torch.tensor([0.0, -torch.inf, torch.inf, torch.nan]),
    ]).double()  # fmt: skip
    y = (z * cap).float()
    y[-4:] = z[-4:].float()
    out = torch.full_like(y, -99.0)
    softcap = torch.tensor(cap)
    softcap_kernel[(1,)](y, out, softcap, y.numel())
    rounded = float(softcap)
    want = rounded * (y.double() / rounded).tanh()
    assert out[-1].isnan() and out[-2] == -out[-3] == rounded and out[-4] == 0
    error = (out.double() - want).abs()[:-1]
    assert (error <= 6e-7 * want.abs()[:-1]).all() and (error <= 2.0**-22 * rounded).all()
    assert out[:-1].abs().max() <= rounded


def test_a_subnormal_softcap_makes_no_nan() -> None:
    y, out = torch.tensor([0.0, 1e-39, -1.0, 1e30]), torch.full((4,), torch.nan)
    softcap_kernel[(1,)](y, out, torch.tensor(1e-39), 4)
    assert out[0] == 0 and (out.abs() <= 1e-39).all()
