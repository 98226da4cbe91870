"""Quantized weights: packed without loss from GGUF's blocks, multiplied in place by each instruction set."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cpu.native.quant_kernels import (
    NEEDED,
    Floats,
    Kernels,
    compile_kernels,
    dequantized,
    instruction_sets,
    random_rows,
)
from tests.many_cases import each_case

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

STORE_OF = {
    "Q8_0": ("Q8", 32),
    "Q5_0": ("Q8", 32),
    "Q6_K": ("Q8", 16),
    "Q4_0": ("Q4", 32),
    "Q4_1": ("Q4", 32),
    "Q4_K": ("Q4", 32),
    "Q5_1": ("Q8_MIN", 32),
    "Q5_K": ("Q8_MIN", 32),
    "Q2_K": ("Q8_MIN", 16),
    "Q3_K": ("Q8", 16),
    "IQ4_NL": ("Q8", 32),
    "IQ4_XS": ("Q8", 32),
    "MXFP4": ("E2M1", 32),
    "E2M1_16": ("E2M1", 16),
}
HAVE_MINIMA = ("Q4", "Q8_MIN")
EXACT = ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "IQ4_NL", "MXFP4", "E2M1_16")
"""Types whose scales are of half precision already; those of the others are products, rounded to it."""
HALF_ULP = 2.0**-11


def width(kind: str, num_inputs: int) -> int:
    """Return a width that the type has: K-quants come in blocks of 256."""
    return -(-num_inputs // 256) * 256 if kind.endswith(("_K", "_XS")) else num_inputs


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kernels]:
    return functools.cache(lambda name: compile_kernels(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module", params=NEEDED)
def kernels(request: pytest.FixtureRequest, compiled: Callable[[str], Kernels]) -> Kernels:
    if request.param not in instruction_sets():
        pytest.skip(f"this processor has no {request.param}")
    return compiled(request.param)


def relative_error(actual: Floats, expected: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def whole_inputs(num_rows: int, num_inputs: int) -> Floats:
    """Rows that are whole numbers up to 127 in each block: bytes hold them exactly."""
    x = np.random.default_rng(1).integers(-127, 128, (num_rows, num_inputs)).astype(np.float32)
    x[:, 5::32] = np.where(x[:, 5::32] < 0, -127, 127)
    return x


# ---- Packing ----


@each_case("kind", STORE_OF)
@each_case("num_outputs", [1, 33, 64])
def test_numbers_are_those_of_the_file(kernels: Kernels, kind: str, num_outputs: int) -> None:
    num_inputs = width(kind, 96)
    raw = random_rows(kind, num_outputs, num_inputs)
    matrix = kernels.pack(*STORE_OF[kind], kind, raw, num_inputs)
    expected = dequantized(kind, raw)
    if kind in EXACT:
        np.testing.assert_array_equal(matrix.values(), expected)
    else:
        # of scale * number (at most 15) + minimum, both rounded parts; subnormal scales to their last bit
        np.testing.assert_allclose(
            matrix.values(), expected, rtol=0, atol=np.abs(expected).max() * HALF_ULP * 2
        )
    for output, index in ((0, 0), (num_outputs - 1, num_inputs - 1), (num_outputs // 2, 45)):
        assert matrix.value(output, index) == matrix.values()[output, index]


@each_case(
    ("kind", "store", "group"),
    [
        *(("Q8_0", "Q8", 16), ("Q5_0", "Q8", 16), ("Q4_0", "Q8", 16), ("Q4_0", "Q8", 32)),
        *(("MXFP4", "Q8", 32), ("MXFP4", "E2M1", 16), ("E2M1_16", "Q8", 16), ("E2M1_16", "Q8_MIN", 16)),
        *(("Q8_0", "Q8_MIN", 16), ("Q5_1", "Q8_MIN", 16), ("Q4_1", "Q8_MIN", 16), ("Q4_1", "Q8_MIN", 32)),
    ],
)
def test_eight_bits_hold_other_types(kernels: Kernels, kind: str, store: str, group: int) -> None:
    assert kernels.takes(store, group, kind)
    raw = random_rows(kind, 40, 96)
    matrix = kernels.pack(store, group, kind, raw, 96)
    np.testing.assert_array_equal(matrix.values(), dequantized(kind, raw))


def test_what_would_be_quantized_a_second_time_is_refused(kernels: Kernels) -> None:
    for store, group, kind in (
        ("Q8", 32, "Q6_K"),  # has a scale for 16
        ("Q8", 32, "Q4_1"),
        ("Q8", 16, "Q4_K"),
        ("Q8", 32, "Q5_1"),
        ("Q8_MIN", 32, "Q2_K"),  # has a scale for 16
        ("Q8_MIN", 32, "F32"),
        ("Q4", 32, "Q8_0"),
        ("Q4", 32, "Q5_0"),
        ("Q4", 16, "Q4_1"),
        ("E2M1", 32, "E2M1_16"),  # has a scale for 16
        ("E2M1", 32, "Q4_0"),
        ("Q4", 32, "MXFP4"),
        ("Q8", 64, "Q8_0"),
    ):
        assert not kernels.takes(store, group, kind), (store, group, kind)


def test_plain_numbers_become_4_bits_within_half_a_step(kernels: Kernels) -> None:
    rng = np.random.default_rng(3)
    values = (rng.standard_normal((37, 64)) * 10.0 ** rng.integers(-2, 2, (37, 1))).astype(np.float32)
    values[3], values[4] = 0.0, 2.0
    packed = kernels.pack("Q4", 32, "F32", values, 64).values()[:37]
    groups = values.reshape(37, 2, 32)
    step = (groups.max(axis=2) - groups.min(axis=2)) / 15
    rounding = np.abs(groups).max(axis=2) / 1000  # of scale and least number to half precision
    error = np.abs(packed[:, :64].reshape(groups.shape) - groups).max(axis=2)
    assert (error <= 0.5 * step + rounding).all()
    assert (packed[3:5, :64] == values[3:5]).all()


@each_case("num_inputs", [1, 31, 64, 100])
@each_case("group", [16, 32])
def test_plain_numbers_are_quantized_to_the_nearest(kernels: Kernels, num_inputs: int, group: int) -> None:
    rng = np.random.default_rng(2)
    # from where scales are subnormal on
    values = rng.standard_normal((37, num_inputs)) * 10.0 ** rng.integers(-4, 2, (37, 1))
    values[3] = 0.0
    plain = values.astype(np.float32)
    packed = kernels.pack("Q8", group, "F32", plain, num_inputs).values()
    padded = np.zeros((37, -(-num_inputs // group) * group))
    padded[:, :num_inputs] = plain
    scales = np.abs(padded).reshape(37, -1, group).max(-1).repeat(group, axis=-1)[:, :num_inputs] / 127
    half_steps = scales * (1 + 2 * HALF_ULP) / 2 + 2.0**-25
    assert (np.abs(packed - plain) <= half_steps * (1 + 1e-5)).all()
    assert not packed[3].any()

    short = (plain.view(np.uint32) >> 16).astype(np.uint16)
    cut = (short.astype(np.uint32) << 16).view(np.float32)
    from_short = kernels.pack("Q8", group, "BF16", short, num_inputs).values()
    np.testing.assert_array_equal(from_short, kernels.pack("Q8", group, "F32", cut, num_inputs).values())


@each_case(
    ("kind", "most_bits"),
    [
        ("Q8_0", 8.5),
        ("Q4_1", 5.0),
        ("Q4_0", 5.0),
        ("Q6_K", 9.0),
        ("Q5_K", 9.0),
        ("Q2_K", 10.0),
        ("MXFP4", 4.5),
        ("E2M1_16", 5.0),
    ],
)
def test_bits_of_a_weight(kernels: Kernels, kind: str, most_bits: float) -> None:
    matrix = kernels.pack(*STORE_OF[kind], kind, random_rows(kind, 64, 512), 512)
    assert matrix.num_bytes * 8 <= most_bits * 64 * 512


# ---- Products ----


@each_case("kind", STORE_OF)
@each_case("num_rows", range(1, 13))
def test_a_product_with_whole_inputs_is_exact(kernels: Kernels, kind: str, num_rows: int) -> None:
    """Nothing is rounded but the sums: every number meets its own."""
    num_inputs = width(kind, 96)
    matrix = kernels.pack(*STORE_OF[kind], kind, random_rows(kind, 71, num_inputs), num_inputs)
    x = whole_inputs(num_rows, num_inputs)
    expected = x.astype(np.float64) @ matrix.values().T.astype(np.float64)
    assert relative_error(matrix.multiply(x), expected) < 2e-6


def test_inputs_are_quantized_to_the_nearest(kernels: Kernels) -> None:
    x = np.random.default_rng(6).standard_normal((7, 320)).astype(np.float32)
    x[3, 64:96] = 0
    inputs = kernels.quantize(x)
    largest = np.abs(x).reshape(7, -1, 32).max(-1)
    np.testing.assert_allclose(inputs.scales, largest / 127, rtol=1e-6)
    assert (np.abs(inputs.values.reshape(7, -1, 32)).max(-1) == np.where(largest > 0, 127, 0)).all()
    half_steps = (inputs.scales.astype(np.float64) / 2).repeat(32, axis=-1)
    assert (np.abs(inputs.dequantized() - x) <= half_steps * (1 + 1e-4)).all()
    sums = inputs.dequantized().reshape(7, -1, 32).sum(-1)
    np.testing.assert_allclose(inputs.sums, sums, rtol=1e-6, atol=1e-12)


@each_case("kind", STORE_OF)
@each_case(("num_inputs", "num_outputs"), [(32, 1), (96, 33), (576, 100), (1536, 64)])
def test_a_product_of_the_quantized_inputs_is_exact_to_rounding(
    kernels: Kernels, kind: str, num_inputs: int, num_outputs: int
) -> None:
    """For any number of rows; the sum of a group has no rounding, that of the groups is a float's."""
    num_inputs = width(kind, num_inputs)
    matrix = kernels.pack(*STORE_OF[kind], kind, random_rows(kind, num_outputs, num_inputs), num_inputs)
    x = np.random.default_rng(7).standard_normal((70, num_inputs)).astype(np.float32)
    inputs = kernels.quantize(x).dequantized()
    weights = matrix.values().T.astype(np.float64)
    all_rows = matrix.multiply(x)
    assert (np.abs(all_rows - inputs @ weights) <= 4e-7 * (np.abs(inputs) @ np.abs(weights))).all()
    for num_rows in range(1, 70):
        np.testing.assert_array_equal(matrix.multiply(x[:num_rows]), all_rows[:num_rows])


