"""Nsight Systems around a run: finding it, its command line, the import step it may need, what the report
holds.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsample_cli.errors import FsampleError

DOMAIN_EVENT = 75  # NVTX_EVENTS.eventType of a domain's name
PUSH_POP_EVENT = 59  # ... of a finished push/pop range
UNDER_NSYS = "FSAMPLE_UNDER_NSYS"  # tells the child, whatever variables this nsys sets itself
LIMIT_S = 240.0  # of a profiled run, which takes seconds once its kernels are compiled
END_S = 20.0  # of nsys after it was told to end
INSTALL = "install Nsight Systems (nsys), or trace with --no-nsys"


@dataclass(frozen=True)
class Nsys:
    executable: Path
    importer: Path | None  # QdstrmImporter beside it, where nsys is the one inside Nsight Compute


@dataclass(frozen=True)
class Report:
    path: Path
    kernels: int
    ranges: Mapping[str, int] | None  # finished push/pop ranges by message; None: no NVTX data in the report
    domains: tuple[str, ...]


def find_nsys(
    search_path: str | None = None, roots: Sequence[Path] = (Path("/opt/nvidia"), Path("/usr/local"))
) -> Nsys | None:
    """`nsys` on the PATH, in an Nsight Systems folder, or inside Nsight Compute's; else None."""
    on_path = shutil.which("nsys", path=search_path)
    if on_path is not None:
        return Nsys(Path(on_path), _importer(Path(on_path).resolve().parent.parent))
    compute = shutil.which("ncu", path=search_path)
    folders = [] if compute is None else [Path(compute).resolve().parent]
    for root in roots:
        folders += [*root.glob("nsight-systems/*"), *root.glob("nsight-compute/*")]
        folders += [*root.glob("cuda*/nsight-systems*"), *root.glob("cuda*/nsight-compute*")]
    for folder in sorted(folders, reverse=True):  # newest version first
        for inner in ("bin/nsys", "host/target-linux-x64/nsys", "target-linux-x64/nsys"):
            if (folder / inner).is_file():
                return Nsys(folder / inner, _importer(folder))
    return None


def _importer(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("host*linux*/QdstrmImporter"))), None) or next(
        iter(sorted(folder.glob("host/linux-desktop-*/QdstrmImporter"))), None
    )


def profile_command(nsys: Nsys, stem: Path, child: Sequence[str]) -> list[str]:
    """The nsys call: CUDA and NVTX only, no CPU sampling, `stem`.nsys-rep (or .qdstrm) overwritten.

    It ends with the child, whatever the child leaves running.
    """
    options = ["-t", "cuda,nvtx", "-s", "none", "--cpuctxsw=none", "--wait=primary"]
    options += ["-f", "true", "-o", str(stem)]
    return [str(nsys.executable), "profile", *options, *child]


def run_profile(nsys: Nsys, stem: Path, child: Sequence[str], libraries: Path | None) -> Path:
    """Profile `child`; returns the .nsys-rep. Raises FsampleError with the next step when none comes out, or
    not within LIMIT_S.

    nsys inside Nsight Compute's folder ends with an error of its own import step and leaves a .qdstrm, which
    QdstrmImporter turns into a report once libdw.so.1 is there: `libraries` is a folder that holds it.
    """
    report, stream = stem.with_suffix(".nsys-rep"), stem.with_suffix(".qdstrm")
    for old in (report, stream):
        old.unlink(missing_ok=True)
    command = profile_command(nsys, stem, child)
    inner = {**os.environ, UNDER_NSYS: "1"}
    done = _run_within(command, inner)
    if report.is_file():
        return report
    if not stream.is_file():
        raise FsampleError(f"trace: nsys wrote no report: {_last_line(done)}", INSTALL)
    if nsys.importer is None:
        raise FsampleError(f"trace: {stream} needs QdstrmImporter, which is not beside nsys", INSTALL)
    environment = dict(os.environ)
    if libraries is not None:
        known = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = f"{libraries}:{known}" if known else str(libraries)
    command = [str(nsys.importer), "-i", str(stream), "-o", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if not report.is_file():
        raise FsampleError(
            f"trace: QdstrmImporter failed: {_last_line(done)}",
            "where libdw.so.1 is missing, unpack libdw1 and its needs and use --nsys-libraries DIR",
        )
    return report


def _run_within(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run it in a process group of its own, of which nothing is left after an error."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(environment),
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise FsampleError(
            f"trace: nsys did not end within {LIMIT_S:g} s", "name fewer samplers, or use --no-nsys"
        ) from error
    finally:
        if process.poll() is None:
            _end_group(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _end_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def read_report(nsys: Nsys, report: Path) -> Report:
    """Export to SQLite and count. Raises FsampleError when the export fails or the report holds no kernel."""
    database = report.with_suffix(".sqlite")
    command = [str(nsys.executable), "export", "-t", "sqlite", "-f", "true", "-o", str(database), str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not database.is_file():
        raise FsampleError(
            f"trace: nsys export failed: {_last_line(done)}", f"open {report} in Nsight Systems"
        )
    found = read_database(database, report)
    if found.kernels == 0:
        raise FsampleError(
            f"trace: {report} holds no kernel",
            "another profiler may hold CUPTI; run without it, or --no-nsys",
        )
    return found


def read_database(database: Path, report: Path) -> Report:
    """Count kernels and NVTX ranges. Tables are found by the start of their names: versions add suffixes."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        kernels = sum(
            connection.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]
            for table in tables
            if table.startswith("CUPTI_ACTIVITY_KIND_KERNEL")
        )
        strings: dict[int, str] = {}
        for table in tables:
            if table.startswith("StringIds"):
                strings.update(connection.execute(f'SELECT id, value FROM "{table}"').fetchall())
        events = [table for table in tables if table.startswith("NVTX_EVENTS")]
        ranges: dict[str, int] = {}
        domains: list[str] = []
        for table in events:
            columns = {row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')}
            identifier = "textId" if "textId" in columns else "NULL"
            query = f'SELECT eventType, text, {identifier} FROM "{table}"'
            for kind, text, text_id in connection.execute(query):
                message = text if text is not None else strings.get(text_id, "")
                if kind == DOMAIN_EVENT:
                    domains.append(message)
                elif kind == PUSH_POP_EVENT:
                    ranges[message] = ranges.get(message, 0) + 1
        return Report(report, kernels, ranges if events else None, tuple(domains))
    finally:
        connection.close()


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {done.returncode}, no output"
