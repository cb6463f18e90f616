"""Finding nsys, running it, importing and reading its report: with scripts in its place."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import pytest

from fsample_cli.errors import FsampleError
from fsample_cli.measure.nsys import Nsys, find_nsys, profile_command, read_database, read_report, run_profile


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport os, sys, sqlite3\nargs = sys.argv[1:]\n{body}\n")
    path.chmod(0o755)
    return path


PROFILE_TO_QDSTRM = """
if args[0] == "profile":
    stem = args[args.index("-o") + 1]
    assert os.environ["FSAMPLE_UNDER_NSYS"] == "1"
    open(stem + ".qdstrm", "w").close()
    sys.exit("importer failed")
else:
    c = sqlite3.connect(args[args.index("-o") + 1])
    c.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER)")
    c.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1)")
    c.commit()
"""
IMPORTER = """
if "libs" not in os.environ.get("LD_LIBRARY_PATH", ""):
    sys.exit("error while loading shared libraries: libdw.so.1")
open(args[args.index("-o") + 1], "w").close()
"""


def test_nsys_is_found_on_the_path(tmp_path: Path) -> None:
    nsys = script(tmp_path / "bin" / "nsys", "")
    assert find_nsys(str(nsys.parent), roots=()) == Nsys(nsys, None)
    assert find_nsys(str(tmp_path), roots=()) is None


def test_nsys_is_found_inside_nsight_compute_with_its_importer(tmp_path: Path) -> None:
    folder = tmp_path / "opt" / "nsight-compute" / "2025.3"
    nsys = script(folder / "host" / "target-linux-x64" / "nsys", "")
    importer = script(folder / "host" / "linux-desktop-glibc_2_11_3-x64" / "QdstrmImporter", "")
    assert find_nsys(str(tmp_path), roots=(tmp_path / "opt",)) == Nsys(nsys, importer)
    ncu = script(folder / "ncu", "")
    assert find_nsys(str(ncu.parent), roots=()) == Nsys(nsys, importer)


def test_the_command_traces_cuda_and_nvtx_only() -> None:
    command = profile_command(Nsys(Path("nsys"), None), Path("t"), ["python", "x.py"])
    assert " ".join(command) == "nsys profile -t cuda,nvtx -s none --cpuctxsw=none -f true -o t python x.py"


def test_a_stream_is_imported_and_the_report_read(tmp_path: Path) -> None:
    nsys = Nsys(script(tmp_path / "nsys", PROFILE_TO_QDSTRM), script(tmp_path / "QdstrmImporter", IMPORTER))
    with pytest.raises(FsampleError, match=r"libdw.so.1.*--nsys-libraries"):
        run_profile(nsys, tmp_path / "t", ["true"], None)
    report = run_profile(nsys, tmp_path / "t", ["true"], tmp_path / "libs")
    found = read_report(nsys, report)
    assert (found.kernels, found.ranges) == (1, None)  # no NVTX table: missing, not zero


def test_no_report_and_no_kernel_are_errors(tmp_path: Path) -> None:
    nothing = Nsys(script(tmp_path / "nsys", "sys.exit('no permission')"), None)
    with pytest.raises(FsampleError, match="nsys wrote no report: no permission"):
        run_profile(nothing, tmp_path / "t", ["true"], None)
    empty = Nsys(
        script(
            tmp_path / "nsys2", "sqlite3.connect(args[args.index('-o') + 1]).execute('CREATE TABLE t (a)')"
        ),
        None,
    )
    with pytest.raises(FsampleError, match=r"holds no kernel.*--no-nsys"):
        read_report(empty, tmp_path / "t.nsys-rep")


@pytest.mark.parametrize("suffix", ["", "_V2"])
def test_ranges_are_found_under_any_table_suffix(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "t.sqlite"
    connection = sqlite3.connect(path)
    connection.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL{suffix} (start INTEGER)")
    connection.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL{suffix} VALUES (1), (2)")
    connection.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    connection.execute("INSERT INTO StringIds VALUES (4, 'GEMM')")
    connection.execute(f"CREATE TABLE NVTX_EVENTS{suffix} (eventType INTEGER, text TEXT, textId INTEGER)")
    connection.executemany(
        f"INSERT INTO NVTX_EVENTS{suffix} VALUES (?, ?, ?)",
        [(75, "fsample", None), (33, "race", None), (59, None, 4), (59, None, 4), (59, "sampler", None)],
    )
    connection.commit()
    found = read_database(path, tmp_path / "t.nsys-rep")
    assert found.kernels == 2 and found.domains == ("fsample",)
    assert found.ranges == {"GEMM": 2, "sampler": 1}
