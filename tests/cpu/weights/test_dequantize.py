from __future__ import annotations

import random
import struct

import gguf
import numpy as np
import pytest

from onbeat.engine.dtypes import BFLOAT16, FLOAT32, FLOAT64
from onbeat.engine.weights.open import SUPPORTED_TYPES, dequantize_rows
from tests.cpu.weights.ggml_blocks import DECODERS


def random_blocks(name: str, count: int, seed: int = 0) -> list[bytes]:
    """Random bytes with sane half-precision scales (random ones may be NaN)."""
    rng = random.Random(f"{name} {seed}")
    _, size, _, halves = DECODERS[name]
    blocks = []
    for _ in range(count):
        block = bytearray(rng.randbytes(size))
        for offset in halves:
            struct.pack_into("<e", block, offset, rng.uniform(-2, 2))
        if name in ("F32", "BF16"):
            block = bytearray(struct.pack("<f", rng.uniform(-2, 2))[4 - size :])
        if name == "MXFP4":
            block[0] = rng.randint(0, 200)
        blocks.append(bytes(block))
    return blocks


def test_the_decoders_cover_every_supported_type() -> None:
    assert {kind.name for kind in SUPPORTED_TYPES} == set(DECODERS)


@pytest.mark.parametrize("name", DECODERS)
def test_every_type_equals_its_definition(name: str) -> None:
    block_size, _, decode, _ = DECODERS[name]
    num_rows, blocks_per_row = 5, max(3, 64 // block_size)
    blocks = random_blocks(name, num_rows * blocks_per_row)
    expected = np.array([value for block in blocks for value in decode(block)])
    rows = np.frombuffer(b"".join(blocks), dtype=np.uint8).reshape(num_rows, -1)
    shape = (num_rows, blocks_per_row * block_size)
    kind = gguf.GGMLQuantizationType[name]
    values = dequantize_rows(rows, shape, kind, FLOAT32)
    assert values.dtype == FLOAT32
    np.testing.assert_allclose(values, expected.reshape(shape), rtol=1e-6, atol=1e-6)
    # A lower precision is the float32 result rounded once.
    assert np.array_equal(dequantize_rows(rows, shape, kind, BFLOAT16), values.astype(BFLOAT16))
    assert np.array_equal(dequantize_rows(rows, shape, kind, FLOAT64), values.astype(FLOAT64))
    # Bit for bit what the gguf package makes of it, in whatever pieces.
    assert np.array_equal(values, gguf.quants.dequantize(rows, kind))


def test_hand_computed_q4_0_block() -> None:
    # Scale 0.5; byte i has i in its low half (number i) and 15 - i in its high half (number 16 + i).
    block = struct.pack("<e", 0.5) + bytes(i | (15 - i) << 4 for i in range(16))
    rows = np.frombuffer(block, dtype=np.uint8).reshape(1, -1)
    values = dequantize_rows(rows, (1, 32), gguf.GGMLQuantizationType.Q4_0, FLOAT32)
    assert values[0].tolist() == [0.5 * (i - 8) for i in range(16)] + [0.5 * (7 - i) for i in range(16)]


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "F16"])
def test_pieces_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block_size, *_ = DECODERS[name]
    num_rows, blocks_per_row = 37, max(2, 64 // block_size)
    rows = np.frombuffer(b"".join(random_blocks(name, num_rows * blocks_per_row)), np.uint8).reshape(
        num_rows, -1
    )
    shape, kind = (num_rows, blocks_per_row * block_size), gguf.GGMLQuantizationType[name]
    whole = dequantize_rows(rows, shape, kind, FLOAT32, minus=1.0)
    monkeypatch.setattr("onbeat.engine.weights.open._PIECE_NUMBERS", 5 * shape[1])
    assert np.array_equal(dequantize_rows(rows, shape, kind, FLOAT32, minus=1.0), whole)
    assert np.array_equal(whole, gguf.quants.dequantize(rows, kind) - np.float32(1))
