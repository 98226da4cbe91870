"""What quantized weights do to a real model: the perplexity of a chapter of a novel, SmolLM2-135M."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from onbeat.engine.attention.base import AttentionBatch
from onbeat.engine.config import Quantization
from onbeat.engine.forward import ForwardPass
from onbeat.engine.input_batch import StepInputs
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.weights import Checkpoint, open_checkpoint
from onbeat.hub.files import ModelFiles
from onbeat.text.tokenizer import load_tokenizer
from tests.cpu.engine.forwards import on_native

pytestmark = [pytest.mark.slow, pytest.mark.golden]

TEXT = Path(__file__).parents[2] / "data/pride_and_prejudice.txt"
BLOCK_SIZE = 16
CHUNKS = {"few rows": 32, "many rows": 512}
"""Tokens of a step: quantized weights meet few of them in integers, many in bfloat16."""

Perplexity = Callable[[Quantization, int], float]


@pytest.fixture(scope="module")
def checkpoint(smollm2_gguf: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles(kind="gguf", path=smollm2_gguf, name="smollm2"))


@pytest.fixture(scope="module")
def token_ids(smollm2_gguf: Path) -> list[int]:
    return load_tokenizer(smollm2_gguf).encode(TEXT.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def perplexity(native_library: NativeLibrary, checkpoint: Checkpoint, token_ids: list[int]) -> Perplexity:
    """Return what measures one way of keeping the weights."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)

    def measure(quantization: Quantization, chunk: int) -> float:
        make = on_native(native_library, checkpoint, dtype=torch.bfloat16, quantization=quantization)
        forward = make(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        return float(np.exp(surprise(forward, token_ids, chunk) / (len(token_ids) - 1)))

    return measure


def surprise(forward: ForwardPass, token_ids: list[int], chunk: int) -> float:
    """Return the sum of -log p of every token but the first, run `chunk` tokens at a time."""
    total = 0.0
    for start in range(0, len(token_ids) - 1, chunk):
        end = min(start + chunk, len(token_ids) - 1)
        logits_TV = forward.run(one_chunk(token_ids, start, end), wants_logits=True).values_RV
        assert logits_TV is not None
        targets_T = torch.tensor(token_ids[start + 1 : end + 1])
        total += float(torch.nn.functional.cross_entropy(logits_TV.double(), targets_T, reduction="sum"))
    return total


def one_chunk(token_ids: list[int], start: int, end: int) -> StepInputs:
    """Tokens of a request that is alone, all of them with logits; its blocks lie in order."""
    positions_T = np.arange(start, end)
    return StepInputs(
        token_ids_T=np.array(token_ids[start:end]),
        positions_T=positions_T,
        attention=AttentionBatch(
            query_lens_R=np.array([end - start]),
            context_lens_R=np.array([end]),
            slots_R=np.array([0]),
            block_tables_SB=np.arange(-(-len(token_ids) // BLOCK_SIZE), dtype=np.int32)[None],
            slot_mapping_T=positions_T,
        ),
        sampling_tokens=np.arange(end - start),
        sampling_rows=[],
        sampling_request_ids=[],
        sampling_slots=np.array([], np.int64),
        sampling_positions=np.array([], np.int64),
    )


@pytest.mark.parametrize("rows", CHUNKS)
def test_perplexity_hardly_changes(perplexity: Perplexity, rows: str) -> None:
    chunk = CHUNKS[rows]
    dequantized, int8, in_place = (perplexity(way, chunk) for way in ("none", "int8", "auto"))
    assert 5 < dequantized < 40  # the model, and the text, are what they should be
    assert int8 == pytest.approx(dequantized, rel=0.01)
    # the file's own numbers, 4 bits: as they are, but for what inputs of 8 bits lose
    assert in_place == pytest.approx(dequantized, rel=0.02)
