"""A record as a table for people. Never cut: a terminal too narrow wraps the line and loses no digit."""

from __future__ import annotations

import io
import sys
import textwrap

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fsample_cli.records import Record
from fsample_cli.reporters.columns import COLUMNS, footnotes, heading

STYLES = {"pass": "green", "ok": "green", "faster": "green", "fail": "bold red", "regression": "bold red",
          "missing": "yellow", "slower": "yellow", "skipped": "yellow"}  # fmt: skip


def to_table(record: Record) -> str:
    """The table as plain text in UTF-8."""
    return _render(record, Console(file=io.StringIO(), force_terminal=False, color_system=None, width=80))


def to_terminal(record: Record) -> str:
    """The table for stdout: coloured on a terminal or where FORCE_COLOR asks for it, never with NO_COLOR."""
    probe = Console(file=sys.stdout)
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    console = Console(
        file=io.StringIO(),
        force_terminal=probe.is_terminal,
        color_system=probe.color_system if probe.is_terminal else None,  # type: ignore[arg-type]
        no_color=probe.no_color,
        width=80,
    )
    return _render(record, console, ascii_only)


def _render(record: Record, console: Console, ascii_only: bool = False) -> str:
    columns = COLUMNS[record.kind]
    table = Table(box=box.ASCII2 if ascii_only else box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(Text(column.heading), justify="left" if column.left else "right", no_wrap=True)
    for row in record.results:
        cells = [column.value(row) for column in columns]
        table.add_row(*[Text(cell, style=STYLES.get(cell, "")) for cell in cells])
    console.width = max(20, Measurement.get(console, console.options.update(max_width=10_000), table).maximum)
    for line in heading(record):
        _print(console, line)
    console.print(table)
    for line in footnotes(record):
        _print(console, line)
    assert isinstance(console.file, io.StringIO)
    # a table pads its last column; the blanks would make every line wrap on a narrow terminal
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def _print(console: Console, line: str) -> None:
    for part in textwrap.wrap(
        line, 79, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    ):
        console.print(Text(part), soft_wrap=True)
