"""Packed matrices give back the numbers that were put in, as exactly as their store can."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from onbeat.core.errors import ModelLoadError
from onbeat.engine.native.layouts import INT8_LAYOUT, NATURAL_LAYOUTS
from onbeat.engine.native.library import MatrixLayout, NativeLibrary, PackedMatrix, Source, Store
from tests.cpu.engine.forwards import rows_of
from tests.cpu.native.quant_kernels import dequantized as dequantized_blocks
from tests.cpu.weights.ggml_blocks import DECODERS
from tests.many_cases import each_case

SHAPES = [(1, 256), (16, 256), (33, 512), (100, 768)]
E2M1_16 = (16, 10, None, (0,))
"""As `DECODERS` has GGUF's types."""
SCALE_ERROR = 1e-3
"""Relative; scales may be kept in half precision."""


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.int16]:
    """Cut to the upper half of the bits: exact for numbers that have no more."""
    return (values.view(np.uint32) >> 16).astype(np.int16)


def random_blocks(kind: str, num_rows: int, num_inputs: int) -> NDArray[np.uint8]:
    """Random rows of a GGUF type, with scales of a sensible size."""
    block_size, block_bytes, _, halves = DECODERS.get(kind, E2M1_16)
    rng = np.random.default_rng(num_rows)
    if kind == "F32":  # random bytes would be NaNs too
        return rng.standard_normal((num_rows, num_inputs)).astype(np.float32).view(np.uint8)
    num_blocks = num_inputs // block_size
    raw = rng.integers(0, 256, (num_rows, num_blocks, block_bytes), dtype=np.uint8)
    for offset in halves:
        scales = rng.uniform(-0.01, 0.01, (num_rows, num_blocks)).astype(np.float16)
        raw[:, :, offset : offset + 2] = scales[:, :, None].view(np.uint8)
    if kind == "MXFP4":
        raw[:, :, 0] = rng.integers(110, 130, raw.shape[:2])
    return raw.reshape(num_rows, -1)


