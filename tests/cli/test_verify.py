"""`fsample verify` end to end on the CPU: what passes, what is caught, what is refused, and what is
printed.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fsample_cli import samplers
from fsample_cli.commands import verify
from fsample_cli.exactness import battery, session
from fsample_cli.records import Record
from tests.cli.conftest import Fsample

ROWS = ("verify", "--test", "rows", "--device", "cpu", "--quiet")


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def strict(text: str) -> dict[str, Any]:
    data = json.loads(text, parse_constant=refuse)
    assert isinstance(data, dict)
    return data


def test_the_default_is_the_published_check_over_all_our_algorithms(fsample: Fsample) -> None:
    done = fsample(*ROWS, "--format", "json")
    assert done.code == 0, done.err
    data = strict(done.out)
    record = Record.from_dict(data)
    assert record.to_dict() == data
    assert record.workload is not None and record.workload.vocab == 512
    assert [(row.algorithm, row.row) for row in record.results] == [
        (algorithm, row) for algorithm in ("grouped", "element", "online") for row in range(4)
    ]
    for row in record.results:
        assert row.sampler == "fused" and row.implementation == "reference" and row.batch == 256
        assert 10_000 <= row.draws < 10_300
        assert row.statistic > 0 and row.dof > 50 and 0 < row.p_value <= row.p_adjusted <= 1
        assert row.effect == "total variation" and 0 < row.seen_at_80 < row.seen_at_99 < 0.1
        assert row.verdict == "pass"
    assert record.settings["alpha"] == 0.01 and record.settings["p_values"] == 12


def test_rows_are_tested_one_by_one_and_not_flattened(fsample: Fsample) -> None:
    done = fsample(*ROWS, "--batch", "1,3", "--draws", 500, "--sampler", "fused:grouped", "--format", "json")
    assert done.code == 0, done.err
    results = strict(done.out)["results"]
    assert [(row["batch"], row["row"]) for row in results] == [(1, 0), (3, 0), (3, 1), (3, 2)]
    assert len({row["dof"] for row in results[1:]}) > 1  # three distributions, not one


@pytest.mark.parametrize(
    "fault",
    ["one_percent_bias", "past_the_end", "never_the_rarest_third", "probabilities_as_logits", "floats"],
)
def test_a_wrong_sampler_is_caught(fsample: Fsample, fault: str) -> None:
    done = fsample(*ROWS, "--sampler", f"tests.cli.perfect:{fault}", "--format", "json")
    assert done.code == 1, done.err
    results = strict(done.out)["results"]
    failed = [row for row in results if row["verdict"] == "fail"]
    assert failed
    if fault == "past_the_end":
        assert failed[0]["case"] == "B=256 range" and "such as 512" in failed[0]["note"]
    if fault == "floats":
        assert "must return integer ids" in failed[0]["note"]


def test_a_right_sampler_of_the_user_passes_the_quick_battery(fsample: Fsample) -> None:
    done = fsample(
        "verify", "--sampler", "tests.cli.perfect:right", "--device", "cpu", "--format", "json",
        "--test", "rows,tails,zero-mass,range,independence",
    )  # fmt: skip
    assert done.code == 0, done.out
    record = Record.from_dict(strict(done.out))
    assert {row.test for row in record.results} == {"rows", "tails", "zero-mass", "range", "independence"}
    assert "fsample: tests.cli.perfect:right: rows" in done.err  # progress


def test_our_quick_battery_passes_and_its_table_is_short(shell: Fsample) -> None:
    done = shell("verify", "--sampler", "fused:grouped", "--device", "cpu", "-q")
    assert done.code == 0, done.out + done.err
    lines = done.out.splitlines()
    assert len(lines) < 40 and max(map(len, lines)) <= 84
    for test in battery.ALL_TESTS:
        assert any(line.startswith(test) for line in lines), test
    assert "fail" not in done.out.replace("failed=0", "").replace("a right sampler\n  fails", "").replace(
        "fails", ""
    )


def test_seconds_are_counted_once_and_the_rest_is_named(fsample: Fsample) -> None:
    """Statistics of one test share its draws: counting those in each summed to thrice the run's time."""
    started = time.perf_counter()
    done = fsample(
        "verify", "--test", "rows,independence,range", "--sampler", "fused:grouped,tests.cli.perfect:right",
        "--device", "cpu", "--format", "json", "-q",
    )  # fmt: skip
    wall = time.perf_counter() - started
    data = strict(done.out)
    seconds = [row["seconds"] for row in data["results"]]
    settings = data["settings"]
    assert all(value >= 0 for value in seconds) and 0 <= settings["seconds_outside_tests"]
    assert sum(seconds) + settings["seconds_outside_tests"] == pytest.approx(settings["seconds"], abs=1e-3)
    assert 0.5 * wall < settings["seconds"] < wall
    rows = [row["seconds"] for row in data["results"] if row["test"] == "rows"]
    assert rows[0] > 10 * max(rows[1:4])  # the draws of all four rows are in the first


