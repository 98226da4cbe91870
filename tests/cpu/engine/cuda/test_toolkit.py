"""What FlashInfer compiles with is found, or made findable, before it is imported."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from onbeat.engine.cuda import toolkit
from onbeat.engine.cuda.toolkit import missing_tool

FIND_PACKAGES = toolkit._packaged_toolkits


def tool(path: Path, says: str = "") -> None:
    """Put a program there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {says}\n")
    path.chmod(0o755)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a C++ compiler and ninja in `PATH`, and nothing of CUDA; return that folder."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.setenv(name, "")  # so that what is set in a test is undone
        monkeypatch.delenv(name)
    folder = tmp_path / "tools"
    for name in ("c++", "ninja"):
        tool(folder / name)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(toolkit, "_DEFAULT_CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setattr(toolkit, "_packaged_toolkits", list)
    return folder


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The folders of the extra's packages in two places, as in an environment that sees another one."""
    monkeypatch.setattr(toolkit, "_packaged_toolkits", FIND_PACKAGES)
    folders = []
    for number in range(2):
        site = tmp_path / f"site{number}"
        folders.append(site / "nvidia" / "cu99")
        monkeypatch.syspath_prepend(str(site))
    first, second = folders = folders[::-1]
    for folder in folders:
        (folder / "include").mkdir(parents=True)
        (folder / "include" / "both.h").write_text(str(folder))
    tool(first / "bin" / "nvcc", "compiled")
    (first / "nvvm" / "bin").mkdir(parents=True)
    (second / "include" / "crt").mkdir()
    (second / "lib").mkdir()
    (second / "lib" / "libcudart.so.13").write_text("runtime")
    return folders


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", "PATH", None])
def test_the_compiler_is_looked_for_where_the_library_does(
    variable: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bare: Path
) -> None:
    folder = tmp_path / "cuda" / "bin"
    if variable is None:
        monkeypatch.setattr(toolkit, "_DEFAULT_CUDA_HOME", str(folder.parent))
    elif variable == "PATH":
        monkeypatch.setenv("PATH", os.pathsep.join(map(str, (folder, bare))))
    else:
        monkeypatch.setenv(variable, str(folder.parent))
    assert "pip install 'onbeat[gpu-build]'" in str(missing_tool())
    tool(folder / "nvcc")
    before = dict(os.environ)
    assert missing_tool() is None
    assert dict(os.environ) == before
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert "FLASHINFER_DISABLE_JIT" in str(missing_tool())


def test_packages_become_a_folder_as_the_library_wants_it(
    packages: list[Path], bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-compiler-there"))
    assert missing_tool() is None
    home = Path(os.environ["CUDA_HOME"])
    assert home.is_relative_to(tmp_path / "cache")
    assert subprocess.check_output([home / "bin" / "nvcc"], text=True) == "compiled\n"
    assert (home / "nvvm" / "bin").is_dir()
    assert (home / "include" / "crt").is_dir()
    assert (home / "include" / "both.h").read_text() == str(packages[0])
    for name in ("libcudart.so.13", "libcudart.so"):  # the second is what -lcudart means
        assert (home / "lib64" / name).read_text() == "runtime"

    links = sorted(home.rglob("*"))
    broken = home / "lib64" / "libcudart.so"
    broken.unlink()
    broken.symlink_to("gone")
    monkeypatch.delenv("CUDA_HOME")
    assert missing_tool() is None
    assert os.environ["CUDA_HOME"] == str(home)
    assert broken.read_text() == "runtime"
    assert sorted(home.rglob("*")) == links


def test_the_drivers_library_is_among_what_is_linked_with(
    packages: list[Path], bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    other = next(line.split()[-1] for line in maps if "/libm.so" in line or "/libm-" in line)
    driver = tmp_path / "libcuda.so.1"
    shutil.copy(other, driver)
    monkeypatch.setattr(toolkit, "_DRIVER", str(driver))
    assert missing_tool() is None
    assert (Path(os.environ["CUDA_HOME"]) / "lib64" / "stubs" / "libcuda.so").samefile(driver)


def test_ninja_is_taken_from_beside_the_interpreter(
    bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`.venv/bin/onbeat` runs without `.venv/bin` in `PATH`."""
    tool(bare / "nvcc")
    (bare / "ninja").unlink()
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "venv"))
    assert "pip install ninja" in str(missing_tool())
    tool(tmp_path / "venv" / "ninja")
    assert missing_tool() is None
    assert os.environ["PATH"].split(os.pathsep) == [str(bare), str(tmp_path / "venv")]


def test_a_missing_compiler_of_the_host_is_named(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(bare / "nvcc")
    monkeypatch.setenv("CXX", "clang++-99")
    assert "clang++-99" in str(missing_tool())
