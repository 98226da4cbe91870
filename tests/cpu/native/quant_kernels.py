"""The quantized kernels of one instruction set, compiled for the tests and called through ctypes."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[3]
SHIM = Path(__file__).with_name("quant_shim.cpp")
STORES = {"Q8": 2, "Q4": 3, "Q8_MIN": 4, "E2M1": 5}
SOURCES = {
    "F32": 0, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30, "MXFP4": 39, "E2M1_16": 1000,
}  # fmt: skip
HALF_SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Where a block's numbers of half precision stand, in bytes."""
NEEDED = {
    "avx512bf16": ("avx512_bf16", "avx512_vnni"),
    "avx512vnni": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx2": ("avx2", "fma", "f16c"),
    "portable": (),
}
"""Instruction sets, and what the processor says where it has them."""

Floats = NDArray[np.float32]


def hatch_build() -> ModuleType:
    """Return the build hook, which knows every instruction set's compiler options."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)  # as hatchling loads it: under no name in sys.modules
    spec.loader.exec_module(module)
    return module


def instruction_sets() -> list[str]:
    """Return what this machine can run."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ["portable"]
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    return [name for name, needed in NEEDED.items() if flags.issuperset(needed)]


def product_objects(directory: Path, *names: str, sanitizer: str | None = None) -> list[Path]:
    """Return units that are the same for each instruction set, as the build of the product leaves them."""
    build = hatch_build()
    library, sets = directory / "libonbeat_native.so", build.sets_of_this_machine()
    build.build_library(ROOT, library, only=sets, sanitizer=sanitizer)
    variant = f"{sanitizer}-" if sanitizer else ""
    return [path for name in names for path in (ROOT / build.CACHE).glob(f"{variant}{name}-{'?' * 16}.o")]


def compile_kernels(instruction_set: str, directory: Path) -> Kernels:
    """Compile the shim for one instruction set; packing always gets the common options, as in the library."""
    build = hatch_build()
    sets = build.X86_INSTRUCTION_SETS if instruction_set != "portable" else {"portable": ()}
    shim, library = directory / "shim.o", directory / "libkernels.so"
    options = [*sets[instruction_set], f"-DOB_NAMESPACE={instruction_set}", "-fvisibility=default"]
    common = ("g++", *build.COMMON_FLAGS, "-Werror", f"-I{ROOT / 'native/src'}")
    subprocess.run([*common, "-c", "-o", str(shim), *options, str(SHIM)], check=True)
    objects = (shim, *product_objects(directory, "quant_pack"))
    subprocess.run(["g++", "-shared", "-o", str(library), *map(str, objects)], check=True)
    return Kernels(library)


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


