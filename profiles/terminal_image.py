"""Draw profiles/terminal.svg, README's picture, from recorded runs (`make image`).

    python profiles/terminal_image.py [RECORD.json ...]

Without names: the newest `verify` and `bench` records, of the H200 where there are some. Nothing is drawn by
hand: the text and its colours come from the reporter that the commands themselves use.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import tables
from rich.console import Console
from rich.text import Text

from fsample_cli.records import Record
from fsample_cli.reporters.to_table import to_terminal

OUTPUT = tables.PROFILES / "terminal.svg"
LINES = 44  # of one run; a longer one is cut, with a line that says so
WANTED = (("verify", "rows"), ("bench", ""))


def main() -> int:
    records = tables.load()
    os.environ["FORCE_COLOR"] = "1"
    os.environ.pop("NO_COLOR", None)
    console = Console(record=True, width=84, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for file in [Path(name).resolve() for name in sys.argv[1:]] or chosen(records):
        show(console, records[file])
    # no web font: a page's policy would not load it, and the image stays one file
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="fsample"), flags=re.S)
    OUTPUT.write_text(drawn, encoding="utf-8")
    print(f"drew {OUTPUT.relative_to(tables.PROFILES.parent)}")
    return 0


def chosen(records: dict[Path, Record]) -> list[Path]:
    files = []
    for kind, name in WANTED:
        file = tables.newest(records, kind, "h200", name) or tables.newest(records, kind, "cpu", name)
        if file is not None:
            files.append(file)
    return files


def show(console: Console, record: Record) -> None:
    lines = to_terminal(record).splitlines()
    console.print(Text(f"$ {tables.typed(record)}", style="bold"))
    for line in lines[:LINES]:
        console.print(Text.from_ansi(line))
    if len(lines) > LINES:
        console.print(Text(f"... {len(lines) - LINES} more lines", style="dim"))


if __name__ == "__main__":
    sys.exit(main())
