"""`fsample verify`: are the tokens drawn from the distribution they should come from?"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from typing import Annotated

import typer

from fsample_cli import interrupts, launch, samplers
from fsample_cli.errors import UsageError
from fsample_cli.options import (
    BatchOption,
    CheckpointOption,
    Device,
    DeviceOption,
    DType,
    DTypeOption,
    ForceOption,
    FormatOption,
    HiddenOption,
    OutputOption,
    QuietOption,
    SamplerOption,
    SeedOption,
    StatesOption,
    TemperatureOption,
    TpOption,
    VocabOption,
    check_output,
    command_line,
    note,
    parse_batches,
    preset_option,
    typed,
)
from fsample_cli.progress import progress_bar
from fsample_cli.records import Json, Record
from fsample_cli.reporters import write_report
from fsample_cli.request import build_workload, parse_samplers, resolve_device
from fsample_cli.workloads import Workload

OURS = ("fused:grouped", "fused:element", "fused:online")
# `--sampler all` on a GPU: every implementation, kernels with both maths, then what others draw with. On a
# CPU: every name.
AUDIT = (
    "fused:grouped", "fused:element", "fused:grouped:exact", "fused:element:exact", "fused:grouped:triton",
    "fused:element:triton", "fused:grouped:triton:exact", "fused:element:triton:exact", "fused:unfused",
    "fused:unfused:exact", "fused:element:unfused", "fused:element:unfused:exact", "fused:online", "unfused",
    "multinomial-eager", "multinomial", "race", "fi1", "fi2",
)  # fmt: skip
OURS_OVER_RANKS = ("fused:candidates", "fused:log_mass", "fused:element", "fused:online")
SMALL = Workload("verify", 512, 64)


class LevelName(str, Enum):
    quick = "quick"
    standard = "standard"
    deep = "deep"


def verify(
    context: typer.Context,
    sampler: SamplerOption = None,
    level: Annotated[
        LevelName | None,
        typer.Option(
            "--level",
            help="How much is drawn: seconds, minutes, billions. Default: quick.",
            show_default=False,
        ),
    ] = None,
    test: Annotated[
        list[str] | None,
        typer.Option(
            "--test", help="Run only these tests; repeat or separate by commas.", show_default=False
        ),
    ] = None,
    batch: BatchOption = "256",
    draws: Annotated[
        int | None,
        typer.Option(
            "--draws",
            help="Draws per row of the workload. Default: 10000, fewer for a large vocabulary on a CPU.",
            show_default=False,
        ),
    ] = None,
    tp: TpOption = 1,
    temperature: TemperatureOption = 1.0,
    alpha: Annotated[
        float,
        typer.Option("--alpha", help="Chance that a right sampler fails the whole run; 0.001 or more."),
    ] = 0.01,
    preset: Annotated[str | None, preset_option("V = 512 and D = 64")] = None,
    vocab: VocabOption = None,
    hidden: HiddenOption = None,
    checkpoint: CheckpointOption = None,
    states: StatesOption = None,
    device: DeviceOption = Device.auto,
    dtype: DTypeOption = DType.auto,
    seed: SeedOption = 0,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Test the tests: every planted fault must be seen."),
    ] = False,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Show every statistic in the table, not the worst of each test, with its p adjusted over "
            "the run, its draws, the smallest effect it sees with power 0.8, and its seconds.",
        ),
    ] = False,
    format: FormatOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Test that samplers draw from softmax(logits / temperature), and say what was tested.

    Test `rows` draws 10,000 tokens for each of up to four rows of the workload (V = 512 unless a shape or
    checkpoint is given) and compares the counts with the softmax in float64 by chi-squared. The other tests
    use distributions known to the last bit: goodness, tails, zero-mass, range, independence; and for fused
    alone ranks, pathwise, logprob, invariance, noise. All p-values are judged together (Holm). Exit code 1
    when anything fails. Stopped by SIGINT or SIGTERM it still judges and writes what had ended, marked as
    unfinished (exit code 130 or 143; with --tp nothing is kept).

    With --tp every draw is made by ranks that share the head, started here unless torchrun has done so.
    """
    if self_test and tp > 1:
        raise UsageError(f"--self-test runs on one rank, got --tp {tp}", "leave one of them out")
    of_a_run = {
        "--sampler": sampler, "--level": level, "--test": test, "--draws": draws, "--preset": preset,
        "--vocab": vocab, "--hidden": hidden, "--checkpoint": checkpoint, "--states": states,
    }  # fmt: skip
    given = [name for name, value in of_a_run.items() if value is not None]
    given += [f"--{name}" for name in ("batch", "temperature") if typed(context, name)]
    if self_test and given:
        raise UsageError(
            f"--self-test and {given[0]} exclude each other: each planted fault names its own",
            f"leave out {given[0]}, or --self-test",
        )
    amount = level or LevelName.quick
    if not launch.runs_here(tp):
        raise typer.Exit(launch.supervise(tp, quiet=quiet))
    # Threads that spin at every barrier make thousands of small calls ten times slower on a busy machine
    # (measured: 428 s spinning, 51 s waiting, 2 cores at load 7). OpenMP reads this once, when torch is
    # imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    target = check_output(format, output, force)
    batches = parse_batches(batch)
    if draws is not None and draws < 1:
        raise UsageError(f"--draws must be 1 or more, got {draws}", "the default is 10000")
    from fsample_cli.exactness.holm import SMALLEST_ALPHA

    if not SMALLEST_ALPHA <= alpha < 1:  # the far tails of chi-squared are not known further out
        raise UsageError(
            f"--alpha must be {SMALLEST_ALPHA:g} or more and below 1, got {alpha}", "try --alpha 0.01"
        )
    known, ours = (samplers.NAMES, OURS) if tp == 1 else (samplers.TP_NAMES, OURS_OVER_RANKS)
    where = resolve_device(device)
    names = expand(parse_samplers(audit(sampler, where, tp), known, ours), ours)
    if names == ("gemm",):
        raise UsageError(
            "--sampler must name one that draws, got gemm, the bare product",
            f"choose from {', '.join(name for name in known if name != 'gemm')}; bench times gemm",
        )
    workload = build_workload(
        preset=preset, vocab=vocab, hidden=hidden, checkpoint=checkpoint, states=states,
        device=where, dtype=dtype, default=SMALL,
    )  # fmt: skip

    from fsample_cli.exactness import battery, claims, mutants, session, summary
    from fsample_cli.measure import environment, inputs
    from fsample_cli.measure.team import team_of

    tests = battery.choose(test)
    settings: dict[str, Json] = {"level": amount.value, "alpha": alpha, "device": where, "seed": seed}
    if self_test:
        with progress_bar(len(mutants.MUTANTS) + 1, quiet) as (stage, tick):
            results = session.run_self_test(where, workload.dtype, seed, alpha, stage, tick)
        unseen = summary.failures(results)
        settings = {**settings, "mutants": len(mutants.MUTANTS), "unseen": len(unseen)}
        del settings["level"]  # each mutant names its own
        write_report(
            Record("verify", command_line(), environment.collect(), None, tuple(results), settings), target
        )
        if unseen:
            raise typer.Exit(1)
        return
    workload = replace(workload, tp=tp)
    request = session.Request(
        names, workload, batches, draws, temperature, alpha, amount.value, tests, where, seed, tp
    )
    with (
        team_of(launch.place(tp) if tp > 1 else None, where) as team,
        progress_bar(len(session.parts(names, tests)), quiet or team.rank > 0) as (stage, tick),
        interrupts.terminable() if tp == 1 else nullcontext(),
    ):
        done = session.run(request, stage, tick)
    if team.rank > 0:
        return
    results = done.results
    shown = results if details or target.format in ("json", "csv") else summary.condense(results)
    failed = summary.failures(results)
    settings |= {
        "tests": list(tests),
        "draws": done.draws,
        "temperature": temperature,
        "p_values": sum(row.p_value is not None for row in results),
        "statistics": len(results),
        "failed": len(failed),
        "seconds": done.seconds,
        "seconds_outside_tests": done.seconds_outside_tests,
        "false_alarms": f"a right sampler fails this run with probability at most {alpha:g} (Holm)",
        "claims": {name: text for name in names if (text := claims.claim(name)) is not None},
    }
    if details:
        settings["details"] = (
            "Holm: p adjusted over the run, where chi-squared and G count "
            f"{battery.CHI_SQUARED_TAIL:g} times; "
            "sees: the smallest effect seen with power 0.8, of a count the smallest excess; less: the deficit"
        )
    if done.stopped:
        settings["unfinished"] = f"stopped by {done.stopped} during {done.next_up}"
    record = Record(
        "verify", command_line(), environment.collect(), inputs.describe(workload), tuple(shown), settings
    )
    write_report(record, target)
    if done.stopped:
        note(f"verify: unfinished: {settings['unfinished']}; {len(results)} statistics are kept", False)
        raise typer.Exit(interrupts.exit_code(done.stopped))
    if failed:
        raise typer.Exit(1)


def audit(asked: list[str] | None, device: str, tp: int) -> list[str] | None:
    """The names asked for; of those, `all` on one GPU means the whole audit."""
    if asked is None or device != "cuda" or tp > 1:
        return asked
    names = [part.strip() for value in asked for part in value.split(",")]
    return [name for word in names for name in (AUDIT if word == "all" else (word,))]


def expand(names: tuple[str, ...], ours: tuple[str, ...] = OURS) -> tuple[str, ...]:
    """`fused` is all its algorithms; the bare GEMM, which draws nothing, leaves a list that has others."""
    found: list[str] = []
    for name in names:
        found.extend(ours if name == "fused" else (name,))
    drawing = [name for name in found if name not in ("gemm", "fused+store")]
    return tuple(dict.fromkeys(drawing or found))
