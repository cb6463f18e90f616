"""Options that commands share, and their checks. Every error names the option, the rule and the value."""

from __future__ import annotations

import math
import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from fsample_cli.errors import UsageError
from fsample_cli.records import without_folders
from fsample_cli.reporters import Target, check_target
from fsample_cli.workloads import PRESETS, find_preset

MAX_BATCH = 2**24  # rows that the noise's counter can tell apart
MAX_SEED = 2**64
MAX_RANKS = 1024
# A temperature is an fp32 number, and the library draws greedily below its own least one, which is
# `fsample_kernels.types.MIN_TEMPERATURE`: imported here it would bring torch to --help.
MIN_TEMPERATURE = 2.0**-64
MAX_TEMPERATURE = (2 - 2.0**-23) * 2.0**127


class Device(str, Enum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class DType(str, Enum):
    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Format(str, Enum):
    table = "table"
    json = "json"
    csv = "csv"
    markdown = "markdown"


def parse_batches(text: str) -> tuple[int, ...]:
    """Batch sizes, rising: `1..256` is the powers of two from 1 to 256; `1,3,7`, `64`, `1..8,12` work too.

    Raises UsageError.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        if dots:
            low, high = _batch(first, text), _batch(last, text)
            if low > high:
                raise UsageError(
                    f"--batch ranges must count up, got {part.strip()!r}", f"write it as {high}..{low}"
                )
            if low & (low - 1) or high & (high - 1):
                raise UsageError(
                    f"--batch ranges must start and end at a power of two, got {part.strip()!r}",
                    "list other sizes instead, as in 1..64,100",
                )
            found.update(2**k for k in range(low.bit_length() - 1, high.bit_length()))
        else:
            found.add(_batch(first, text))
    return tuple(sorted(found))


def _batch(digits: str, text: str) -> int:
    # int() would also take "1_000", " 7" and digits of other scripts
    if not (digits.isascii() and digits.isdigit()):
        raise UsageError(
            f"--batch must be whole numbers as in 1..256, 1,3,7 or 64, got {text!r}",
            "1..256 means 1, 2, 4, ..., 256",
        )
    value = int(digits) if len(digits) < 20 else MAX_BATCH + 1
    if not 1 <= value <= MAX_BATCH:
        raise UsageError(f"--batch sizes must lie in 1..{MAX_BATCH}, got {digits}", "try --batch 1..256")
    return value


def _check_batches(text: str) -> str:
    parse_batches(text)
    return text


def _check_temperature(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(
            f"--temperature must be a finite number, 0 or above, got {value}",
            "0 is greedy, 1 the model's own",
        )
    if 0 < value < MIN_TEMPERATURE:
        raise UsageError(
            f"--temperature above 0 must be 2^-64 ({MIN_TEMPERATURE:.1e}) or more, below which every draw is "
            f"greedy, got {value}",
            "0 is greedy",
        )
    if value > MAX_TEMPERATURE:
        raise UsageError(
            f"--temperature must be finite in fp32, {MAX_TEMPERATURE:.1e} or less, got {value}",
            "at 1e6 the draw is all but flat",
        )
    return value


def _check_seed(value: int) -> int:
    return check_word("--seed", value)


def check_word(option: str, value: int) -> int:
    """The value of an option that is a seed. Raises UsageError."""
    if not 0 <= value < MAX_SEED:
        raise UsageError(f"{option} must lie in 0..2^64-1, got {value}", f"try {option} 0")
    return value


def _check_vocab(value: int | None) -> int | None:
    return _check_size("--vocab", value, "151936")


def _check_hidden(value: int | None) -> int | None:
    return _check_size("--hidden", value, "4096")


def _check_size(option: str, value: int | None, example: str) -> int | None:
    if value is not None and not 1 <= value < 2**31:
        raise UsageError(f"{option} must lie in 1..2^31-1, got {value}", f"try {option} {example}")
    return value


def _complete_preset(incomplete: str) -> list[str]:
    return [name for name in PRESETS if name.startswith(incomplete)]


def _check_preset(name: str | None) -> str | None:
    return name if name is None else find_preset(name).name


def preset_option(default: str) -> Any:
    """--preset of a command that takes the shape `default` where no option names one."""
    return typer.Option(
        "--preset",
        help=f"Named model shape; `fsample presets` lists them. Without a shape: {default}.",
        autocompletion=_complete_preset,
        callback=_check_preset,
        show_default=False,
    )


VocabOption = Annotated[
    int | None,
    typer.Option(
        "--vocab", help="Vocabulary size V; goes with --hidden.", callback=_check_vocab, show_default=False
    ),
]
HiddenOption = Annotated[
    int | None,
    typer.Option(
        "--hidden", help="Hidden size D; goes with --vocab.", callback=_check_hidden, show_default=False
    ),
]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        help="Hugging Face folder or .safetensors file; only its LM head is read.",
        show_default=False,
    ),
]
StatesOption = Annotated[
    Path | None,
    typer.Option("--states", help="Real hidden states [N, D], .safetensors or .npy.", show_default=False),
]
DeviceOption = Annotated[Device, typer.Option("--device", help="auto is the GPU when there is one.")]
DTypeOption = Annotated[
    DType,
    typer.Option("--dtype", help="auto is bf16 (or the checkpoint's own) on a GPU and fp32 on the CPU."),
]
SeedOption = Annotated[
    int, typer.Option("--seed", help="64-bit seed of inputs and draws.", callback=_check_seed)
]
FormatOption = Annotated[
    Format | None,
    typer.Option("--format", help="Default: by the suffix of --output, else table.", show_default=False),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write the result here instead of stdout.", show_default=False),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite --output.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr.")]
BatchOption = Annotated[
    str,
    typer.Option(
        "--batch",
        help="Batch sizes: 1..256 is 1, 2, 4, ..., 256; 1,3,7 and 64 work too.",
        callback=_check_batches,
    ),
]
SamplerOption = Annotated[
    list[str] | None,
    typer.Option("--sampler", help="Repeat or separate by commas; also module:function.", show_default=False),
]
TpOption = Annotated[
    int,
    typer.Option(
        "--tp",
        min=1,
        max=MAX_RANKS,
        help="Tensor-parallel ranks that share the vocabulary, one process each.",
    ),
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", help="0 is greedy.", callback=_check_temperature)
]


def check_output(format: Format | None, output: Path | None, force: bool) -> Target:
    """Where the result goes, found usable before the run. Raises UsageError."""
    return check_target(None if format is None else format.value, output, force)


def typed(context: typer.Context, parameter: str) -> bool:
    """Whether the command line names an option that has a default."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def command_line() -> str:
    """The command as typed, for records: `fsample bench --batch 1..256`; of absolute paths only the name."""
    return shlex.join(["fsample", *[without_folders(word) for word in sys.argv[1:]]])


def note(text: str, quiet: bool) -> None:
    """A line for the user on stderr; stdout carries results only."""
    if not quiet:
        print(f"fsample: {text}", file=sys.stderr)
