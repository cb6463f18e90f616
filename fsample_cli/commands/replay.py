"""`fsample replay`: which token must come out of one draw, and does the given one agree?"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from fsample_cli.errors import UsageError
from fsample_cli.options import (
    MAX_BATCH,
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
    SeedOption,
    StatesOption,
    TemperatureOption,
    VocabOption,
    check_output,
    check_word,
    command_line,
    preset_option,
)
from fsample_cli.records import Json, Record
from fsample_cli.reporters import write_report
from fsample_cli.request import build_workload, resolve_device
from fsample_cli.workloads import Workload

SMALL = Workload("replay", 512, 64)
MAX_RANDOM_ROWS = 65_536


class NoiseName(str, Enum):
    grouped = "grouped"
    element = "element"
    online = "online"


def _check_input_seed(value: int | None) -> int | None:
    return value if value is None else check_word("--input-seed", value)


def _check_token(token: int | None, vocab: int) -> None:
    if token is not None and not -1 <= token < vocab:
        raise UsageError(
            f"--token must lie in 0..{vocab - 1}, or be -1 for none, got {token}",
            "give the head or the logits that it was drawn from",
        )


def replay(
    position: Annotated[
        int, typer.Option("--position", min=0, max=2**32 - 1, help="Decoding step of the draw.")
    ] = 0,
    row: Annotated[int, typer.Option("--row", min=0, max=MAX_BATCH - 1, help="Row of the batch.")] = 0,
    sample: Annotated[
        int, typer.Option("--sample", min=0, max=2**32 - 1, help="Which of the K samples of the row.")
    ] = 0,
    seed: SeedOption = 0,
    per_row_seed: Annotated[
        bool,
        typer.Option(
            "--per-row-seed", help="The seed is the row's own ([B] seeds): its index is not in the noise."
        ),
    ] = False,
    temperature: TemperatureOption = 1.0,
    noise: Annotated[NoiseName, typer.Option("--noise", help="Algorithm of the draw.")] = NoiseName.grouped,
    token: Annotated[
        int | None,
        typer.Option("--token", help="The id that came out, to be checked.", show_default=False),
    ] = None,
    logits: Annotated[
        Path | None,
        typer.Option("--logits", help="Raw logits [V] or [N, V], .npy or .safetensors.", show_default=False),
    ] = None,
    preset: Annotated[str | None, preset_option("V = 512 and D = 64")] = None,
    vocab: VocabOption = None,
    hidden: HiddenOption = None,
    checkpoint: CheckpointOption = None,
    states: StatesOption = None,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", min=1, help="Rows of the random batch. Default: --row + 1.", show_default=False
        ),
    ] = None,
    device: DeviceOption = Device.cpu,
    dtype: DTypeOption = DType.auto,
    input_seed: Annotated[
        int | None,
        typer.Option(
            "--input-seed",
            help="Seed of random inputs. Default: --seed.",
            callback=_check_input_seed,
            show_default=False,
        ),
    ] = None,
    format: FormatOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Make one draw of fused again on the CPU, in float64: the token, the runner-up, the margin.

    The row comes from --logits, from --states with --checkpoint, or from the random inputs that bench and
    verify use (made on --device; the noise is always rebuilt on the CPU). The budget is what fp32 rounding
    may take of a margin. Units: score and group in powers of 2, logit the same after the temperature, member
    and block as shares of the mass.

    With --token, an id of the vocabulary or -1 for none, the exit code is 0 when it is the one or its margin
    lies within the budget, else 1.
    """
    del quiet  # accepted as everywhere; there is nothing to silence
    target = check_output(format, output, force)
    shape = {"--preset": preset, "--vocab": vocab, "--hidden": hidden, "--checkpoint": checkpoint,
             "--states": states, "--batch": batch}  # fmt: skip
    clash = [name for name, value in shape.items() if value is not None]
    if logits is not None and clash:
        raise UsageError(f"--logits and {clash[0]} exclude each other", "the file alone is the row")
    if batch is not None and batch <= row:
        raise UsageError(f"--batch must be above --row, got {batch} and {row}", f"try --batch {row + 1}")
    if logits is None and states is None and max(row + 1, batch or 0) > MAX_RANDOM_ROWS:
        raise UsageError(
            f"--row of a random batch must lie below {MAX_RANDOM_ROWS}, got {max(row, (batch or 0) - 1)}",
            "give the row itself with --logits",
        )
    where = resolve_device(device)
    workload = None
    if logits is None:
        workload = build_workload(
            preset=preset, vocab=vocab, hidden=hidden, checkpoint=checkpoint, states=states,
            device=where, dtype=dtype, default=SMALL,
        )  # fmt: skip

    from fsample_cli.measure import environment, inputs, replayed

    draw = replayed.Draw(seed, position, row, sample, temperature, noise.value, per_row_seed)
    if workload is None:
        assert logits is not None
        values = replayed.load_logits(logits, row)  # [V]
        _check_token(token, len(values))
        result = replayed.replay_logits(draw, values, token)
    else:
        _check_token(token, workload.vocab)
        state, weight = replayed.make_row(
            workload, where, seed if input_seed is None else input_seed, row, batch
        )
        result = replayed.replay_head(draw, state, weight, workload, token)
    settings: dict[str, Json] = {"seed": seed, "per_row_seed": per_row_seed, "temperature": temperature}
    settings |= {"logits": logits.name} if logits is not None else {"device": where}
    described = None if workload is None else inputs.describe(workload)
    write_report(
        Record("replay", command_line(), environment.collect(), described, (result,), settings), target
    )
    if result.verdict == "wrong":
        raise typer.Exit(1)
