"""Layers whose queries, keys and values are of different types: K-quant mixtures keep values in more bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from onbeat.engine.dtypes import FLOAT32
from onbeat.engine.engine_config import ActivationQuantization, Quantization
from onbeat.engine.native.layouts import NATURAL_LAYOUTS, PLAIN_LAYOUTS
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.torch.weights import load_weights
from onbeat.engine.weights.checkpoint import Checkpoint
from onbeat.engine.weights.open import open_checkpoint
from onbeat.hub.files import ModelFiles
from tests.cpu.engine.forwards import on_native, on_torch, pack
from tests.cpu.engine.tiny_models import random_prompt
from tests.cpu.native.quant_kernels import random_rows
from tests.cpu.native.test_forward import first_logits, inputs_of, relative_error
from tests.cpu.weights import tiny_models as gguf_models

CPU = torch.device("cpu")
EXACT = ("Q5_1", "Q4_1", "Q8_0")
"""Types that stores hold to the last bit; scales of K-quants are rounded to half precision."""
MIXTURES = [
    ("Q4_K", "Q4_K", "Q6_K"),  # of Q4_K_M
    ("Q4_K", "Q4_K", "Q5_K"),  # of Q4_K_S
    ("Q6_K", "Q4_K", "Q6_K"),
    ("Q6_K", "Q8_0", "Q4_K"),
    ("Q2_K", "Q2_K", "Q3_K"),  # of Q2_K
    ("Q3_K", "Q3_K", "Q5_K"),  # of Q3_K_M
    ("IQ4_XS", "IQ4_NL", "F32"),
    EXACT,
]
"""Types of queries, keys and values."""


def write_and_open(path: Path, types: tuple[str, str, str], *, has_bias: bool) -> Checkpoint:
    """A tiny Llama whose values do not begin with a panel of the kernels: queries and keys are 144 rows."""
    sizes: dict[str, Any] = gguf_models.COMMON | {"hidden_size": 256, "vocab_size": 211}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, head_dim=24, attention_bias=has_bias)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers makes them zero
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    kinds = {f"attn_{part}.weight": kind for part, kind in zip("qkv", types, strict=True)}
    writer = gguf.GGUFWriter(path, "llama")
    gguf_models.write_metadata(writer, config)
    for name, tensor in gguf_models.parameters(model).items():
        short, values = gguf_models.to_gguf(name, tensor.numpy(), config)
        kind = kinds.get(short.split(".", 2)[-1])  # without the layer
        if kind in (None, "F32"):
            writer.add_tensor(short, values)
        else:
            num_rows, num_inputs = values.shape
            raw = random_rows(kind, num_rows, num_inputs, seed=len(writer.tensors[0]), factor=0.1)
            writer.add_tensor(short, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    gguf_models.finish(writer)
    return open_checkpoint(ModelFiles(kind="gguf", path=path, name="tiny"))


@pytest.mark.parametrize("types", [EXACT, ("Q4_K", "Q4_K", "Q5_K")], ids="-".join)
@pytest.mark.parametrize("quantization", ["auto", "int8"])
@pytest.mark.parametrize("num_tokens", [15, 16, 37, 64, 65])
def test_inputs_that_threads_quantize_together_are_those_of_one(
    native_library: NativeLibrary,
    types: tuple[str, str, str],
    quantization: Quantization,
    num_tokens: int,
    tmp_path: Path,
) -> None:
    """Of few rows each thread makes them all, and of all where one matrix is a plain one."""
    checkpoint = write_and_open(tmp_path / "model.gguf", types, has_bias=False)
    inputs, found = inputs_of(random_prompt(num_tokens)), []
    for num_threads in (1, 2, 3):
        make = on_native(native_library, checkpoint, quantization=quantization, num_threads=num_threads)
        logits = make(num_blocks=8, block_size=16).run(inputs, wants_logits=True).values_RV
        assert logits is not None
        found.append(logits)
    assert all(np.array_equal(logits, found[0]) for logits in found)


@pytest.mark.parametrize("types", MIXTURES, ids="-".join)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_quantized_parts_stay_quantized(
    native_library: NativeLibrary, types: tuple[str, str, str], has_bias: bool, tmp_path: Path
) -> None:
    checkpoint = write_and_open(tmp_path / "model.gguf", types, has_bias=has_bias)
    weights = pack(native_library, checkpoint, quantization="auto")
    stores = {NATURAL_LAYOUTS.get(name, PLAIN_LAYOUTS[FLOAT32]).store for name in types}
    for layer in weights.layers:
        assert {matrix.layout.store for matrix in layer.qkv} == stores
        assert sum(matrix.num_outputs for matrix in layer.qkv) == 8 * 24

    exact = first_logits(on_torch(load_weights(checkpoint, dtype=torch.float32, device=CPU)))
    for instruction_set in native_library.instruction_sets:
        errors: dict[ActivationQuantization, float] = {"auto": 0.03, "none": 1e-5 if types == EXACT else 2e-3}
        for activations, error in errors.items():
            make = on_native(
                native_library,
                checkpoint,
                quantization="auto",
                activation_quantization=activations,
                num_threads=3,
                instruction_set=instruction_set,
            )
            assert relative_error(first_logits(make), exact) < error, (instruction_set, activations)


def test_mixed_types_in_bfloat16(native_library: NativeLibrary, tmp_path: Path) -> None:
    checkpoint = write_and_open(tmp_path / "model.gguf", MIXTURES[0], has_bias=True)
    exact = first_logits(on_torch(load_weights(checkpoint, dtype=torch.float32, device=CPU)))
    make = on_native(native_library, checkpoint, dtype=torch.bfloat16, quantization="auto")
    assert relative_error(first_logits(make), exact) < 0.03
