"""What pip installs: both packages under their own names, light, typed, and nothing of the workshop."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import fsample_cli

ROOT = Path(__file__).resolve().parents[1]
LIGHT = {"typer", "rich", "torch", "triton", "numpy", "pandas", "nvtx", "safetensors", "scipy"}


def python(code: str, *paths: Path, cwd: Path, flags: tuple[str, ...] = ()) -> str:
    """Stdout of a fresh interpreter that finds packages in `paths` first; fails with its stderr."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def build(source: Path, target: str, folder: Path) -> Path:
    """The wheel or sdist of a source tree. Uses the installed hatchling: no network, no build environment."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed by pip, without its dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", str(folder), str(wheel)], check=True, timeout=120)
    return folder


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_folder_kernels_is_no_package(tmp_path: Path) -> None:
    # with an __init__.py it would hide the package `kernels` that others publish, in every clone of this tree
    assert not (ROOT / "kernels" / "__init__.py").exists()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("get_kernel = 'theirs'\n")
    assert python("from kernels import get_kernel; print(get_kernel)", ROOT, tmp_path, cwd=ROOT) == "theirs"


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    names = wheel_names(wheel)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"fsample_cli", "fsample_kernels", f"fsample-{fsample_cli.__version__}.dist-info"}
    sources = [*ROOT.glob("fsample_cli/**/*.py"), *(ROOT / "kernels").glob("fsample_kernels/**/*.py")]
    expected = {str(file.relative_to(ROOT)).removeprefix("kernels/") for file in sources}
    assert {name for name in names if name.endswith(".py")} == expected
    assert "fsample_kernels/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_wheel_asks_for_the_light_packages_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    needs = metadata.get_all("Requires-Dist", [])
    light = {need for need in needs if "extra ==" not in need}
    assert {need.split(">")[0].split(";")[0].strip() for need in light} == LIGHT
    (triton,) = [need for need in light if need.startswith("triton")]
    assert "sys_platform == 'linux'" in triton
    assert {"gpu", "plot", "real-model", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_sdist_builds_the_same_wheel_and_leaves_the_records_out(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        for needed in (
            "Makefile",
            "LICENSE",
            "README.md",
            "constraints-cpu.txt",
            ".ci/setup",
            "tests/conftest.py",
        ):
            assert needed in names, needed
        assert not [name for name in names if name.startswith(("profiles/", ".venv/", "build/"))]
        for member in archive.getmembers():  # its own files: nothing to defend against
            archive.extract(member, tmp_path / "source", set_attrs=False)
    (source,) = (tmp_path / "source").iterdir()
    again = build(source, "wheel", tmp_path / "again")
    assert wheel_names(again) == wheel_names(wheel)


def test_an_installed_wheel_works_without_the_source_tree(installed: Path, tmp_path: Path) -> None:
    code = "import fsample_cli, fsample_kernels; print(fsample_cli.__file__, fsample_kernels.__file__)"
    for file in python(code, installed, cwd=tmp_path).split():
        assert Path(file).is_relative_to(installed)
    script = installed / "bin" / "fsample"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, str(script), "--version"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"fsample {fsample_cli.__version__}\n", done.stderr


def test_an_editable_install_sees_new_files(tmp_path: Path) -> None:
    copy = tmp_path / "tree"
    for package in ("fsample_cli", "kernels/fsample_kernels"):
        (copy / package).mkdir(parents=True)
        (copy / package / "__init__.py").touch()
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / file).write_bytes((ROOT / file).read_bytes())
    site = tmp_path / "site"
    site.mkdir()
    built = python(f"import hatchling.build as b; print(b.build_editable({str(tmp_path)!r}))", cwd=copy)
    with zipfile.ZipFile(tmp_path / built.splitlines()[-1]) as archive:
        archive.extractall(site)
    (copy / "fsample_cli" / "added.py").touch()
    (copy / "kernels" / "fsample_kernels" / "added.py").touch()
    code = f"import site; site.addsitedir({str(site)!r}); import fsample_cli.added, fsample_kernels.added"
    python(code, cwd=tmp_path, flags=("-S",))  # without the site-packages, where this tree may be installed


def test_the_library_needs_no_triton_no_gpu_and_no_command_line(installed: Path, tmp_path: Path) -> None:
    code = """if True:
        import sys
        sys.modules["triton"] = sys.modules["fsample_cli"] = None
        import torch
        import fsample_kernels.reference, fsample_kernels.noise, fsample_kernels.testing
        from fsample_kernels import sample
        done = sample(torch.ones(2, 8), torch.eye(100, 8), seed=1, mask=torch.arange(100) == 42)
        print(done.ids.tolist(), done.implementation)"""
    assert python(code, installed, cwd=tmp_path) == "[[42], [42]] reference"


def test_commands_that_need_no_gpu_run_without_triton(installed: Path, tmp_path: Path) -> None:
    code = """if True:
        import sys
        sys.modules["triton"] = None
        from fsample_cli.main import main
        for arguments in (["presets"], ["doctor"], ["io-model", "--batch", "1"]):
            sys.argv = ["fsample", *arguments]
            try:
                main()
            except SystemExit as exit:
                assert exit.code == 0, arguments"""
    shown = python(code, installed, cwd=tmp_path)
    assert "qwen3-8b" in shown and "no GPU" in shown and "1+2B/D" in shown


def test_set_up_goes_on_where_the_index_has_torch_for_cuda_alone(tmp_path: Path) -> None:
    """That build insists on a triton of its own, and pip finds no way to keep constraints-cpu.txt."""
    for name, lines in (
        ("python", 'echo "$*" >>"$VENV/asked"\ncase "$*" in *constraints-cpu*) exit 1 ;; esac'),
        ("nvidia-smi", "exit 1"),
    ):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    env = {**os.environ, "VENV": str(tmp_path), "PATH": path}
    done = subprocess.run([ROOT / ".ci/setup", "dev"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = [line for line in (tmp_path / "asked").read_text().splitlines() if "install" in line]
    assert (
        "--constraint constraints-cpu.txt" in first and f"--constraint {tmp_path}/constraints.txt" in second
    )
    assert first.endswith("--editable .[dev]") and second.endswith("--editable .[dev]")
    assert (tmp_path / "constraints.txt").read_text().startswith("torch==") and "once more" in done.stderr
    assert "triton" not in (tmp_path / "constraints.txt").read_text()
