"""A record as a markdown table, for READMEs and notes."""

from __future__ import annotations

from fsample_cli.records import Record
from fsample_cli.reporters.columns import columns_of, footnotes, heading
from fsample_cli.reporters.verify_matrix import verify_matrix


def to_markdown(record: Record) -> str:
    """The table's columns as a pipe table, its heading above and its notes below as paragraphs."""
    columns = columns_of(record)
    lines = [
        _row([column.heading for column in columns]),
        _row(["---" if column.left else "---:" for column in columns]),
        *(_row([column.value(row) for column in columns]) for row in record.results),
    ]
    command = [f"`{record.command}`"] if record.command else []
    matrix = _matrix(record) if record.kind == "verify" else []
    parts = [*command, *heading(record), *matrix, "\n".join(lines), *footnotes(record)]
    return "\n\n".join(parts) + "\n"


def _matrix(record: Record) -> list[str]:
    """An audit of several samplers and tests starts with who passed what."""
    head, *body = verify_matrix(record.results)
    if len(body) < 2 or len(head) < 3:
        return []
    return ["\n".join([_row(head), _row(["---"] * len(head)), *(_row(cells) for cells in body)])]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
