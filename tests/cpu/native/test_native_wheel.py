"""Wheels of this checkout as pip makes them: with the native library, and without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIBRARY = "onbeat/engine/native/libonbeat_native.so"
PARTS = ("src", "native", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE")

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(900)]


def make_wheel(folder: Path, compiler: str) -> tuple[Path, str]:
    """Return the wheel that pip makes of a copy of the sources, and what it said."""
    tree = folder / "tree"
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        tree.mkdir(exist_ok=True)
        copy(ROOT / part, tree / part)
    (tree / "src" / LIBRARY).unlink(missing_ok=True)
    run = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", str(folder), str(tree)],
        env={**os.environ, "CXX": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    return wheel, run.stdout + run.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_with_a_compiler(tmp_path: Path) -> None:
    wheel, _ = make_wheel(tmp_path, "g++")
    assert "-py3-none-linux_" in wheel.name
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()


def test_without_a_compiler(tmp_path: Path) -> None:
    wheel, said = make_wheel(tmp_path, "/no/such/compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert LIBRARY not in zipfile.ZipFile(wheel).namelist()
    assert (
        "The native CPU engine of onbeat is not built: there is no C++ compiler '/no/such/compiler'" in said
    )