@each_case("kind", STORE_OF)
def test_instruction_sets_give_the_same_product(compiled: Callable[[str], Kernels], kind: str) -> None:
    """All add the same numbers in the same order; without fused multiply-add, each is rounded once more."""
    num_inputs = width(kind, 576)
    raw = random_rows(kind, 40, num_inputs)
    x = np.random.default_rng(8).standard_normal((13, num_inputs)).astype(np.float32)
    *fused, portable = (
        compiled(name).pack(*STORE_OF[kind], kind, raw, num_inputs).multiply(x) for name in instruction_sets()
    )
    for product in fused:
        np.testing.assert_array_equal(product, fused[0])
        assert relative_error(product, portable.astype(np.float64)) < 1e-3


@each_case("dtype", ["float", "bf16"])
@each_case("kind", STORE_OF)
@each_case(("num_inputs", "num_outputs"), [(32, 1), (256, 33), (576, 100), (1536, 64)])
def test_a_product_is_near_that_of_plain_numbers(
    kernels: Kernels, kind: str, num_inputs: int, num_outputs: int, dtype: str
) -> None:
    num_inputs = width(kind, num_inputs)
    raw = random_rows(kind, num_outputs, num_inputs)
    x = np.random.default_rng(3).standard_normal((5, num_inputs)).astype(np.float32)
    matrix = kernels.pack(*STORE_OF[kind], kind, raw, num_inputs)
    if dtype == "bf16":
        x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    expected = x.astype(np.float64) @ dequantized(kind, raw).T.astype(np.float64)
    # 32 normal numbers in 255 steps: an error of 0.5 to 0.6 % each, and as much of their sum
    assert relative_error(matrix.multiply(x, dtype), expected) < (0.012 if num_outputs > 1 else 0.03)


