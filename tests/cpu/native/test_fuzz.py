"""Random models and steps: with the library as it is, and with one that watches every access to memory."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onbeat.engine.native.library import VARIABLE, NativeLibrary
from tests.cpu.native.amx_kernels import compile_units, emulated_units
from tests.cpu.native.fuzz_steps import fuzz
from tests.cpu.native.quant_kernels import hatch_build

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("seed", range(3))
def test_random_steps(native_library: NativeLibrary, seed: int) -> None:
    assert fuzz(native_library, seconds=1.0, seed=seed) >= 20


def sanitized_product(directory: Path) -> Path:
    library = directory / "libonbeat_native-address.so"
    build = [sys.executable, str(ROOT / "hatch_build.py"), "--sanitize", "address", "--output", str(library)]
    subprocess.run(build, check=True, capture_output=True)
    return library


def sanitized_tiles(directory: Path) -> Path:
    """Build the kernels for AMX with emulated tiles, whose loads and stores are then watched, too."""
    return compile_units(emulated_units(), directory, hatch_build().SANITIZERS["address"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize(
    "build",
    [
        sanitized_product,
        pytest.param(
            sanitized_tiles,
            marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="the processor is no x86"),
        ),
    ],
)
def test_random_steps_touch_only_their_own_memory(tmp_path: Path, build: Callable[[Path], Path]) -> None:
    library = build(tmp_path)
    find = ["g++", "-print-file-name=libasan.so"]
    runtime = subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("the compiler has no address sanitizer")
    run = subprocess.run(
        [sys.executable, "-m", "tests.cpu.native.fuzz_steps", "20", "0"],
        cwd=ROOT,
        env={
            **os.environ,
            VARIABLE: str(library),
            "LD_PRELOAD": runtime,
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
            "PYTHONMALLOC": "malloc",  # an array's end is then where its memory ends
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "steps" in run.stdout
