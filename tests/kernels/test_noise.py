"""The noise: known answers, exact tails, no word served twice, the map of groups."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from fsample_kernels import noise, sample_logits

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
CPU = torch.device("cpu")


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The published algorithm in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        low, high = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(high >> 32) ^ c[1] ^ k[0], high & 0xFFFFFFFF, (low >> 32) ^ c[3] ^ k[1], low & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize("counter, key, words", KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert [int(word) for word in noise.philox(c0, c1, c2, c3, *key)] == list(words)
    assert plain_philox(list(counter), list(key)) == list(words)
    # The same through the streams: position, sample and row are the middle words.
    if counter[3] < 1 << 24:
        streams = noise.row_streams(key[0] | key[1] << 32, counter[1], 1, CPU)
        got = streams.words(torch.tensor(counter[0]), counter[2], noise.ELEMENT)
        assert [int(word) for word in got] == list(words)


def test_words_broadcast_and_every_form_of_seed_gives_the_same() -> None:
    """Ints and tensors, 0-d and [B], negative int64 bits; against the algorithm in Python integers."""
    seeds = [0, 1, -1, -(2**63), 2**63 - 1, 0x123456789ABCDEF]
    positions = [0, 2**32 - 1, 5, 6, 7, 2**31]
    streams = noise.row_streams(torch.tensor(seeds), torch.tensor(positions), len(seeds), CPU)
    units, samples = torch.tensor([0, 1, 2**31, 2**32 - 1])[:, None, None], torch.arange(3)[:, None]
    words = torch.stack(streams.words(units, samples, noise.ONLINE))  # [4, 4, 3, 6]
    for (u, unit), sample, row in itertools.product(enumerate(units.flatten().tolist()), range(3), range(6)):
        key = [seeds[row] % 2**32, (seeds[row] >> 32) % 2**32]
        want = plain_philox([unit, positions[row], sample, noise.ONLINE << 24], key)
        assert words[:, u, sample, row].tolist() == want
        single = noise.row_streams(seeds[row] % 2**64, positions[row], 1, CPU)
        shared = noise.row_streams(torch.tensor(seeds[row]), torch.tensor(positions[row]), 1, CPU)
        for one in (single, shared):
            got = one.words(torch.tensor(unit), sample, noise.ONLINE)
            assert [int(word) for word in got] == want


def test_row_index_enters_the_counter_of_a_shared_seed_only() -> None:
    shared = noise.row_streams(9, 4, 3, CPU).words(torch.tensor(2), 1, noise.GROUP)
    own = noise.row_streams(torch.tensor([9, 9, 9]), 4, 3, CPU).words(torch.tensor(2), 1, noise.GROUP)
    assert len(set(shared[0].tolist())) == 3
    assert set(own[0].tolist()) == {int(shared[0][0])}


def test_no_words_are_served_twice() -> None:
    """Every (seed, row, position, sample, unit, domain) has words of its own: 2**17 quadruples, no repeat.

    Two quadruples of 128 random bits collide with probability 2**-95 here, so one repetition is a fault.
    """
    quadruples = []
    domains = (noise.ELEMENT, noise.GROUP, noise.ONLINE, noise.SPLIT + 127)
    for seed, position, domain in itertools.product((7, 8), (3, 4), domains):
        streams = noise.row_streams(seed, position, 16, CPU)
        words = streams.words(torch.arange(64)[:, None, None], torch.arange(8)[:, None], domain)
        quadruples.append(torch.stack(words).flatten(1).t())
    together = torch.cat(quadruples)
    assert len(set(map(tuple, together.tolist()))) == together.shape[0] == 2**17


def test_a_large_call_repeats_no_words_and_no_tile_winners(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a draw asks for: 151,936 ids in 1,187 tiles, 64 equal rows, 4 samples.

    Numbers of tile, row and sample that were added up would give two of these one block of words: the same
    64 bits (among 1.2M by chance: 4e-8), and winners of tiles that agree at some shift (of 4e7 correlations
    by chance one above 8 standard deviations: 5e-8).
    """
    asked: list[Tensor] = []
    words = noise.RowStreams.words

    def record(
        streams: noise.RowStreams, unit: Tensor, sample: noise.Word, domain: noise.Word
    ) -> noise.Words:
        served = words(streams, unit, sample, domain)
        if unit.shape[1:] == (1, 1):  # the race of the groups, and not the draw within the one that won
            asked.append(torch.stack(served))
        return served

    monkeypatch.setattr(noise.RowStreams, "words", record)
    sample_logits(torch.zeros(1, 151_936).expand(64, -1), seed=9, num_samples=4)
    served = torch.cat(asked, 1)  # [4, 4748, 4, 64]: word, group, sample, row
    assert served.shape == (4, 4748, 4, 64)
    for high, low in (served[:2], served[2:]):
        assert (high << 32 | low).unique().numel() == high.numel()
    least = served[2].view(1187, 4, 256).amin(1).double() / 2**32  # of a tile's four groups, flat logits
    winner = (0.5 - (1 - least) ** 4).t()  # [256, 1187], even in +-1/2
    winner = winner - winner.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(winner / winner.norm(dim=1, keepdim=True))
    for one in range(255):
        at_every_shift = torch.fft.irfft(spectrum[one].conj() * spectrum[one + 1 :], n=1187)
        assert float(at_every_shift.abs().max()) < 8 / 1187**0.5, one


