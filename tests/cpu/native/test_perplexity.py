"""What quantized weights and activations do to a real model: the perplexity of a chapter, SmolLM2-135M."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from onbeat.engine.dtypes import FLOAT32
from onbeat.engine.engine_config import ActivationQuantization, Quantization
from onbeat.engine.input_batch import AttentionBatch, StepInputs
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.weights.checkpoint import ALL_ROWS, Checkpoint, QuantizedRows
from onbeat.engine.weights.open import open_checkpoint
from onbeat.hub.files import ModelFiles
from onbeat.text.tokenizer import load_tokenizer
from tests.cpu.engine.forwards import MakeForward, on_native

pytestmark = [pytest.mark.slow, pytest.mark.golden]

TEXT = Path(__file__).parents[2] / "data/pride_and_prejudice.txt"
BLOCK_SIZE = 16
CHUNKS = {"few rows": 32, "many rows": 512}
"""Tokens of a step: few are divided among the threads by columns of the weights, many by rows."""
WEIGHTS = ("as in the file", "Q8_0", "Q4_0")
"""The file is of Q4_1, with an embedding of Q8_0."""
MOST_COST = {torch.float32: 0.005, torch.bfloat16: 0.01}
"""Of activations in 8 bits: most change of perplexity, of the same weights, beyond chance. In bfloat16 what
is rounded differs between both ways too, and more from one part of a text to the next than chance says."""
DOCUMENTS = Path(__file__).parents[3] / "docs"
WINDOW, NUM_WINDOWS = 1024, 4
"""Of the documents, so that chance is small: 0.13 % (standard error) with the novel, 0.25 % without."""

Perplexity = Callable[[Quantization, int], float]


class Requantized(Checkpoint):
    """A checkpoint whose matrices are quantized anew, to a GGUF type."""

    def __init__(self, checkpoint: Checkpoint, type_name: str) -> None:
        super().__init__(checkpoint.config)
        self._checkpoint = checkpoint
        self._type_name = type_name

    def get(self, name: str, dtype: np.dtype[Any], rows: slice = ALL_ROWS) -> NDArray[Any]:
        return self._checkpoint.get(name, dtype, rows)

    def quantized_rows(self, name: str) -> QuantizedRows | None:
        rows = self.get(name, FLOAT32)
        if rows.ndim != 2:
            return None
        data = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[self._type_name])
        return QuantizedRows(self._type_name, data.view(np.uint8).__getitem__, np.arange(len(rows)))


@pytest.fixture(scope="module")
def checkpoint(smollm2_gguf: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles(kind="gguf", path=smollm2_gguf, name="smollm2"))


@pytest.fixture(scope="module")
def token_ids(smollm2_gguf: Path) -> list[int]:
    return load_tokenizer(smollm2_gguf).encode(TEXT.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def windows(smollm2_gguf: Path) -> list[list[int]]:
    """Tokens of the documents, in parts that each begin anew."""
    pages = (path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.glob("*.md")))
    token_ids = load_tokenizer(smollm2_gguf).encode("\n\n".join(pages))
    return [token_ids[start : start + WINDOW] for start in range(0, NUM_WINDOWS * WINDOW, WINDOW)]


@pytest.fixture(scope="module")
def perplexity(native_library: NativeLibrary, checkpoint: Checkpoint, token_ids: list[int]) -> Perplexity:
    """Return what measures one way of keeping the weights."""

    def measure(quantization: Quantization, chunk: int) -> float:
        make = on_native(native_library, checkpoint, dtype=torch.bfloat16, quantization=quantization)
        return perplexity_of(logits_of(make, token_ids, chunk), token_ids)

    return measure


def logits_of(make: MakeForward, token_ids: list[int], chunk: int) -> torch.Tensor:
    """Run all tokens but the last, `chunk` tokens at a time: [tokens - 1, vocabulary]."""
    forward = make(num_blocks=-(-len(token_ids) // BLOCK_SIZE), block_size=BLOCK_SIZE)
    chunks = []
    for start in range(0, len(token_ids) - 1, chunk):
        end = min(start + chunk, len(token_ids) - 1)
        logits_TV = forward.run(one_chunk(token_ids, start, end), wants_logits=True).values_RV
        assert logits_TV is not None
        chunks.append(torch.from_numpy(logits_TV.copy()))
    return torch.cat(chunks)


def perplexity_of(logits_TV: torch.Tensor, token_ids: list[int]) -> float:
    """Return e to the mean loss of every token but the first."""
    return float(loss_of(logits_TV, token_ids).mean().exp())


def loss_of(logits_TV: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    """Return -log p of every token but the first."""
    targets_T = torch.tensor(token_ids[1:])
    return torch.nn.functional.cross_entropy(logits_TV.double(), targets_T, reduction="none")


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_activations_in_8_bits_hardly_change_anything(
    native_library: NativeLibrary,
    checkpoint: Checkpoint,
    token_ids: list[int],
    windows: list[list[int]],
    weights: str,
    dtype: torch.dtype,
) -> None:
    """Every most likely token is one after the text as it is: a changed one changes none after it."""
    source = checkpoint if weights == "as in the file" else Requantized(checkpoint, weights)
    ways: tuple[ActivationQuantization, ...] = ("none", "auto")
    makes = [
        on_native(native_library, source, dtype=dtype, quantization="auto", activation_quantization=way)
        for way in ways
    ]
    losses, agreements = [], []
    for window in [token_ids, *windows]:
        plain_TV, quantized_TV = (logits_of(make, window, CHUNKS["many rows"]) for make in makes)
        losses.append(loss_of(quantized_TV, window) - loss_of(plain_TV, window))
        agreements.append((plain_TV.argmax(-1) == quantized_TV.argmax(-1)).double())
    loss_T = torch.cat(losses)
    cost, chance = float(loss_T.mean().expm1()), float(loss_T.std() / len(loss_T) ** 0.5)
    assert chance < 0.002
    assert cost - 2 * chance < MOST_COST[dtype]
    assert torch.cat(agreements).mean() > 0.93
