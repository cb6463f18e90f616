"""Records in, text out. `check_target` before the run, `write_report` after it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fsample_cli.errors import InputError, OutputClosed, UsageError
from fsample_cli.records import Record

SUFFIXES = {".json": "json", ".csv": "csv", ".md": "markdown", ".markdown": "markdown", ".txt": "table"}


@dataclass(frozen=True)
class Target:
    """Where a report goes, and in which form."""

    format: str
    path: Path | None = None  # None is stdout


def check_target(format: str | None, output: Path | None, force: bool) -> Target:
    """The target, found writable now rather than after a long run. Raises UsageError.

    Without a format the suffix of the file decides; without a file it is a table. `-` is stdout.
    """
    if output is None or str(output) == "-":
        return Target(format or "table")
    if output.is_dir():
        _refuse_folder(output, "--output")
    by_suffix = SUFFIXES.get(output.suffix.lower())
    if format is None and by_suffix is None:
        raise UsageError(
            f"--output must end in {', '.join(SUFFIXES)} when --format is not given, got {output}",
            "add --format json, csv, markdown or table",
        )
    if format is not None and by_suffix not in (None, format):
        raise UsageError(f"--format {format} does not fit the suffix of --output {output}", "drop --format")
    check_file(output, force)
    return Target(format or by_suffix or "table", output)


def check_file(output: Path, force: bool, option: str = "--output") -> None:
    """That `output`, given by `option`, can be written, found by trying in its folder. Raises UsageError."""
    if output.is_dir():
        _refuse_folder(output, option)
    if output.exists():
        if not output.is_file():  # /dev/null, a named pipe: nothing is lost by writing
            return
        if not force:
            raise UsageError(f"{option} {output} exists", "add --force to overwrite it, or give another name")
    folder = output.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"{option} needs a folder that exists, got {output}", f"make {folder} first")
    import tempfile

    try:
        # only an attempt tells: permission bits say nothing to root or on a read-only file system
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".fsample-"):
            pass
    except OSError as error:
        raise UsageError(
            f"{option} must be in a folder that can be written, got {output} ({error.strerror})",
            "choose another",
        ) from None


def check_distinct(target: Target, other: Path, option: str) -> None:
    """That the report and `other`, given by `option`, are two files: the later would replace the earlier.

    Raises UsageError. Of /dev/null or a named pipe nothing is lost.
    """
    special = other.exists() and not other.is_file()
    if target.path is not None and not special and target.path.resolve() == other.resolve():
        raise UsageError(
            f"--output and {option} must be different files, got {target.path} for both",
            "give one of them another name",
        )


def _refuse_folder(output: Path, option: str) -> NoReturn:
    raise UsageError(f"{option} must be a file, got the folder {output}", f"try {output / 'result.json'}")


def render(record: Record, format: str) -> str:
    """The record as text that ends in a newline; tables without colour and wide enough for every value."""
    if format == "json":
        from fsample_cli.reporters.to_json import to_json

        return to_json(record)
    if format == "csv":
        from fsample_cli.reporters.to_csv import to_csv

        return to_csv(record)
    if format == "markdown":
        from fsample_cli.reporters.to_markdown import to_markdown

        return to_markdown(record)
    from fsample_cli.reporters.to_table import to_table

    return to_table(record)


def write_report(record: Record, target: Target) -> None:
    """Send the record to the target; a file appears whole or not at all. Raises InputError."""
    if target.path is None:
        if target.format == "table":
            from fsample_cli.reporters.to_table import to_terminal

            write_stdout(to_terminal(record))
        else:
            write_stdout(render(record, target.format))
        return
    write_file(target.path, render(record, target.format), "--output")


def write_file(path: Path, text: str, option: str) -> None:
    """Write the file that an option names: whole or not at all. Raises InputError."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        raise InputError(
            f"{option} {path} cannot be written: {error.strerror}", "free it and run again"
        ) from None


def _replace(path: Path, text: str) -> None:
    import tempfile

    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".fsample-", suffix=path.suffix)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp makes it private
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_stdout(text: str) -> None:
    """Write and flush; a character that stdout cannot carry becomes '?'. Raises OutputClosed, InputError."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        close_stdout()
        raise OutputClosed("stdout was closed") from None
    except OSError as error:  # a full disk behind `> file`
        close_stdout()
        raise InputError(f"stdout cannot be written: {error.strerror}", "free it, run again") from None


def close_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's flush at exit does not fail a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