def test_shards_that_cut_a_group_draw_from_different_words() -> None:
    """Every shard of one block, whatever its start: the words of its four groups are nobody else's."""
    groups = torch.arange(4 * 5, 4 * 7)  # blocks 5 and 6
    streams = noise.row_streams(7, 3, 1, CPU)
    seen: set[tuple[int, ...]] = set()
    for first_id in range(5 * 128, 6 * 128):
        domain = noise.group_domain(groups, first_id)
        words = torch.stack(streams.lanes().words(groups, 0, domain))[:, 0]  # [4, 8]
        seen.update(map(tuple, words[:, :4].t().tolist()))
        assert torch.equal(words[:, 4:], torch.stack(streams.lanes().words(groups[4:], 0, noise.GROUP))[:, 0])
    assert len(seen) == 4 * 128


def test_neighbouring_streams_are_independent() -> None:
    """Sample 1 under seed s and sample 0 under s + 1, rows, positions: bits agree half the time."""
    units = torch.arange(4096)

    def bits(seed: int, position: int, sample: int, row: int) -> Tensor:
        streams = noise.row_streams(seed, position, 2, CPU).take(torch.tensor(row))
        words = torch.stack(streams.words(units, sample, noise.GROUP))
        return (words[..., None] >> torch.arange(32)) & 1

    base = bits(40, 1, 1, 0)
    for other in (
        bits(41, 1, 0, 0),
        bits(40, 2, 1, 0),
        bits(40, 1, 0, 0),
        bits(40, 1, 1, 1),
        bits(41, 1, 1, 0),
    ):
        agreement = (base == other).double().mean().item()
        assert abs(agreement - 0.5) < 4 * 0.5 / (4096 * 128) ** 0.5


def ends(count: int = 1 << 16) -> Tensor:
    low = torch.arange(count)
    return torch.cat([low, 2**31 - count // 2 + low, 2**32 - count + low])


def branch_neighbours() -> Tensor:
    """Words around u = 2**-6, where the kernels change from a series to a logarithm."""
    return (1 << 26) + torch.arange(-4096, 4096)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_word_gives_zero_infinity_or_nan(dtype: torch.dtype) -> None:
    words = torch.cat([ends(), branch_neighbours()])
    for low in (0, 1, 2**31, 2**32 - 1):
        for u in (noise.uniform32(words, dtype), noise.uniform64(words, torch.full_like(words, low), dtype)):
            assert ((u > 0) & (u <= 1)).all()
            e = noise.exponential(u)
            assert ((e > 0) & e.isfinite()).all() and e.log2().isfinite().all()
            assert (e[1 : 1 << 16] >= e[: (1 << 16) - 1]).all()  # rises with the word


def test_exponential_keeps_its_digits_where_draws_are_won() -> None:
    """fp32 within 3e-7 relative of float64 from 2**-65 up, the stated ends of the noise included."""
    words = torch.cat([ends(), branch_neighbours(), 2 ** torch.arange(32)])
    high = torch.cat([words, torch.zeros(33, dtype=torch.int64)])
    low = torch.cat([words.flip(0), 2 ** torch.arange(32), torch.tensor([0])])
    single, double = noise.uniform64(high, low), noise.uniform64(high, low, torch.float64)
    inside = double < 1 - 2.0**-20  # beyond, the fp32 cut at 1 - 2**-24 is meant
    exact = -torch.log1p(-double)
    error = (noise.exponential(single).double() / exact - 1).abs()[inside]
    assert error.max() < 2e-1  # close to u = 1 fp32 itself is coarse; it is the losing end
    assert error[double[inside] < 0.5].max() < 3e-7
    smallest = noise.exponential(noise.uniform64(torch.tensor(0), torch.tensor(0)))
    assert -smallest.log() == pytest.approx(65 * noise.LN_2, rel=1e-6)
    assert -noise.exponential(noise.uniform32(torch.tensor(0))).log() == pytest.approx(
        33 * noise.LN_2, rel=1e-6
    )


def test_groups_are_the_documented_partition() -> None:
    ids = torch.arange(128 * 5)
    group, member = noise.group_of(ids), noise.member_of(ids)
    assert group.tolist() == [4 * (i // 128) + (i % 8) // 2 for i in range(640)]
    assert member.tolist() == [2 * ((i % 128) // 8) + i % 2 for i in range(640)]
    assert torch.equal(noise.id_of(group, member), ids)
    assert group.bincount().tolist() == [32] * 20
    view = ids.view(5, 16, 4, 2).permute(0, 2, 1, 3).flatten(2)  # [block, q, j]
    assert torch.equal(noise.id_of(torch.arange(20)[:, None], torch.arange(32)), view.flatten(0, 1))


def test_split_uniform_holds_47_bits_of_the_total_and_the_digits_of_a_small_one() -> None:
    generator = torch.Generator().manual_seed(3)
    r0 = torch.randint(0, 2**32, (400,), generator=generator)
    r1 = torch.randint(0, 2**32, (400,), generator=generator)
    r0[:40] >>= torch.arange(40) % 32
    total = torch.rand(400, generator=generator) * 32 + 0.01
    hi, lo = noise.split_uniform(r0, r1, total)
    for a, b, s, h, l in zip(*(t.tolist() for t in (r0, r1, total, hi, lo)), strict=True):
        exact = (Fraction(a) + (Fraction(b) + Fraction(1, 2)) / 2**32) / 2**32 * Fraction(s)
        error = abs(Fraction(h) + Fraction(l) - exact)
        assert error <= Fraction(s) / 2**47 and error <= exact / 2**22
        assert 0 <= h and abs(l) <= h * 2.0**-23