def test_details_state_draws_effect_and_time_of_every_statistic(fsample: Fsample) -> None:
    done = fsample(*ROWS, "--draws", 500, "--sampler", "fused:grouped", "--details")
    assert done.code == 0
    assert "sees: the smallest effect seen with power 0.8" in " ".join(done.out.split())
    head = next(line for line in done.out.splitlines() if line.startswith("test"))
    assert head.split() == "test sampler case stat dof p Holm draws sees less of s verdict".split()


def test_a_failing_table_shows_the_worst_case_and_why(fsample: Fsample) -> None:
    done = fsample(
        "verify", "--test", "range,zero-mass", "--sampler", "tests.cli.perfect:past_the_end", "-q",
        "--device", "cpu",
    )  # fmt: skip
    assert done.code == 1
    assert "fail" in done.out and "draws of tokens at -inf" in done.out and "ids outside [0, " in done.out


def test_temperature_is_applied_once(fsample: Fsample) -> None:
    for temperature in ("0.3", "2", "0"):
        done = fsample(*ROWS, "--temperature", temperature, "--draws", 4000, "--sampler", "fused:element")
        assert done.code == 0, (temperature, done.out)


def test_a_checkpoint_with_its_soft_cap_and_real_states(fsample: Fsample, tmp_path: Path) -> None:
    """V = 3000: small bins are pooled. Without the soft-cap of 2 the same draws would fail."""
    generator = torch.Generator().manual_seed(0)
    save_file({"lm_head.weight": torch.randn(3000, 32, generator=generator)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"final_logit_softcapping": 2.0}))
    np.save(tmp_path / "states.npy", torch.randn(5, 32, generator=generator).numpy())
    arguments = (*ROWS, "--states", tmp_path / "states.npy", "--sampler", "fused:grouped", "--format", "json")
    done = fsample(*arguments, "--checkpoint", tmp_path)
    assert done.code == 0, done.out + done.err
    data = strict(done.out)
    assert data["workload"]["softcap"] == 2.0 and data["workload"]["vocab"] == 3000
    assert all(row["dof"] < 2999 for row in data["results"])


