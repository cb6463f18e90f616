"""A record as a markdown table, for READMEs and notes."""

from __future__ import annotations

from fsample_cli.records import Record
from fsample_cli.reporters.columns import COLUMNS, footnotes, heading


def to_markdown(record: Record) -> str:
    """The table's columns as a pipe table, its heading above and its notes below as paragraphs."""
    columns = COLUMNS[record.kind]
    lines = [
        _row([column.heading for column in columns]),
        _row(["---" if column.left else "---:" for column in columns]),
        *(_row([column.value(row) for column in columns]) for row in record.results),
    ]
    command = [f"`{record.command}`"] if record.command else []
    parts = [*command, *heading(record), "\n".join(lines), *footnotes(record)]
    return "\n\n".join(parts) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
