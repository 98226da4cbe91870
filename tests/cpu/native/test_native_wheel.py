"""Wheels of this checkout as pip makes them: with the native library, without a compiler, and in use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cpu.native.quant_kernels import hatch_build, instruction_sets

ROOT = Path(__file__).parents[3]
LIBRARY = "onbeat/engine/native/libonbeat_native.so"
PARTS = ("src", "native", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE")
STATIC = "-static-libstdc++ -static-libgcc"
"""As the wheels of a release are linked."""
EVERYWHERE = {"libc", "libm"}
"""Libraries of the system that any Linux of `manylinux_2_28` has, and no more than these."""
QUICKLY = """#!/bin/sh
case "$*" in {others}) set -- "$@" -O0;; esac
exec g++ "$@"
"""
"""A compiler that compiles, but does not optimize, what does not run here."""

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(900)]


def make_wheel(folder: Path, compiler: str) -> tuple[Path, str]:
    """Return the wheel that pip makes of a copy of the sources, and what it said."""
    tree = folder / "tree"
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        tree.mkdir(exist_ok=True)
        copy(ROOT / part, tree / part)
    (tree / "src" / LIBRARY).unlink(missing_ok=True)
    if (objects := ROOT / "build" / "native").is_dir():  # so that only what changed is compiled again
        shutil.copytree(objects, tree / "build" / "native")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", str(folder), str(tree)],
        env={**os.environ, "CXX": compiler, "LDFLAGS": STATIC},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    return wheel, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_with_a_compiler(tmp_path: Path) -> None:
    wheel, _ = make_wheel(tmp_path, "g++")
    assert "-py3-none-linux_" in wheel.name
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()


def test_without_a_compiler(tmp_path: Path) -> None:
    wheel, said = make_wheel(tmp_path, "/no/such/compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert LIBRARY not in zipfile.ZipFile(wheel).namelist()
    assert "'/no/such/compiler'" in said


def quick_compiler(folder: Path) -> str:
    """Return a g++ that optimizes no instruction set of other processors, as `test_with_a_compiler` does."""
    others = hatch_build().X86_INSTRUCTION_SETS.keys() - set(instruction_sets())
    path = folder / "quick-g++"
    path.write_text(QUICKLY.format(others="|".join(f"*-DOB_NAMESPACE={name}\\ *" for name in others)))
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_a_clean_environment_serves(tmp_path: Path) -> None:
    wheel, _ = make_wheel(tmp_path, quick_compiler(tmp_path))
    shown = run([sys.executable, "-m", "auditwheel", "show", str(wheel)])
    assert 'platform tag: "manylinux_2_' in shown.replace("\n", " ")
    assert set(re.findall(r"(lib\w+)\.so", shown)) == EVERYWHERE
    tried = run([sys.executable, str(ROOT / "scripts/try-wheel"), str(wheel), "--pip=--no-compile"])
    megabytes = re.search(r"installed in [\d.]+ s: (\d+) MB", tried)
    assert megabytes
    assert int(megabytes[1]) < 240, "torch alone has more"
    assert re.search(r"answered after [\d.]+ s: The capital of Japan is Tokyo", tried)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