def test_real_logits_are_a_target_of_the_battery(fsample: Fsample, tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.randn(600, 32)}, tmp_path / "model.safetensors")
    done = fsample(
        "verify", "--test", "goodness", "--checkpoint", tmp_path, "--sampler", "fused:grouped", "--quiet",
        "--device", "cpu", "--format", "json",
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    assert any(row["case"].startswith("real 3 V=600") for row in strict(done.out)["results"])


def test_a_sampler_that_cannot_run_here_is_named_with_the_next_step(fsample: Fsample) -> None:
    done = fsample(*ROWS, "--draws", 300, "--sampler", "fi2,multinomial-eager", "--format", "json")
    assert done.code == 0, done.err
    skipped = [row for row in strict(done.out)["results"] if row["verdict"] == "skipped"]
    assert [row["sampler"] for row in skipped] == ["fi2"] and "GPU" in skipped[0]["note"]
    alone = fsample(*ROWS, "--sampler", "fi2")
    assert alone.code == 2 and "nothing could be tested" in alone.error


def test_the_default_number_of_draws_fits_the_device() -> None:
    def draws(vocab: int, device: str) -> int:
        from fsample_cli.workloads import Workload

        return session.default_draws(
            session.Request((), Workload("w", vocab, 8), (4,), None, 1.0, 0.01, "quick", (), device, 0)
        )

    assert draws(512, "cpu") == 10_000 == draws(262_144, "cuda")
    assert 200 <= draws(262_144, "cpu") < 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--draws", "0"), ("--draws", "0")),
        (("--alpha", "0"), ("--alpha", "0.0")),
        (("--alpha", "nan"), ("--alpha", "nan")),
        (("--alpha", "0.0009"), ("--alpha must be 0.001 or more and below 1, got 0.0009", "--alpha 0.01")),
        (("--temperature", "nan"), ("--temperature", "nan")),
        (("--test", "chi"), ("--test", "rows, goodness", "'chi'")),
        (("--level", "huge"), ("--level", "huge")),
        (("--self-test", "--sampler", "fused"), ("--self-test and --sampler exclude", "leave out --sampler")),
        (("--self-test", "--level", "quick"), ("--self-test and --level exclude",)),
        (("--self-test", "--test", "rows"), ("--self-test and --test exclude",)),
        (("--self-test", "--vocab", "600"), ("--self-test and --vocab exclude",)),
        (("--self-test", "--batch", "256"), ("--self-test and --batch exclude",)),
        (("--self-test", "--temperature", "1"), ("--self-test and --temperature exclude",)),
        (
            ("--sampler", "fused:hopper", "--test", "tails,noise", "--device", "cpu"),
            ("nothing could be tested",),
        ),
        (("--sampler", "fused:elemnt"), ("fused", "elemnt")),
        (("--sampler", "tests.cli.perfect:none"), ("none",)),
        (("--sampler", "nowhere:at_all"), ("nowhere",)),
        (("--sampler", "gemm"), ("--sampler must name one that draws, got gemm", "choose from fused,")),
        (("--sampler", "fused:p2p"), ("fused:p2p needs --tp 2 or more", "add --tp 2")),
        (("--sampler", "fused:element:log_mass"), ("fused:element:log_mass needs --tp 2 or more",)),
        (("--batch", "4..1"), ("--batch", "1..4")),
        (("--vocab", "0"), ("--vocab", "0")),
        (("--format", "csv", "--output", "/nowhere/x.csv"), ("--output", "/nowhere")),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line(
    fsample: Fsample, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = fsample("verify", "--quiet", *arguments)
    assert done.code == 2
    assert all(word in done.error for word in words), done.error


def test_the_self_test_lists_every_mutant_and_fails_when_one_goes_unseen(
    fsample: Fsample, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsample_cli.exactness import mutants, self_test

    quick = [mutant for mutant in mutants.MUTANTS if mutant.test == "independence"][:2]
    harmless = mutants.Mutant("harmless", "none", "range", "quick", mutants.control().draw)
    for planted, code in ((quick, 0), ([*quick, harmless], 1)):
        monkeypatch.setattr(self_test.run, "__defaults__", (planted,))
        done = fsample("verify", "--self-test", "--device", "cpu", "-q", "--format", "json")
        assert done.code == code, done.out
        results = strict(done.out)["results"]
        assert [row["sampler"] for row in results] == ["control", *(f"mutant:{m.name}" for m in planted)]
        assert [row["verdict"] for row in results] == ["pass"] * 3 + ["fail"] * code


def test_an_audit_in_markdown_starts_with_samplers_by_tests(fsample: Fsample) -> None:
    done = fsample(
        "verify", "--test", "rows,range", "--draws", 2000, "--format", "markdown", "-q", "--device", "cpu",
        "--sampler", "fused:grouped,fi2,tests.cli.perfect:past_the_end",
    )  # fmt: skip
    assert done.code == 1
    lines = done.out.splitlines()
    start = lines.index("| sampler | rows | range |")
    assert lines[start + 2 : start + 5] == [
        "| fused:grouped | pass | pass |",
        "| fi2 | – | – |",
        "| tests.cli.perfect:past_the_end | **fail** | **fail** |",
    ]


def test_all_on_a_gpu_is_every_implementation_and_every_baseline() -> None:
    names = verify.audit(["all,mine:f"], "cuda", 1)
    assert names is not None
    kernels = {f"fused:{noise}{kernel}{math}" for noise in ("grouped", "element")
               for kernel in ("", ":triton") for math in ("", ":exact")}  # fmt: skip
    assert kernels | {"fused:unfused", "fused:online", "mine:f"} <= set(names)
    assert set(samplers.NAMES) - {"fused", "fused+store", "gemm"} <= set(names)
    assert verify.audit(["all"], "cpu", 1) == ["all"] and verify.audit(["all"], "cuda", 2) == ["all"]


def test_help_names_every_test(fsample: Fsample) -> None:
    done = fsample("verify", "--help")
    assert done.code == 0
    assert all(name in done.out for name in battery.ALL_TESTS)


def test_exact_maths_can_be_asked_for(fsample: Fsample) -> None:
    done = fsample(
        "verify",
        "--test",
        "pathwise",
        "--sampler",
        "fused:element:exact",
        "--device",
        "cpu",
        "--format",
        "json",
    )
    assert done.code == 0, done.err
    assert {row["algorithm"] for row in strict(done.out)["results"]} == {"element:exact"}


def test_a_softmax_in_bf16_fails_and_the_baselines_take_it_in_fp32(
    fsample: Fsample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V = 256 at temperature 5 and bf16 logits: a running sum in bf16 is told apart in 10,000 draws."""
    dtypes = set()
    multinomial = torch.multinomial

    def spy(p: torch.Tensor, count: int) -> torch.Tensor:
        dtypes.add(p.dtype)
        return multinomial(p, count)

    monkeypatch.setattr(torch, "multinomial", spy)
    done = fsample(
        *ROWS, "--vocab", 256, "--hidden", 64, "--temperature", 5, "--dtype", "bf16", "--format", "json",
        "--sampler", "multinomial-eager,fused:grouped,tests.cli.perfect:softmax_in_bf16",
    )  # fmt: skip
    assert done.code == 1, done.err
    verdicts: dict[str, set[str]] = {}
    for row in strict(done.out)["results"]:
        verdicts.setdefault(row["sampler"], set()).add(row["verdict"])
    assert verdicts["tests.cli.perfect:softmax_in_bf16"] == {"fail"}
    assert verdicts["fused"] == {"pass"} == verdicts["multinomial-eager"]
    assert dtypes == {torch.float32}
