"""The traffic model against arithmetic done by hand and against the published 2B/D table."""

from __future__ import annotations

import pytest

from fsample_cli.measure.traffic import floor, predict, predicted_store_overhead, traffic
from fsample_cli.samplers import NAMES
from fsample_cli.workloads import Workload, find_preset

SMALL = find_preset("qwen3-8b").workload()  # V = 151,936, D = 4,096, bf16
LARGE = find_preset("llama3-70b").workload()  # V = 128,256, D = 8,192

# Predicted overhead 2B/D in percent as published, by batch.
PUBLISHED = {
    "small": {1: 0.05, 16: 0.78, 64: 3.13, 128: 6.25, 256: 12.5},
    "large": {1: 0.02, 16: 0.39, 64: 1.56, 128: 3.13, 256: 6.25},
}


@pytest.mark.parametrize(("name", "workload"), [("small", SMALL), ("large", LARGE)])
def test_the_simple_form_is_the_published_table(name: str, workload: Workload) -> None:
    for batch, percent in PUBLISHED[name].items():
        assert 100 * (predict(workload, batch).simple - 1) == pytest.approx(percent, abs=0.0051)


def test_the_exact_form_counts_every_term() -> None:
    V, D, B = 151_936, 4_096, 256
    exact = (V * D + B * D + 2 * B * V + B) / (V * D + B * D + B)
    assert predict(SMALL, B).exact == exact
    assert exact == pytest.approx(1.125, rel=2e-3)  # D/V and 1/V are small
    # where V is not large the simple form overstates: most traffic is the hidden states
    tiny = Workload("custom", vocab=128, hidden=4_096)
    assert predict(tiny, 256).exact < predict(tiny, 256).simple


@pytest.mark.parametrize("batch", [1, 64, 256])
def test_storing_fp32_logits_beside_bf16_weights_costs_what_the_model_predicts(batch: int) -> None:
    assert predicted_store_overhead(SMALL, batch) == pytest.approx(2 * batch / 4_096, rel=2e-3)


def test_bytes_by_hand() -> None:
    workload = Workload("custom", vocab=1_000, hidden=64, dtype="bf16")
    head, logits, ids = (1_000 * 64 + 8 * 64) * 2, 8 * 1_000, 8 * 8
    expected = {
        "fused": head + ids,
        "fused+store": head + ids + 4 * logits,
        "gemm": head + 2 * logits,
        "unfused": head + ids + 4 * logits,
        "multinomial": head + ids + 12 * logits,
        "race": head + ids + 6 * logits,
        "fi2": head + ids + 12 * logits,
        "fi1": head + ids + 28 * logits,
    }
    for name, count in expected.items():
        found = traffic(name, workload, 8)
        assert found is not None and (found.bytes, found.flops) == (count, 2 * 8 * 1_000 * 64), name


def test_every_sampler_has_a_model_and_a_users_own_has_none() -> None:
    least = floor(SMALL, 64)
    for name in NAMES:
        found = traffic(name, SMALL, 64)
        assert found is not None and found.bytes >= least.bytes - 8 * 64
    assert traffic("mine:sampler", SMALL, 64) is None
