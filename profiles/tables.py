"""Fill the tables in README.md and profiles/README.md from the records beside this file (`make tables`).

A page marks a place, and what stands between the marks is replaced:

    <!-- record bench h200 qwen3-8b -->  ...  <!-- end -->    median times, one column a sampler
    <!-- features h200 qwen3-8b -->  ...  <!-- end -->        bench --features: a time, then ratios to it
    <!-- audit h200 verify-all -->  ...  <!-- end -->         samplers by tests, and how each failed
    <!-- output verify cpu real-model -->  ...  <!-- end -->  what the command printed, with its command line
    <!-- run presets -->  ...  <!-- end -->                   what a command prints now, without measuring
    <!-- records -->  ...  <!-- end -->                       every record: file, machine, commit, command

The words are the kind of record, its folder, and the end of the file's name. Of several records that fit the
newest is shown; without one the place stays empty. An audit may be several runs: of all records whose names
hold the word, each test of a sampler is shown at every level that ran, from that level's newest commit: a
level sees what the ones below it miss, so its failures stay until it runs again. No figure is typed by hand.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from fsample_cli.exactness import tails
from fsample_cli.exactness.summary import condense
from fsample_cli.records import Record
from fsample_cli.reporters import render
from fsample_cli.reporters.columns import microseconds, ratio, sampler
from fsample_cli.reporters.verify_matrix import verify_matrix
from fsample_cli.results import BenchResult, VerifyResult

PROFILES = Path(__file__).resolve().parent
PAGES = (PROFILES.parent / "README.md", PROFILES / "README.md")
PLACE = re.compile(
    r"(?P<begin><!-- (?P<what>records|record|features|audit|output|run)(?P<words>[^>]*?) -->\n).*?"
    r"(?P<end><!-- end -->)",
    re.S,
)
ORDER = ("gemm", "fused", "multinomial", "multinomial-eager", "race", "fi1", "fi2")
OURS = ("fused", "grouped")
NAMES = {"gemm": "GEMM alone", "multinomial-eager": "multinomial (eager)", "fi1": "FI1", "fi2": "FI2"}


def main() -> int:
    records = load()
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = PLACE.sub(partial(fill, records=records, page=page), before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"filled {page.relative_to(PROFILES.parent)}")
    return 0


def load() -> dict[Path, Record]:
    """Every record under profiles/, the newest first. A file that is no record is an error, not a gap."""
    found = {
        file: Record.from_dict(json.loads(file.read_text(encoding="utf-8")), str(file.relative_to(PROFILES)))
        for folder in sorted(PROFILES.iterdir())
        if folder.is_dir()
        for file in sorted(folder.glob("*.json"))
    }
    return dict(sorted(found.items(), key=lambda item: _date(item[1]), reverse=True))


def fill(place: re.Match[str], records: dict[Path, Record], page: Path) -> str:
    words = place["words"].split()
    if place["what"] == "records":
        text = listing(records)
    elif place["what"] == "run":
        text = run(words)
    elif place["what"] == "audit":
        text = audit(records, *words, page=page)
        if not text:
            print(f"no record for: audit {' '.join(words)}", file=sys.stderr)
            return f"{place['begin']}{place['end']}"
    else:
        file = newest(records, *(["bench", *words] if place["what"] == "features" else words))
        if file is None:
            print(f"no record for: {' '.join(words)}", file=sys.stderr)
            return f"{place['begin']}{place['end']}"
        elif place["what"] == "output":
            text = output(records[file])
        else:
            table = features if place["what"] == "features" else times
            text = table(records[file]) + f"\n{caption(records[file], file, page)}\n"
    return f"{place['begin']}\n{text}\n{place['end']}"


def newest(records: dict[Path, Record], kind: str, folder: str, name: str = "") -> Path | None:
    for file, record in records.items():
        if record.kind == kind and file.parent.name == folder and file.stem.endswith(name):
            return file
    return None


def audit(records: dict[Path, Record], folder: str, word: str, *, page: Path) -> str:
    """Samplers by tests, then a line for each failure, then where it comes from; empty without a record."""
    found = {
        file: record
        for file, record in records.items()
        if record.kind == "verify" and file.parent.name == folder and word in file.stem
    }
    if not found:
        return ""
    newest: dict[tuple[str, str, object], str] = {}
    for record in found.values():
        for result in _tested(record):
            newest.setdefault((sampler(result), result.test, _level(record)), _commit(record))
    found = dict(sorted(found.items(), key=lambda item: (*_breadth(item[1]), item[0])))
    shown = {
        file: [
            result
            for result in _tested(record)
            if newest[sampler(result), result.test, _level(record)] == _commit(record)
        ]
        for file, record in found.items()
    }
    results = [result for some in shown.values() for result in some]
    head, *body = verify_matrix(results)
    rows = [head, ["---"] * len(head), *body]
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    failed = [result for result in condense(results) if result.verdict == "fail"]
    if failed:
        lines.append("")
    lines += [
        f"- {sampler(result)}, {result.test}: {result.case}" + (f" ({result.note})" if result.note else "")
        for result in failed
    ]
    machine = next(iter(found.values())).environment
    assert machine is not None
    runs = "; ".join(
        f"[{file.stem.rpartition(word)[2].strip('-') or 'record'}]({file.relative_to(page.parent)}): "
        f"commit {_commit(record) or 'unknown'}, " + _drawn(record)
        for file, record in found.items()
        if shown[file]
    )
    lines += [
        "",
        f"– not applicable. {machine.gpu or machine.cpu}; torch {machine.torch}, triton {machine.triton}. "
        "Each run is judged by itself; each test is shown at every level that ran, from that level's newest "
        f"commit. {runs}.",
    ]
    return "\n".join(lines) + "\n"


def _tested(record: Record) -> list[VerifyResult]:
    return [result for result in record.results if isinstance(result, VerifyResult)]


def _level(record: Record) -> object:
    return record.settings.get("level")


def _breadth(record: Record) -> tuple[bool, int]:
    """What sorts runs with ours first, and those of many samplers."""
    names = {sampler(result) for result in _tested(record)}
    return not any(name.startswith("fused") for name in names), -len(names)


def _drawn(record: Record) -> str:
    """How much one run of an audit drew of a sampler, and the gap up to which it would miss a whole tail."""
    draws: dict[str, int] = {}
    gaps: dict[str, float] = {}
    for result in record.results:
        assert isinstance(result, VerifyResult)
        name = sampler(result)
        # every statistic of one set of draws counts them once
        if result.test in ("tails", "zero-mass") or result.case.endswith("chi-squared"):
            draws[name] = draws.get(name, 0) + result.draws
        if result.test == "tails" and result.note.endswith((tails.REACHED, tails.MISSING_SHOWS)):
            gaps[name] = max(gaps.get(name, 0.0), float(result.case.split()[1]))
    settings = record.settings
    parts = [
        f"level {settings.get('level')}, alpha {settings.get('alpha')}",
        f"at most {max(draws.values(), default=0):,} draws a sampler in goodness, tails and zero-mass",
    ]
    if gaps:
        deepest = max(gaps.values())
        parts.append(f"a tail that is missing shows up to gap {deepest:g}")
        parts += [
            f"of {name} up to {gap:g} ({draws[name]:,} draws)" for name, gap in gaps.items() if gap < deepest
        ]
    if "seconds" in settings:
        parts.append(f"{settings['seconds']:,.0f} s")
    if "unfinished" in settings:
        parts.append(f"unfinished: {settings['unfinished']}")
    return ", ".join(parts)


def output(record: Record) -> str:
    """The command line and the table it prints."""
    if record.kind == "verify":
        record = replace(record, results=tuple(condense(record.results)))
    return f"```console\n$ {typed(record)}\n{render(record, 'table')}```\n"


def run(words: list[str]) -> str:
    command = [sys.executable, "-m", "fsample_cli", *words]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout
    return f"```console\n$ fsample {' '.join(words)}\n{shown}```\n"


def typed(record: Record) -> str:
    """The command without where it wrote its record: what a reader types to see the same."""
    return re.sub(r" (--output|-o|--format)[ =]\S+| (--quiet|-q|--force)\b", "", record.command)


def times(record: Record) -> str:
    """Median microseconds, a row a batch and a column a sampler; then ours against the GEMM and the rest."""
    rows: dict[int, dict[str, BenchResult]] = {}
    for result in record.results:
        rows.setdefault(result.batch, {}).setdefault(result.sampler, result)
    ran = {name for row in rows.values() for name, result in row.items() if result.median_us is not None}
    shown = [name for name in ORDER if name in ran]
    baseline = str(record.settings.get("baseline"))
    heads = ["B", *(f"**{name}**" if name == "fused" else NAMES.get(name, name) for name in shown)]
    heads += [
        "fused / GEMM",
        *([f"speed-up over {NAMES.get(baseline, baseline)}"] if baseline in ran else []),
    ]
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join(["---:"] * len(heads)) + " |"]
    for batch, row in rows.items():
        fused = row.get("fused")
        cells = [str(batch)]
        for name in shown:
            median = microseconds(row[name].median_us if name in row else None)
            cells.append(f"**{median}**" if name == "fused" else median)
        cells.append(ratio(fused.ratio_to_gemm if fused else None))
        if baseline in ran:
            cells.append(ratio(fused.speedup if fused else None))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def features(record: Record) -> str:
    """The plain call's median microseconds, a row a batch; then each option's median over it."""
    rows: dict[int, dict[str, BenchResult]] = {}
    for result in record.results:
        name = result.sampler if result.algorithm in (None, "grouped") else str(result.algorithm)
        rows.setdefault(result.batch, {})[name] = result
    shown = [name for name in next(iter(rows.values())) if name not in ("fused", "gemm")]
    heads = ["B", "**fused**", *(name.removeprefix("fused") for name in shown)]
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join(["---:"] * len(heads)) + " |"]
    for batch, row in rows.items():
        plain = row["fused"].median_us
        costs = [row[name].median_us for name in shown]
        cells = [ratio(cost / plain if cost is not None and plain else None) for cost in costs]
        lines.append("| " + " | ".join([str(batch), f"**{microseconds(plain)}**", *cells]) + " |")
    return "\n".join(lines) + "\n"


def caption(record: Record, file: Path, page: Path) -> str:
    work, machine, settings = record.workload, record.environment, record.settings
    assert work is not None and machine is not None
    iterations = max(result.iterations for result in record.results)
    where = file.relative_to(page.parent)
    return (
        f"Median µs of {iterations}; {work.preset}, V = {work.vocab:,}, D = {work.hidden:,}, {work.dtype}; "
        f"{machine.gpu or f'{machine.cpu}, {machine.cpu_threads} threads'}; "
        f"torch {machine.torch}, triton {machine.triton}; "
        f"timer {settings.get('timer')}, cold cache; {spread(record)}; "
        f"commit {machine.short_commit or 'unknown'}, {_date(record)[:10]}; [record]({where})."
    )


def spread(record: Record) -> str:
    """How far the 10th and 90th percentiles lie from the medians, and what slowed the machine down."""
    timed = [row for row in record.results if isinstance(row, BenchResult) and row.median_us is not None]
    compared = [row for row in timed if row.sampler == "gemm" or (row.sampler, row.algorithm) == OURS]
    near, far = (max(map(_distance, rows), default=0.0) for rows in (compared, timed))
    notes = sorted({row.note for row in timed if row.throttled})
    text = f"p10..p90 within {near:.1%} of it for fused and GEMM, {far:.1%} for all"
    return "; ".join([text, *notes])


def _distance(row: BenchResult) -> float:
    assert row.median_us is not None and row.p10_us is not None and row.p90_us is not None
    return max(row.p90_us, 2 * row.median_us - row.p10_us) / row.median_us - 1


def listing(records: dict[Path, Record]) -> str:
    lines = ["| file | machine | commit | date | command |", "| --- | --- | --- | --- | --- |"]
    for file, record in records.items():
        machine = record.environment
        name = "" if machine is None else machine.gpu or machine.cpu or ""
        commit = "" if machine is None else machine.short_commit
        where = file.relative_to(PROFILES)
        lines.append(
            f"| [{where}]({where}) | {name} | {commit} | {_date(record)[:10]} | `{record.command}` |"
        )
    return "\n".join(lines) + "\n"


def _commit(record: Record) -> str:
    return (record.environment.short_commit if record.environment else None) or ""


def _date(record: Record) -> str:
    return (record.environment.date if record.environment else None) or ""


if __name__ == "__main__":
    sys.exit(main())
