"""Products by the tiles of AMX: emulated, and by the very instructions, carried out where they trap."""

from __future__ import annotations

import platform
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from onbeat.engine.engine_config import ActivationQuantization
from onbeat.engine.native.library import CallStatus, MatrixLayout, NativeLibrary, PackedMatrix, Source, Store
from tests.cpu.engine.forwards import on_native, rows_of
from tests.cpu.engine.stateful_models import STATEFUL
from tests.cpu.engine.tiny_models import FAMILIES, ON_TORCH
from tests.cpu.native.amx_kernels import (
    Floats,
    Halves,
    Shim,
    compile_units,
    emulated_units,
    trapped_engine_units,
    trapped_units,
)
from tests.cpu.native.fuzz_sizes import Sizes, draw_sizes
from tests.cpu.native.fuzz_steps import Engine, draw_step
from tests.cpu.native.test_batch_invariant import all_logits, open_quantized
from tests.cpu.native.test_forward import checkpoint_of, first_logits, relative_error

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the processor is no x86"),
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    # Emulated tiles are no product's code: a quick compiler matters more here than quick code.
    return Shim(compile_units(emulated_units(), tmp_path_factory.mktemp("emulated"), ["-O2"]))


@pytest.fixture(scope="module")
def emulated_library(emulated: Shim) -> NativeLibrary:
    library = NativeLibrary(emulated.library)
    assert library.instruction_sets == ("amx_emulated",)
    return library


@pytest.fixture(scope="module")
def trapped(native_library: NativeLibrary, tmp_path_factory: pytest.TempPathFactory) -> Shim:
    # A processor with tiles runs the instruction that configures them before the system was asked for them
    # (the library asks), and traps only the others.
    if native_library.withheld:
        pytest.skip(f"only some instructions of tiles trap here: {native_library.withheld}")
    return Shim(compile_units(trapped_units(), tmp_path_factory.mktemp("trapped")), traps=True)


@pytest.fixture(scope="module", params=["emulated", "trapped"])
def shim(request: pytest.FixtureRequest) -> Shim:
    shim: Shim = request.getfixturevalue(request.param)
    return shim


def halves(values: Floats) -> Halves:
    """Cut to the upper half of the bits."""
    return np.ascontiguousarray(values).view(np.uint32).__rshift__(16).astype(np.uint16)


def floats(bits: Halves) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def padded(values: Floats) -> Halves:
    """Return inputs as the engine keeps them, zeros up to a multiple of 32."""
    missing = -values.shape[1] % 32
    return halves(np.pad(values, ((0, 0), (0, missing))))


def whole_numbers(shape: tuple[int, int], seed: int) -> Floats:
    """Products of these and their sums are exact."""
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


def packed(library: NativeLibrary, rows: Floats) -> PackedMatrix:
    num_outputs, num_inputs = rows.shape
    matrix = PackedMatrix(library, MatrixLayout(Store.BF16), num_outputs=num_outputs, num_inputs=num_inputs)
    assert matrix.pack(halves(rows), Source.BF16, np.arange(num_outputs))
    return matrix


# ---- One product of tiles ----


def flushed(values: NDArray[np.floating]) -> Floats:
    small = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(small, np.copysign(0, values), values).astype(np.float32)


def test_a_product_of_tiles_rounds_as_the_manual_says(shim: Shim) -> None:
    """Even and odd inputs apart, from zero, then both, then onto the tile; subnormal numbers are zeros."""
    rng = np.random.default_rng(0)
    numbers = [rng.standard_normal((16, 32)) * 10.0 ** rng.integers(-25, 3, (16, 32)) for _ in range(2)]
    inputs, weights = (halves(each.astype(np.float32)) for each in numbers)
    inputs[3, 7] = weights[2, 5] = 0x0012  # subnormal
    sums = rng.standard_normal((16, 16)).astype(np.float32)
    sums[4, 4] = 1e-40
    pairs = flushed(floats(weights)).reshape(16, 16, 2)  # of pair, output and part
    parts = np.zeros((2, 16, 16), np.float32)
    for pair in range(16):
        for part in range(2):
            first = flushed(floats(inputs))[:, 2 * pair + part, None].astype(np.float64)
            exact = first * pairs[pair, :, part]  # a product of two bfloat16 has 16 bits
            parts[part] = flushed((parts[part].astype(np.float64) + exact).astype(np.float32))
    expected = flushed(flushed(sums) + flushed(parts[0] + parts[1]))
    np.testing.assert_array_equal(shim.madd(sums, inputs, weights), expected)


# ---- Products of matrices ----