def dequantized(kind: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return dequantized_blocks(kind, raw)


def assert_near(actual: NDArray[np.float32], expected: NDArray[np.float32], error: float) -> None:
    difference = np.linalg.norm(actual - expected, axis=-1)
    assert (difference <= error * np.linalg.norm(expected, axis=-1)).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_numbers_come_back_as_they_were(native_library: NativeLibrary, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(shape).astype(np.float32)
    matrix = PackedMatrix(native_library, MatrixLayout(Store.F32), num_outputs=shape[0], num_inputs=shape[1])
    assert matrix.pack(values, Source.F32, np.arange(shape[0]))
    np.testing.assert_array_equal(rows_of(matrix), values)
    assert matrix.num_bytes >= values.nbytes

    short = (bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    matrix = PackedMatrix(native_library, MatrixLayout(Store.BF16), num_outputs=shape[0], num_inputs=shape[1])
    assert matrix.pack(bfloat16(values), Source.BF16, np.arange(shape[0]))
    np.testing.assert_array_equal(rows_of(matrix), short)


@pytest.mark.parametrize("num_inputs", [1, 7, 24, 31, 33, 100])
@pytest.mark.parametrize("store", [Store.F32, Store.BF16])
def test_any_width_of_plain_numbers(native_library: NativeLibrary, store: Store, num_inputs: int) -> None:
    values = np.arange(5 * num_inputs, dtype=np.float32).reshape(5, -1) % 128  # exact in either
    matrix = PackedMatrix(native_library, MatrixLayout(store), num_outputs=5, num_inputs=num_inputs)
    rows, source = (values, Source.F32) if store == Store.F32 else (bfloat16(values), Source.BF16)
    assert matrix.pack(rows, source, np.arange(5))
    np.testing.assert_array_equal(rows_of(matrix), values)


@each_case("shape", SHAPES)
@each_case("kind", NATURAL_LAYOUTS)
def test_quantized_rows_stay_as_they_are(
    native_library: NativeLibrary, kind: str, shape: tuple[int, int]
) -> None:
    raw = random_blocks(kind, *shape)
    matrix = PackedMatrix(native_library, NATURAL_LAYOUTS[kind], num_outputs=shape[0], num_inputs=shape[1])
    assert matrix.pack(raw, Source[kind], np.arange(shape[0]))
    assert_near(rows_of(matrix), dequantized(kind, raw), SCALE_ERROR)
    padded_outputs = -(-shape[0] // 32) * 32
    assert matrix.num_bytes == padded_outputs * shape[1] * NATURAL_LAYOUTS[kind].bytes_per_number


@each_case("kind", NATURAL_LAYOUTS)
@each_case("group", [16, 32])
def test_eight_bits_hold_other_types_as_they_are_or_refuse_them(
    native_library: NativeLibrary, kind: str, group: int
) -> None:
    raw = random_blocks(kind, 40, 512)
    matrix = PackedMatrix(native_library, MatrixLayout(Store.Q8, group), num_outputs=40, num_inputs=512)
    if matrix.pack(raw, Source[kind], np.arange(40)):
        assert_near(rows_of(matrix), dequantized(kind, raw), SCALE_ERROR)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_floats_are_quantized_to_eight_bits(native_library: NativeLibrary, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(shape) * rng.uniform(0.01, 3, (shape[0], 1))).astype(np.float32)
    values[0, :32] = 0.0
    matrix = PackedMatrix(native_library, INT8_LAYOUT, num_outputs=shape[0], num_inputs=shape[1])
    assert matrix.pack(values, Source.F32, np.arange(shape[0]))
    groups = values.reshape(shape[0], -1, INT8_LAYOUT.group)
    half_step = np.abs(groups).max(axis=-1, keepdims=True) / 127 * 0.51 * (1 + SCALE_ERROR)
    errors = np.abs(rows_of(matrix).reshape(groups.shape) - groups)
    assert (errors <= half_step + SCALE_ERROR * np.abs(groups)).all()


@each_case("kind", ["F32", *NATURAL_LAYOUTS])
@each_case("num_threads", [1, 3])
def test_rows_go_where_they_are_sent(native_library: NativeLibrary, kind: str, num_threads: int) -> None:
    """In two calls, from rows that lie apart."""
    num_outputs, num_inputs = 70, 256
    layout = NATURAL_LAYOUTS.get(kind, MatrixLayout(Store.F32))
    raw = random_blocks(kind, 2 * num_outputs, num_inputs)[::2]
    expected = dequantized(kind, np.ascontiguousarray(raw))
    matrix = PackedMatrix(native_library, layout, num_outputs=num_outputs, num_inputs=num_inputs)
    order = np.random.default_rng(2).permutation(num_outputs)
    for part in (slice(0, 23), slice(23, num_outputs)):
        assert matrix.pack(raw[part], Source[kind], order[part], num_threads=num_threads)
    assert_near(rows_of(matrix)[order], expected, SCALE_ERROR if kind != "F32" else 0.0)


@pytest.mark.parametrize(
    ("layout", "num_inputs"),
    [(MatrixLayout(Store.Q8, 32), 48), (MatrixLayout(Store.Q4, 32), 33), (MatrixLayout(Store.Q8, 7), 70)],
)
def test_sizes_that_do_not_suit_the_store(
    native_library: NativeLibrary, layout: MatrixLayout, num_inputs: int
) -> None:
    with pytest.raises(ModelLoadError, match=f"64 x {num_inputs} .* Q"):
        PackedMatrix(native_library, layout, num_outputs=64, num_inputs=num_inputs)


def test_a_type_that_a_store_cannot_take_is_refused(native_library: NativeLibrary) -> None:
    matrix = PackedMatrix(native_library, MatrixLayout(Store.Q4, 32), num_outputs=8, num_inputs=256)
    assert not matrix.pack(random_blocks("Q6_K", 8, 256), Source.Q6_K, np.arange(8))