def test_the_largest_bytes_do_not_overflow(kernels: Kernels) -> None:
    """-128 and 127 against inputs of either sign: where sums of 16 bits would be cut off."""
    blocks = np.zeros((4, 8, 34), np.uint8)
    blocks[:, :, :2] = np.array([1.0], np.float16).view(np.uint8)
    weights = np.array([-128, 127, -127, 1], np.int8)
    blocks[:, :, 2:] = weights.view(np.uint8)[:, None, None]
    x = np.full((3, 256), 127, np.float32)
    x[1] = -127
    x[2, ::2] = -127
    expected = x.sum(-1, keepdims=True) * weights.astype(np.float32)
    matrix = kernels.pack("Q8", 32, "Q8_0", blocks.reshape(4, -1), 256)
    np.testing.assert_array_equal(matrix.multiply(x), expected)
    fours = np.full((2, 8, 20), 0xFF, np.uint8)
    fours[:, :, :4] = np.array([1.0, -2.0], np.float16).view(np.uint8)
    matrix = kernels.pack("Q4", 32, "Q4_1", fours.reshape(2, -1), 256)
    np.testing.assert_allclose(matrix.multiply(x), 13 * x.sum(-1, keepdims=True).repeat(2, axis=1), rtol=1e-6)
    floats = np.full((2, 8, 17), [[[0x77]], [[0xFF]]], np.uint8)  # 6 and -6 throughout
    floats[:, :, 0] = 127  # 2 to the power of 0
    matrix = kernels.pack("E2M1", 32, "MXFP4", floats.reshape(2, -1), 256)
    np.testing.assert_array_equal(matrix.multiply(x), x.sum(-1, keepdims=True) * [6, -6])


