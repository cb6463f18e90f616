"""Draw profiles/terminal.svg, README's picture, from recorded runs (`make image`).

    python profiles/terminal_image.py [RECORD.json ...]

Without names: the newest records that WANTED names. Nothing is drawn by hand: text and colours come from the
reporter that the commands themselves use.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import tables
from rich.console import Console
from rich.text import Text

from fsample_cli.exactness.summary import condense
from fsample_cli.records import Record
from fsample_cli.reporters.to_table import to_terminal

OUTPUT = tables.PROFILES / "terminal.svg"
LINES = 44  # of one run; a longer one is cut, with a line that says so
WANTED = (  # of each line the first that exists, as (kind, folder, end of the name)
    (("verify", "h200", "verify-fused-grouped"), ("verify", "cpu", "verify-rows")),
    (("bench", "h200", "bench-gpt-oss-120b"), ("bench", "cpu", "bench-cpu-small")),
)


def main() -> int:
    records = tables.load()
    os.environ["FORCE_COLOR"] = "1"
    os.environ.pop("NO_COLOR", None)
    console = Console(record=True, width=84, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for file in [Path(name).resolve() for name in sys.argv[1:]] or chosen(records):
        show(console, records[file])
    # no web font: a page's policy would not load it, and the image stays one file
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="fsample"), flags=re.S)
    drawn = drawn.replace("<svg ", '<svg xml:space="preserve" ', 1)  # some viewers drop leading blanks
    OUTPUT.write_text(drawn, encoding="utf-8")
    print(f"drew {OUTPUT.relative_to(tables.PROFILES.parent)}")
    return 0


def chosen(records: dict[Path, Record]) -> list[Path]:
    found = [[tables.newest(records, *wanted) for wanted in line] for line in WANTED]
    return [next(file for file in line if file is not None) for line in found]


def show(console: Console, record: Record) -> None:
    if record.kind == "verify":
        record = replace(record, results=tuple(condense(record.results)))
    lines = to_terminal(record).splitlines()
    console.print(Text(f"$ {tables.typed(record)}", style="bold"))
    for line in lines[:LINES]:
        console.print(Text.from_ansi(line))
    if len(lines) > LINES:
        console.print(Text(f"... {len(lines) - LINES} more lines", style="dim"))


if __name__ == "__main__":
    sys.exit(main())