@pytest.mark.parametrize("num_inputs", [1, 31, 64, 100])
@pytest.mark.parametrize("num_outputs", [1, 33])
def test_every_number_of_rows(
    emulated: Shim, native_library: NativeLibrary, num_inputs: int, num_outputs: int
) -> None:
    weights = whole_numbers((num_outputs, num_inputs), 1)
    matrix = packed(native_library, weights)
    for num_rows in range(1, 71):
        x = whole_numbers((num_rows, num_inputs), num_rows)
        np.testing.assert_array_equal(emulated.multiply(matrix, padded(x)), x @ weights.T, str(num_rows))


@pytest.mark.parametrize("num_rows", [3, 4, 15, 16, 17, 31, 32, 33, 49, 70])
def test_the_instructions_themselves(trapped: Shim, native_library: NativeLibrary, num_rows: int) -> None:
    """As the product is compiled, configuration, strides and numbers of tiles are those that are meant."""
    weights, x = whole_numbers((70, 100), 1), whole_numbers((num_rows, 100), 2)
    trapped.num_products = 0
    np.testing.assert_array_equal(trapped.multiply(packed(native_library, weights), padded(x)), x @ weights.T)
    has_tiles = "amx" in native_library.instruction_sets
    assert (trapped.num_products > 0) == (num_rows >= trapped.fewest_rows and not has_tiles)


def test_many_inputs_and_rows_of_several_chunks(emulated: Shim, native_library: NativeLibrary) -> None:
    rng = np.random.default_rng(3)
    weights, x = (floats(halves(rng.standard_normal((n, 9000)).astype(np.float32))) for n in (40, 150))
    matrix = packed(native_library, weights)
    expected = x.astype(np.float64) @ weights.T.astype(np.float64)
    actual = emulated.multiply(matrix, padded(x))
    assert np.linalg.norm(actual - expected) < 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("rows", [(0, 16), (3, 19), (5, 40), (7, 70)])