def test_zeros_large_and_small_inputs_keep_their_size(kernels: Kernels) -> None:
    raw = random_rows("Q8_0", 33, 128)
    matrix = kernels.pack("Q8", 32, "Q8_0", raw, 128)
    x = np.random.default_rng(4).standard_normal((4, 128)).astype(np.float32)
    x *= np.array([[0.0], [1e-20], [1e20], [1.0]], np.float32)
    actual = matrix.multiply(x)
    expected = x.astype(np.float64) @ dequantized("Q8_0", raw).T.astype(np.float64)
    assert not actual[0].any()
    for row in range(1, 4):
        assert relative_error(actual[row], expected[row]) < 0.02


@each_case("bad", [np.nan, np.inf, -np.inf])
@each_case("kind", ["Q8_0", "Q4_1", "Q6_K", "Q5_1", "Q2_K", "MXFP4", "E2M1_16"])
@each_case("place", [0, 17, 255])
def test_a_number_that_is_none_spoils_its_row_only(
    kernels: Kernels, kind: str, place: int, bad: float
) -> None:
    matrix = kernels.pack(*STORE_OF[kind], kind, random_rows(kind, 33, 256), 256)
    x = np.random.default_rng(5).standard_normal((3, 256)).astype(np.float32)
    x[1, place] = bad
    y = matrix.multiply(x)
    assert not np.isfinite(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()


# ---- Float panels ----


@each_case("kind", STORE_OF)
def test_an_expanded_panel_has_the_same_numbers(kernels: Kernels, kind: str) -> None:
    num_inputs = width(kind, 160)
    matrix = kernels.pack(*STORE_OF[kind], kind, random_rows(kind, 45, num_inputs), num_inputs)
    values = matrix.values()
    # Q8_MIN: scale * (byte - 128) + minimum as scale * byte + (minimum - 128 scale), whose parts are larger
    atol = np.abs(values).max() * 2.0**-20 if STORE_OF[kind][0] == "Q8_MIN" else 1e-8
    np.testing.assert_allclose(matrix.expanded("float"), values, rtol=3e-7, atol=atol)
    bits = values.view(np.uint32)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    if STORE_OF[kind][0] in HAVE_MINIMA:  # scale * number + minimum may be rounded once or twice
        np.testing.assert_allclose(matrix.expanded("bf16"), nearest, rtol=2.0**-7, atol=atol)
        assert (matrix.expanded("bf16") != nearest).mean() < 0.01
    else:
        np.testing.assert_array_equal(matrix.expanded("bf16"), nearest)
