"""The native kernels for aarch64 (NEON), run by an emulator beside the same program on this machine."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cpu.native.quant_kernels import ROOT, hatch_build

MAIN = Path(__file__).with_name("kernels_main.cpp")
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
MISSING = [name for name in ("g++", CROSS, EMULATOR) if shutil.which(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"there is no {', '.join(MISSING)}"),
    pytest.mark.skipif(platform.machine() == "aarch64", reason="this processor needs no emulator"),
]

Told = Mapping[str, NDArray[np.float64]]
"""What the program says, by name."""


def compile_program(compiler: str, directory: Path) -> Path:
    """Compile the engine without instruction sets of x86, and the program; return its file."""
    native, build = ROOT / "native", hatch_build()
    options = [*build.COMMON_FLAGS, "-O2", "-Werror", f"-I{native / 'include'}", f"-I{native / 'src'}"]
    sets = ["-DOB_NAMESPACE=portable", "-DOB_INSTRUCTION_SET=portable"]
    sources = [path for path in (native / "src").glob("*.cpp") if path.name != build.PER_INSTRUCTION_SET]
    units: dict[Path, tuple[str, ...]] = dict.fromkeys(sources, ())
    units[MAIN] = (*sets, "-include", str(native / "src" / build.PER_INSTRUCTION_SET))

    def compile_unit(source: Path) -> str:
        path = directory / f"{source.stem}.o"
        subprocess.run(
            [compiler, *options, *units[source], "-c", str(source), "-o", str(path)], check=True, timeout=280
        )
        return str(path)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_unit, units))
    program = directory / "kernels"
    subprocess.run([compiler, "-static", "-pthread", *objects, "-o", str(program)], check=True)
    return program


def told_by(command: Sequence[str]) -> Told:
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    lines = (line.split() for line in run.stdout.splitlines())
    return {name: np.array(numbers, float) for name, *numbers in lines}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by([str(compile_program("g++", tmp_path_factory.mktemp("here")))])


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Told:
    program = compile_program(CROSS, tmp_path_factory.mktemp("aarch64"))
    return told_by([EMULATOR, str(program)])


@pytest.mark.timeout(900)
def test_the_program_says_the_same_on_both(here: Told, emulated: Told) -> None:
    assert list(emulated) == list(here)
    assert {name.split("/")[0] for name in here} == {"weights", "errors", "logits"}
    for name, numbers in here.items():
        kind, *rest = name.split("/")
        assert emulated[name].shape == numbers.shape
        assert np.abs(numbers).max() > 0 or name == "errors/E2M1", name
        if kind == "weights":
            np.testing.assert_allclose(emulated[name], numbers, rtol=1e-6, atol=1e-7, err_msg=name)
        elif kind == "logits":  # bfloat16 rounds differently where sums differ in their last bits
            error = np.linalg.norm(emulated[name] - numbers) / np.linalg.norm(numbers)
            assert error < (1e-5 if rest[0] == "float32" else 0.01), name


@pytest.mark.timeout(900)
def test_products_of_each_kind_of_weights_are_those_of_doubles(emulated: Told) -> None:
    errors = {name: numbers for name, numbers in emulated.items() if name.startswith("errors/")}
    assert len(errors) == 9
    for name, numbers in errors.items():
        assert numbers.max() < 2e-6, name