class Kernels:
    """The shim's functions."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.shim_create.restype = ctypes.c_void_p
        self.library.shim_bytes.restype = ctypes.c_int64
        self.library.shim_quantized_bytes.restype = ctypes.c_int64
        self.library.shim_value.restype = ctypes.c_float

    def takes(self, store: str, group: int, source: str) -> bool:
        return bool(self.library.shim_takes(STORES[store], group, SOURCES[source]))

    def pack(self, store: str, group: int, source: str, rows: NDArray[Any], num_inputs: int) -> Matrix:
        """Return a matrix of rows of a source type."""
        create = self.library.shim_create
        handle = create(STORES[store], group, ctypes.c_int64(len(rows)), ctypes.c_int64(num_inputs))
        matrix = Matrix(self.library, handle, len(rows), num_inputs)
        row_bytes = ctypes.c_int64(rows.strides[0])
        self.library.shim_pack(matrix.handle, SOURCES[source], _pointer(rows), row_bytes)
        return matrix

    def quantize(self, x: Floats) -> QuantizedInputs:
        """Return rows of a multiple of 32 numbers as products see them."""
        num_rows, num_inputs = map(ctypes.c_int64, x.shape)
        memory = np.empty(self.library.shim_quantized_bytes(num_rows, num_inputs), np.uint8)
        values = np.empty(x.shape, np.int8)
        scales, sums = np.empty((2, len(x), x.shape[1] // 32), np.float32)
        results = (_pointer(memory), _pointer(values), _pointer(scales), _pointer(sums))
        self.library.shim_quantize(_pointer(x), num_rows, num_inputs, *results)
        return QuantizedInputs(values, scales, sums)


class QuantizedInputs(NamedTuple):
    """Bytes [rows, inputs], and for each 32 of them a scale and the sum of what they stand for."""

    values: NDArray[np.int8]
    scales: Floats
    sums: Floats

    def dequantized(self) -> NDArray[np.float64]:
        """Return the numbers that they stand for."""
        return self.values * self.scales.astype(np.float64).repeat(32, axis=-1)


class Matrix:
    """A packed matrix; its memory goes with it."""

    def __init__(self, library: ctypes.CDLL, handle: int, num_outputs: int, num_inputs: int) -> None:
        self._library = library
        self.handle = ctypes.c_void_p(handle)
        self.num_outputs = num_outputs
        self.num_inputs = num_inputs

    def __del__(self) -> None:
        self._library.shim_free(self.handle)

    @property
    def num_bytes(self) -> int:
        return int(self._library.shim_bytes(self.handle))

    @property
    def padded_inputs(self) -> int:
        return -(-self.num_inputs // 32) * 32

    def values(self) -> Floats:
        """Return all numbers, row by row."""
        values = np.empty((self.num_outputs, self.num_inputs), np.float32)
        for output in range(self.num_outputs):
            row = _pointer(values[output])
            self._library.shim_row(self.handle, ctypes.c_int64(output), row)
        return values

    def value(self, output: int, input_index: int) -> float:
        return float(
            self._library.shim_value(self.handle, ctypes.c_int64(output), ctypes.c_int64(input_index))
        )

    def multiply(self, x: Floats, dtype: str = "float") -> Floats:
        """Return x W^T; x is cut to bfloat16 where that is the dtype."""
        padded = np.zeros((len(x), self.padded_inputs), np.float32)
        padded[:, : self.num_inputs] = x
        rows: NDArray[Any] = padded
        if dtype == "bf16":
            rows = (padded.view(np.uint32) >> 16).astype(np.uint16)
        y = np.empty((len(x), -(-self.num_outputs // 32) * 32), np.float32)
        multiply = getattr(self._library, f"shim_multiply_{dtype}")
        multiply(self.handle, _pointer(rows), ctypes.c_int64(len(x)), _pointer(y))
        assert not y[np.isfinite(x).all(axis=-1), self.num_outputs :].any()  # no output there
        return y[:, : self.num_outputs]

    def expanded(self, dtype: str) -> Floats:
        """Return all numbers as `expand_panel` writes them, taken apart by the layout of float panels."""
        pack = 2 if dtype == "bf16" else 1
        num_panels = -(-self.num_outputs // 32)
        size = num_panels * self.padded_inputs * 32
        numbers = np.empty(size, np.uint16 if dtype == "bf16" else np.uint32)
        getattr(self._library, f"shim_expand_{dtype}")(self.handle, _pointer(numbers))
        bits = numbers.astype(np.uint32) << (16 if dtype == "bf16" else 0)
        parts = bits.view(np.float32).reshape(num_panels, self.padded_inputs // pack, 2, 16, pack)
        rows = parts.transpose(0, 2, 3, 1, 4).reshape(num_panels * 32, self.padded_inputs)
        return rows[: self.num_outputs, : self.num_inputs]


def random_rows(
    kind: str, num_rows: int, num_inputs: int, seed: int = 0, *, factor: float = 1.0
) -> NDArray[np.uint8]:
    """Return rows of a GGUF type: random numbers quantized, or random blocks where gguf cannot quantize."""
    rng = np.random.default_rng(seed)
    if kind == "E2M1_16":  # which GGUF has not
        blocks = rng.integers(0, 256, (num_rows, num_inputs // 16, 10), dtype=np.uint8)
        scales = (factor * rng.uniform(0.002, 0.006, blocks.shape[:2])).astype(np.float16)
        blocks[:, :, :2] = scales[:, :, None].view(np.uint8)
        return blocks.reshape(num_rows, -1)
    quant_type = gguf.GGMLQuantizationType[kind]
    try:
        values = rng.standard_normal((num_rows, num_inputs)).astype(np.float32) * (0.05 * factor)
        return np.ascontiguousarray(gguf.quants.quantize(values, quant_type)).view(np.uint8)
    except NotImplementedError:
        block_inputs, block_bytes = gguf.GGML_QUANT_SIZES[quant_type]
        blocks = rng.integers(0, 256, (num_rows, num_inputs // block_inputs, block_bytes), dtype=np.uint8)
        for offset in HALF_SCALES[kind]:
            scales = (factor * rng.uniform(0.0005, 0.002, blocks.shape[:2])).astype(np.float16)
            blocks[:, :, offset : offset + 2] = scales[:, :, None].view(np.uint8)
        return blocks.reshape(num_rows, -1)


def dequantized(kind: str, rows: NDArray[np.uint8]) -> Floats:
    """Return what the gguf package makes of them."""
    if kind == "E2M1_16":
        blocks = rows.reshape(len(rows), -1, 10)
        scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16).astype(np.float32)
        codes = np.concatenate([blocks[:, :, 2:] & 15, blocks[:, :, 2:] >> 4], axis=-1)
        doubled = np.array(gguf.quants.MXFP4.kvalues, np.float32)[codes]
        of_blocks: Floats = (scales * doubled).reshape(len(rows), -1)
        return of_blocks
    values: Floats = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    return values
