"""A record as a table for people. Never cut: a terminal too narrow wraps the line and loses no digit."""

from __future__ import annotations

import io
import sys
import textwrap

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsample_cli.records import Record
from fsample_cli.reporters.columns import Column, columns_of, footnotes, heading

STYLES = {"pass": "green", "ok": "green", "faster": "green", "fail": "bold red", "regression": "bold red",
          "missing": "yellow", "slower": "yellow", "skipped": "yellow"}  # fmt: skip

GAP = 2  # blanks between columns
LONGEST_WORD = 43  # of a text column; a longer one, such as a call or a path, folds


def to_table(record: Record) -> str:
    """The table as plain text in UTF-8."""
    return _render(record, Console(file=io.StringIO(), force_terminal=False, color_system=None, width=80), 80)


def to_terminal(record: Record) -> str:
    """The table for stdout: coloured on a terminal or where FORCE_COLOR asks for it, never with NO_COLOR."""
    probe = Console(file=sys.stdout)
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    coloured = probe.is_terminal and not probe.no_color  # NO_COLOR takes bold away as well
    console = Console(
        file=io.StringIO(),
        force_terminal=coloured,
        color_system=probe.color_system if coloured else None,  # type: ignore[arg-type]
        width=80,
    )
    return _render(record, console, probe.width if sys.stdout.isatty() else 80, ascii_only)


def _render(record: Record, console: Console, limit: int, ascii_only: bool = False) -> str:
    columns = columns_of(record)
    cells = [[column.value(row) for column in columns] for row in record.results]
    widths = _widths(columns, cells, limit)
    table = Table(box=box.ASCII2 if ascii_only else box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.padding = (0, 1, 0, 0)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(
            Text(column.heading), justify="left" if column.left else "right", width=width, overflow="fold"
        )
    for row in cells:
        table.add_row(*[Text(cell, style=STYLES.get(cell, "")) for cell in row])
    console.width = sum(widths) + GAP * len(widths)
    for line in heading(record):
        _print(console, line)
    console.print(table)
    for line in footnotes(record):
        _print(console, line)
    assert isinstance(console.file, io.StringIO)
    # a table pads its last column; the blanks would make every line wrap on a narrow terminal
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def _widths(columns: tuple[Column, ...], cells: list[list[str]], limit: int) -> list[int]:
    """Width of each column, at most `limit` in all if possible; Rich would cut the last.

    Only a text column gives way, never below its longest word: words wrap, numbers stay whole.
    """
    texts = [[column.heading, *(row[place] for row in cells)] for place, column in enumerate(columns)]
    widths = [max(map(cell_len, column)) for column in texts]
    least = [
        min(LONGEST_WORD, max((cell_len(word) for text in some for word in text.split()), default=0))
        if column.left
        else width
        for column, some, width in zip(columns, texts, widths, strict=True)
    ]
    while sum(widths) + GAP * (len(widths) - 1) > limit:
        spare = [place for place, width in enumerate(widths) if width > least[place]]
        if not spare:
            break
        widths[max(spare, key=lambda place: widths[place])] -= 1
    return widths


def _print(console: Console, line: str) -> None:
    for part in textwrap.wrap(
        line, 79, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    ):
        console.print(Text(part), soft_wrap=True)