@pytest.mark.parametrize("panels", [(0, 1), (1, 3), (2, 2)])
def test_a_share_takes_nothing_else(
    emulated: Shim, native_library: NativeLibrary, rows: tuple[int, int], panels: tuple[int, int]
) -> None:
    """What lies beyond the rows is no number and reaches no sum; what is computed twice is written once."""
    weights, x = whole_numbers((80, 48), 1), whole_numbers((70, 48), 2)
    share = np.s_[rows[0] : rows[1], 32 * panels[0] : 32 * panels[1]]
    expected = np.zeros((70, 80), np.float32)
    expected[share] = (x @ weights.T)[share]
    x[: rows[0]] = x[rows[1] :] = np.nan
    actual = emulated.multiply(packed(native_library, weights), padded(x), rows, panels)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "layout", [MatrixLayout(Store.Q8, 32), MatrixLayout(Store.Q8, 16), MatrixLayout(Store.Q4, 32)]
)
def test_many_rows_meet_quantized_weights_as_tiles(
    trapped: Shim, native_library: NativeLibrary, layout: MatrixLayout
) -> None:
    """Few rows are made bytes of, which loses some of them; many are not."""
    rng = np.random.default_rng(5)
    num_outputs, num_inputs = 70, 96
    matrix = PackedMatrix(native_library, layout, num_outputs=num_outputs, num_inputs=num_inputs)
    if layout.store is Store.Q4:
        blocks = rng.integers(0, 256, (num_outputs, num_inputs // 32, 20), np.uint8)
        blocks[:, :, :4] = np.array([0.03, -0.2], np.float16).view(np.uint8)  # scale and minimum
        assert matrix.pack(blocks.reshape(num_outputs, -1), Source.Q4_1, np.arange(num_outputs))
    else:
        rows = rng.standard_normal((num_outputs, num_inputs)).astype(np.float32)
        assert matrix.pack(rows, Source.F32, np.arange(num_outputs))
    weights = rows_of(matrix).astype(np.float64)
    weights = floats(rounded(weights.astype(np.float32))).astype(np.float64)
    num_rows = int(trapped.library.shim_fewest_expanded_rows())
    x = floats(halves(rng.standard_normal((num_rows + 5, num_inputs)).astype(np.float32)))
    expected = x.astype(np.float64) @ weights.T
    trapped.num_products = 0
    few = trapped.multiply(matrix, padded(x[: num_rows - 1]))
    assert trapped.num_products == 0
    assert 1e-4 < relative_norm(few, expected[: num_rows - 1]) < 2e-2
    many = trapped.multiply(matrix, padded(x))
    assert trapped.num_products > 0 or "amx" in native_library.instruction_sets
    assert relative_norm(many, expected) < 1e-6


def rounded(values: Floats) -> Halves:
    """Round to the nearest bfloat16; of two, the even one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def relative_norm(actual: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


# ---- The engine ----


@pytest.mark.parametrize("name", ON_TORCH | STATEFUL)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_models_compute_the_same(
    native_library: NativeLibrary, emulated_library: NativeLibrary, name: str, num_threads: int
) -> None:
    checkpoint, dtype = checkpoint_of(name), torch.bfloat16
    portable = on_native(native_library, checkpoint, dtype=dtype, instruction_set="portable")
    emulated = on_native(emulated_library, checkpoint, dtype=dtype, num_threads=num_threads)
    error = 0.1 if name == "qwen3.5" else 0.03  # of which bfloat16 moves one row by 0.26 from float32's
    assert relative_error(first_logits(emulated), first_logits(portable)) < error


def test_many_rows_of_logits(native_library: NativeLibrary, emulated_library: NativeLibrary) -> None:
    """The vocabulary, too, is multiplied by tiles."""
    checkpoint, lengths = checkpoint_of("llama3"), tuple(range(1, 25))
    portable = on_native(native_library, checkpoint, dtype=torch.bfloat16, instruction_set="portable")
    emulated = on_native(emulated_library, checkpoint, dtype=torch.bfloat16)
    assert relative_error(first_logits(emulated, lengths), first_logits(portable, lengths)) < 0.03


def random_sizes(rng: np.random.Generator) -> Sizes:
    """Heads whose width is one of tiles, and as many for one KV head as no block of rows holds."""
    num_kv_heads = int(rng.integers(1, 3))
    return replace(
        draw_sizes(rng),
        head_dim=32 * int(rng.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * int(rng.choice([1, 3, 4, 7, 16, 40])),
        hidden=8 * int(rng.integers(1, 30)),
        layout=MatrixLayout(Store.BF16),
        is_bfloat16=True,
    )


@pytest.mark.parametrize("seed", range(12))
def test_attention_of_any_shape(
    native_library: NativeLibrary, emulated_library: NativeLibrary, seed: int
) -> None:
    """Windows, odd numbers of pages, prompts in pieces, many heads for one: as without tiles."""
    rng = np.random.default_rng(seed)
    sizes = random_sizes(rng)
    engines = [
        Engine(library, sizes, np.random.default_rng(seed)) for library in (emulated_library, native_library)
    ]
    for _ in range(4):
        fields = draw_step(sizes, rng)
        samples = np.cumsum(fields["query_lens"]) - 1
        found = []
        for engine in engines:
            logits = np.full((len(samples), sizes.vocab), np.nan, np.float32)
            own = {
                "num_samples": len(samples),
                "sample_tokens": samples,
                "logits": logits,
                "best_ids": np.empty(len(samples), np.int64),
                "best_logits": np.empty(len(samples), np.float32),
            }
            assert engine.step(**{**fields, **own}) == CallStatus.OK
            found.append(torch.from_numpy(logits))
        assert relative_error(*found) < 0.03
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("name", ["llama3", "mistral-sliding", "gemma3"])
def test_batch_invariant_plain_weights(emulated_library: NativeLibrary, name: str) -> None:
    """All rows meet weights and pages of keys as tiles, however few they are."""
    checkpoint = checkpoint_of(name)
    for is_invariant in (True, False):
        found = all_logits(
            emulated_library,
            checkpoint,
            dtype=torch.bfloat16,
            instruction_set="amx_emulated",
            batch_invariant=is_invariant,
        )
        assert all(torch.equal(logits, found[0]) for logits in found) == is_invariant


@pytest.mark.parametrize(("kind", "activations"), [("Q4_K", "auto"), ("Q8_0", "none")])
def test_batch_invariant_quantized_weights(
    emulated_library: NativeLibrary, kind: str, activations: ActivationQuantization, tmp_path: Path
) -> None:
    found = all_logits(
        emulated_library,
        open_quantized(tmp_path, kind),
        dtype=torch.bfloat16,
        instruction_set="amx_emulated",
        activation_quantization=activations,
    )
    assert all(torch.equal(logits, found[0]) for logits in found)


@pytest.mark.slow
def test_models_compute_the_same_by_the_instructions_themselves(
    native_library: NativeLibrary, tmp_path: Path
) -> None:
    """The whole engine as the product is compiled; hundreds of thousands of instructions trap."""
    shim = Shim(compile_units(trapped_engine_units(), tmp_path), traps=True)
    library = NativeLibrary(shim.library)
    assert library.instruction_sets == ("amx",)
    with shim.trapping():
        for name in FAMILIES:
            test_models_compute_the_same(native_library, library, name, num_threads=3)
        for seed in range(4):
            test_attention_of_any_shape(native_library, library, seed)
    assert shim.num_products > 100_000 or "amx" in native_library.instruction_sets
