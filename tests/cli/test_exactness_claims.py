"""Each mode prints what it claims, and the noise holds it: `grouped` is enumerated in the kernels' tests."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fsample_cli.exactness import claims
from fsample_cli.records import Record
from fsample_cli.reporters import render
from fsample_kernels import noise, sample_logits
from fsample_kernels.types import Noise
from tests.cli.conftest import Fsample


def test_verify_prints_the_claim_of_each_mode(fsample: Fsample) -> None:
    names = "fused:grouped,fused:element:exact,fused:online,multinomial-eager"
    arguments = ("verify", "--test", "noise", "--device", "cpu", "-q", "--format", "json", "--sampler", names)
    record = json.loads(fsample(*arguments).out)
    printed = record["settings"]["claims"]
    assert list(printed) == ["fused:grouped", "fused:element:exact", "fused:online"]
    for name in ("fused:grouped", "fused:online"):
        assert "1% down to 2^-40" in printed[name] and "2^-44 absolute" in printed[name]
        assert (
            "total variation under 2^-20 + 2^-23 |y / temperature|" in printed[name]
            and "fast log" in printed[name]
        )
    element = printed["fused:element:exact"]
    assert (
        "1% down to 2^-30" in element
        and "under V 2^-33 + 2^-23 |y" in element
        and "ends at 22.87" in element
        and "library log" in element
    )
    table = " ".join(render(Record.from_dict(record), "table").split())
    assert "fused:grouped: probabilities right to 1% down to 2^-40" in table
    assert "fused:online: probabilities right to 1% down to 2^-40" in table
    assert "fused:element:exact: probabilities right to 1% down to 2^-30" in table
    markdown = render(Record.from_dict(record), "markdown")
    assert "2^-44 absolute" in markdown and "2^-32 absolute" in markdown


@pytest.mark.parametrize("noise_name", ["grouped", "element", "online"])
def test_ties_are_fair_as_far_as_the_claim_goes_and_not_far_beyond(noise_name: Noise) -> None:
    """Four best ids in four groups, the rest far below. A score has so few digits left for the noise of a tie
    at 2^24 that the lowest id wins two fifths of them."""
    logits = torch.full((20_000, 128), -4.0)
    logits[:, [0, 2, 4, 6]] = 4.0

    def share(scaled: float) -> float:
        ids = sample_logits(logits, temperature=4.0 / scaled, seed=1, noise=noise_name).ids
        counts = torch.bincount(ids.flatten(), minlength=128)
        assert int(counts[[0, 2, 4, 6]].sum()) == len(logits)
        return float(counts[0]) / len(logits)

    for scaled in (64.0, claims.SCALED_LOGIT):
        assert abs(share(scaled) - 0.25) < 4 * (0.25 * 0.75 / len(logits)) ** 0.5 + claims.RELATIVE * 0.25
    assert share(2.0**24) > 0.3


def test_claims_are_made_for_our_modes_only() -> None:
    assert claims.claim("fused:candidates") == claims.claim("fused:grouped:triton")
    assert "rounded" in str(claims.claim("unfused"))
    assert "22.87" in str(claims.claim("fused:element+candidates"))
    assert "of grouped" in str(claims.claim("fused:online"))
    assert all(claims.claim(name) is None for name in ("race", "fi2", "mine:fused"))


@pytest.mark.parametrize("bits", [10, 16, 20, 24, 28, 29, 30, 31, 32, 34, 36, 40, 60])
def test_the_claim_of_element_is_that_of_its_32_bits(bits: int) -> None:
    """A token of odds q against one top token is drawn when E < q E_top. Summed over all words of E that can
    win, with E_top exponential: sum over words of 2^-32 exp(-E / q), E as the fp32 code makes it.
    """
    odds = 2.0**-bits
    words = min(1 << 32, max(64, int(40 * odds * 2**32)))  # beyond, exp(-E / q) < e^-40
    got, step = 0.0, 1 << 22
    for first in range(0, words, step):
        word = torch.arange(first, min(first + step, words))
        e = noise.exponential(noise.uniform32(word)).double()
        got += float(torch.exp(-e / odds).sum()) * 2.0**-32
    right = odds / (1 + odds)
    if bits <= claims.ELEMENT_DEPTH:
        assert abs(got / right - 1) < claims.RELATIVE
    assert abs(got - right) < 2.0**-claims.ELEMENT_ABSOLUTE
    if bits == 31:
        assert abs(got / right - 1) > claims.RELATIVE  # so the depth is not understated
    if bits >= 36:
        assert got < right / 100  # the cut: from 2 nats beyond 33 ln 2 on as good as never drawn


def test_the_cut_of_element_is_the_smallest_word() -> None:
    smallest = noise.exponential(noise.uniform32(torch.tensor(0)))
    assert -math.log(float(smallest)) == pytest.approx(claims.ELEMENT_CUT, rel=1e-6)
