"""The native engine's kernels for AMX, made for processors without it, and called through ctypes."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onbeat.engine.native.library import PackedMatrix
from tests.cpu.native.quant_kernels import hatch_build, instruction_sets, product_objects

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "native/src"
PRODUCT = ("checks", "engine", "matrix", "memory", "plan", "quant_pack", "thread_pool")
"""What an engine has beside its kernels."""

Floats = NDArray[np.float32]
Halves = NDArray[np.uint16]
"""Bits of bfloat16 numbers."""


class Unit(NamedTuple):
    """One call of the compiler."""

    source: Path
    flags: Sequence[str]


def emulated_units() -> list[Unit]:
    """Return the shim, and the whole engine with emulated tiles as its only instruction set."""
    set_flags = hatch_build().X86_INSTRUCTION_SETS[instruction_sets()[0]]
    header = HERE / "emulated_amx.h"
    names = ("-DOB_NAMESPACE=amx_emulated", "-DOB_INSTRUCTION_SET=amx_emulated")
    return _engine_units([*set_flags, *names, f'-DOB_EMULATED_AMX="{header}"'])


def trapped_units() -> list[Unit]:
    """Return the shim with the instructions themselves, and what carries them out where they trap."""
    flags = _instruction_flags()
    return [
        Unit(HERE / "amx_shim.cpp", [*flags, "-fvisibility=default"]),
        Unit(HERE / "amx_trap.cpp", ["-DOB_NAMESPACE=trapped", "-fvisibility=default"]),
    ]


def trapped_engine_units() -> list[Unit]:
    """Return the whole engine, too."""
    return [*_engine_units(_instruction_flags()), trapped_units()[-1]]


def _instruction_flags() -> list[str]:
    """Return the product's flags for AMX, with what else this processor has."""
    build = hatch_build()
    return [
        *build.X86_INSTRUCTION_SETS[instruction_sets()[0]],
        *build.AMX_FLAGS,
        "-DOB_NAMESPACE=amx",
        "-DOB_INSTRUCTION_SET=amx",
    ]


def _engine_units(flags: Sequence[str]) -> list[Unit]:
    kernels = ("-include", str(SOURCES / "kernels.cpp"))  # in one unit, what both use is compiled once
    return [
        Unit(HERE / "amx_shim.cpp", [*flags, *kernels, "-fvisibility=default"]),
        Unit(HERE / "amx_sets.cpp", flags),
    ]


def compile_units(
    units: Sequence[Unit], directory: Path, extra: Sequence[str] = (), sanitizer: str | None = None
) -> Path:
    """Compile and link a library; return its file."""
    build = hatch_build()
    extra = build.SANITIZERS[sanitizer] if sanitizer else extra
    common = ["g++", *build.COMMON_FLAGS, *extra, "-Werror", f"-I{SOURCES}", "-c", "-o"]

    def compile_unit(unit: Unit) -> Path:
        path = directory / f"{unit.source.stem}.o"
        subprocess.run([*common, str(path), *unit.flags, str(unit.source)], check=True)
        return path

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_unit, units))
    if any(unit.source.name == "amx_sets.cpp" for unit in units):
        objects += product_objects(directory, *PRODUCT, sanitizer=sanitizer)
    library = directory / "libamx.so"
    subprocess.run(["g++", *build.LINK_FLAGS, *extra, "-o", str(library), *map(str, objects)], check=True)
    return library


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


class Shim:
    """The functions of amx_shim.cpp; `traps`: what the processor does not know is carried out as well."""

    def __init__(self, path: Path, *, traps: bool = False) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.shim_fewest_rows.restype = ctypes.c_int64
        self.fewest_rows = int(self.library.shim_fewest_rows())
        self.num_products = 0
        self._traps = traps

    def multiply(
        self,
        matrix: PackedMatrix,
        x: Halves,
        rows: tuple[int, int] | None = None,
        panels: tuple[int, int] | None = None,
    ) -> Floats:
        """Return zeros with the products of a share of rows and panels added, [rows, outputs].

        Parameters
        ----------
        x : [rows, inputs], padded to a multiple of 32.
        """
        num_panels = -(-matrix.num_outputs // 32)
        y = np.zeros((len(x), num_panels * 32), np.float32)
        bounds = (*(rows or (0, len(x))), *(panels or (0, num_panels)))
        arguments = (x.shape[1], *bounds)
        self._call(
            self.library.shim_multiply,
            ctypes.c_void_p(matrix.handle),
            _pointer(x),
            *map(ctypes.c_int64, arguments),
            _pointer(y),
        )
        return y[:, : matrix.num_outputs]

    def madd(self, sums: Floats, inputs: Halves, weights: Halves) -> Floats:
        """Return the sums of a tile after one product: all [16, 16] or [16, 32]."""
        result = sums.copy()
        self._call(self.library.shim_madd, _pointer(result), _pointer(inputs), _pointer(weights))
        return result

    @contextmanager
    def trapping(self) -> Iterator[None]:
        """Carry out instructions that trap, and count the products of tiles."""
        if not self._traps:
            yield
            return
        self.library.trap_begin()
        try:
            yield
        finally:
            self.num_products += self.library.trap_end()

    def _call(self, function: Any, *arguments: Any) -> None:
        with self.trapping():
            function(*arguments)
