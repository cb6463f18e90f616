"""Finding nsys, running it, importing and reading its report: with scripts in its place."""

from __future__ import annotations

import sqlite3
import sys
import time
from pathlib import Path

import pytest

from fsample_cli.commands import trace
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
    assert " ".join(command) == (
        "nsys profile -t cuda,nvtx -s none --cpuctxsw=none --wait=primary -f true -o t python x.py"
    )


def test_a_stream_is_imported_and_the_report_read(tmp_path: Path) -> None:
    nsys = Nsys(script(tmp_path / "nsys", PROFILE_TO_QDSTRM), script(tmp_path / "QdstrmImporter", IMPORTER))
    with pytest.raises(FsampleError, match=r"libdw.so.1.*--nsys-libraries"):
        run_profile(nsys, tmp_path / "t", ["true"], None)
    report = run_profile(nsys, tmp_path / "t", ["true"], tmp_path / "libs")
    found = read_report(nsys, report)
    assert (found.kernels, found.ranges) == (1, None)  # no NVTX table: missing, not zero


SLOW = """
import signal, subprocess, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with open(args[args.index("-o") + 1] + ".pids", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
if "deaf" in args:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""


@pytest.mark.parametrize("child", ["true", "deaf"])
def test_a_profile_that_does_not_end_is_an_error_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: str
) -> None:
    monkeypatch.setattr("fsample_cli.measure.nsys.LIMIT_S", 1.5)
    monkeypatch.setattr("fsample_cli.measure.nsys.END_S", 0.5)
    slow = Nsys(script(tmp_path / "nsys", SLOW), None)
    with pytest.raises(FsampleError, match="nsys did not end within 1.5 s; name fewer samplers"):
        run_profile(slow, tmp_path / "t", [child], None)
    for pid in map(int, (tmp_path / "t.pids").read_text().split()):
        deadline = time.monotonic() + 10
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    """Not counting a process that has ended and that nobody has asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_trace_keeps_its_table_when_nsys_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise FsampleError("nsys did not end", "use --no-nsys")

    monkeypatch.setattr(trace, "_under_nsys", fail)
    settings, error = trace._try_nsys(Nsys(Path("nsys"), None), Path("t.json"), None, True)
    assert settings == {"nsys_problem": "nsys did not end"} and str(error).endswith("; use --no-nsys")


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
