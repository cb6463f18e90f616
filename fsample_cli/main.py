"""The `fsample` program: its list of commands, and where a failure becomes a line on stderr."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from fsample_cli import __version__, interrupts
from fsample_cli.commands.bench import bench
from fsample_cli.commands.compare import compare
from fsample_cli.commands.doctor import doctor
from fsample_cli.commands.io_model import io_model
from fsample_cli.commands.presets import presets
from fsample_cli.commands.replay import replay
from fsample_cli.commands.trace import trace
from fsample_cli.commands.tune import tune
from fsample_cli.commands.verify import verify
from fsample_cli.errors import INTERRUPTED, USAGE, FsampleError, OutputClosed

# Base of all usage errors. Older Typer takes it from click, newer ones carry their own: this finds either.
ClickError: type[Any] = typer.BadParameter.__mro__[2]

app = typer.Typer(name="fsample", pretty_exceptions_enable=False, rich_markup_mode=None)
app.command(name="verify")(verify)
app.command(name="bench")(bench)
app.command(name="io-model")(io_model)
app.command(name="trace")(trace)
app.command(name="compare")(compare)
app.command(name="replay")(replay)
app.command(name="tune")(tune)
app.command(name="doctor")(doctor)
app.command(name="presets")(presets)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fsample {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def fsample(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Exact token sampling fused into the LM-head matmul: verify it, time it, and see why."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> NoReturn:
    """Run on `sys.argv` and exit: 0 success, 1 a check failed, 2 the request cannot be met."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the shell, as in `2>&-`; print would fall back on stdout
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    sys.exit(_run())


def _run() -> int:
    try:
        with interrupts.unwrapped():
            code = app(prog_name="fsample", standalone_mode=False)
        sys.stdout.flush()
    except (OutputClosed, BrokenPipeError):
        return _close_stdout()
    except FsampleError as error:
        return _fail(str(error), error.exit_code)
    except ClickError as error:
        return _fail(_usage(error), USAGE)
    except typer.Abort:  # what Typer makes of Ctrl-C
        return INTERRUPTED
    except KeyboardInterrupt as stop:
        return interrupts.exit_code(interrupts.name_of(stop))
    except _out_of_memory() as error:
        text = str(error).partition("\n")[0] or "the host ran out of memory"
        return _fail(f"{text}; choose a smaller --batch or --preset", USAGE)
    return code if isinstance(code, int) else 0


def _usage(error: Any) -> str:
    """The line of an error that Typer found: its own text, the value where that lacks it, where help is."""
    message = error.format_message().replace("Value error, ", "").rstrip(".")
    options = getattr(getattr(error, "param", None), "opts", [])
    typed = next((value for name, value in _typed_options() if name in options), None)
    if typed is not None and typed not in message:
        message = f"{message}, got {typed!r}"
    names = [command.name for command in app.registered_commands]
    chosen = next((word for word in sys.argv[1:] if word in names), None)
    return f"{message}; see fsample {chosen} --help" if chosen else f"{message}; see fsample --help"


def _typed_options() -> list[tuple[str, str]]:
    """(option, value) pairs on the command line, written as `--name=value` or `--name value`."""
    words = sys.argv[1:]
    joined = [(name, value) for name, equals, value in (word.partition("=") for word in words) if equals]
    return joined + list(zip(words, words[1:], strict=False))


def _fail(message: str, code: int) -> int:
    print("fsample:", " ".join(message.split()), file=sys.stderr)
    return code


def _close_stdout() -> int:
    from fsample_cli.reporters import close_stdout

    close_stdout()
    return OutputClosed.exit_code


def _out_of_memory() -> tuple[type[BaseException], ...]:
    """What running out of memory raises here; torch is asked only where a command has imported it."""
    torch = sys.modules.get("torch")
    return (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
