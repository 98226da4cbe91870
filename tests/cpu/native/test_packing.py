"""A checkpoint's parameters in packed matrices: their order, their padding, their stores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from onbeat.core.errors import ModelLoadError
from onbeat.engine.dtypes import BFLOAT16, FLOAT32
from onbeat.engine.engine_config import Quantization
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.hf import model_config_from_hf
from onbeat.engine.model_config.rope import head_order
from onbeat.engine.native import packing
from onbeat.engine.native.layouts import LOOKED_UP, WeightLayouts
from onbeat.engine.native.library import NativeLibrary, Store
from onbeat.engine.native.packing import ExpertWeights, GatedWeights, NativeWeights
from onbeat.engine.torch.types import numpy_dtype
from onbeat.engine.weights.checkpoint import ALL_ROWS, Checkpoint
from onbeat.engine.weights.dummy import DummyCheckpoint
from onbeat.engine.weights.open import open_checkpoint
from onbeat.engine.weights.parameters import LAYER_NORMS
from onbeat.hub.files import ModelFiles
from tests.cpu.engine.forwards import pack, rows_of
from tests.cpu.engine.tiny_models import FAMILIES, StateCheckpoint, hf_tiny_model
from tests.cpu.weights import tiny_models as gguf_models

KINDS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
"""Types that the gguf package can write."""
Numbers = NDArray[np.float32]


def parameter(checkpoint: Checkpoint, name: str) -> Numbers:
    return checkpoint.get(name, FLOAT32)


def packed_layer(checkpoint: Checkpoint, weights: NativeWeights, index: int) -> dict[str, Numbers]:
    """A layer's matrices taken apart again, by the names of their parts."""
    config, layer = checkpoint.config, weights.layers[index]
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = np.split(np.concatenate([rows_of(matrix) for matrix in layer.qkv]), [query, query + kv])
    parts[:2] = [unordered(part, config) for part in parts[:2]]
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    matrices = dict(zip(names, [*parts, rows_of(layer.o)], strict=True))
    if isinstance(layer.feed_forward, GatedWeights):
        return matrices | packed_mlp("mlp", layer.feed_forward)
    matrices["mlp.gate"] = rows_of(layer.feed_forward.router)
    for expert, weights_of_it in enumerate(layer.feed_forward.experts):
        matrices |= packed_mlp(f"mlp.experts.{expert}", weights_of_it)
    return matrices


def unordered(rows: Numbers, config: ModelConfig) -> Numbers:
    """Numbers of heads in the family's own order again."""
    order = head_order(config.rope, config.head_dim)
    if order is None:
        return rows
    return rows.reshape(-1, config.head_dim, *rows.shape[1:])[:, np.argsort(order)].reshape(rows.shape)


def packed_mlp(name: str, weights: GatedWeights) -> dict[str, Numbers]:
    gate_up = rows_of(weights.gate_up)
    if len(gate_up) == weights.down.num_inputs:
        return {f"{name}.up_proj": gate_up, f"{name}.down_proj": rows_of(weights.down)}
    gate, up = np.split(gate_up.reshape(-1, 2, 16, gate_up.shape[1]), 2, axis=1)
    return {
        f"{name}.gate_proj": gate.reshape(-1, gate_up.shape[1]),
        f"{name}.up_proj": up.reshape(-1, gate_up.shape[1]),
        f"{name}.down_proj": rows_of(weights.down),
    }


def gated(weights: NativeWeights) -> GatedWeights:
    """The first layer's feed-forward, which has no experts."""
    feed_forward = weights.layers[0].feed_forward
    assert isinstance(feed_forward, GatedWeights)
    return feed_forward


def assert_layers_equal(checkpoint: Checkpoint, weights: NativeWeights, error: float) -> None:
    for index in range(checkpoint.config.num_layers):
        for name, actual in packed_layer(checkpoint, weights, index).items():
            expected = parameter(checkpoint, f"model.layers.{index}.{name}.weight")
            padding = [(0, more - less) for more, less in zip(actual.shape, expected.shape, strict=True)]
            expected = np.pad(expected, padding)
            difference = np.linalg.norm(actual - expected)
            assert difference <= error * np.linalg.norm(expected), f"layer {index}, {name}"


@pytest.mark.parametrize("name", FAMILIES)
def test_all_parameters_of_every_family(native_library: NativeLibrary, name: str) -> None:
    checkpoint = StateCheckpoint(hf_tiny_model(name, torch.float32))
    weights = pack(native_library, checkpoint, num_threads=2)
    config = checkpoint.config
    assert_layers_equal(checkpoint, weights, 0.0)
    np.testing.assert_array_equal(
        rows_of(weights.embedding), parameter(checkpoint, "model.embed_tokens.weight")
    )
    assert (weights.lm_head is weights.embedding) == config.tie_word_embeddings
    offset = 1.0 if name.startswith("gemma") else 0.0

    def norm_of(name: str) -> Numbers:
        scale = parameter(checkpoint, f"{name}.weight").ravel() + offset
        has_bias = f"{name}.bias" in checkpoint.names()
        return np.concatenate([scale, parameter(checkpoint, f"{name}.bias")]) if has_bias else scale

    final_norm, divisor = norm_of("model.norm"), config.logits_divisor * (config.logits_softcap or 1.0)
    np.testing.assert_array_equal(weights.final_norm, final_norm)
    np.testing.assert_array_equal(weights.head_norm, final_norm / np.float32(divisor))
    vectors = weights.layers[1].vectors
    norms = LAYER_NORMS[config.norms]
    for actual, norm in (
        (vectors["attention_norm"], norms.attention),
        (vectors["mlp_norm"], norms.mlp),
        (vectors["after_attention_norm"], norms.after_attention),
        (vectors["after_mlp_norm"], norms.after_mlp),
        (vectors["query_norm"], "self_attn.q_norm" if config.qk_norm else None),
        (vectors["key_norm"], "self_attn.k_norm" if config.qk_norm else None),
    ):
        assert (actual is None) == (norm is None)
        if norm is not None and actual is not None:
            is_of_heads = norm.startswith("self_attn")
            found = unordered(actual, config) if is_of_heads else actual
            np.testing.assert_array_equal(found, norm_of(f"model.layers.1.{norm}"))
    assert (vectors["qkv_bias"] is not None) == config.attention_bias
    if vectors["qkv_bias"] is not None:
        biases = [parameter(checkpoint, f"model.layers.1.self_attn.{part}_proj.bias") for part in "qkv"]
        split = np.split(vectors["qkv_bias"], np.cumsum([len(bias) for bias in biases])[:2])
        split[:2] = [unordered(part, config) for part in split[:2]]
        np.testing.assert_array_equal(np.concatenate(split), np.concatenate(biases))
    assert weights.num_bytes == sum(matrix.num_bytes for matrix in set(weights.matrices))


@pytest.mark.parametrize(("quantization", "padded"), [("none", 48), ("int8", 64)])
def test_a_ragged_feed_forward_width_is_padded_with_zeros(
    native_library: NativeLibrary, quantization: Quantization, padded: int
) -> None:
    checkpoint = DummyCheckpoint(small_config(intermediate_size=41))
    weights = pack(native_library, checkpoint, quantization=quantization)
    assert gated(weights).down.num_inputs == padded
    assert_layers_equal(checkpoint, weights, 0.01)


def small_config(**changes: Any) -> ModelConfig:
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    return model_config_from_hf(sizes | changes)


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_int8_is_near_the_weights_and_takes_a_quarter(native_library: NativeLibrary, name: str) -> None:
    checkpoint = StateCheckpoint(hf_tiny_model(name, torch.float32))
    weights = pack(native_library, checkpoint, quantization="int8")
    assert weights.stores == "q8"
    assert_layers_equal(checkpoint, weights, 0.01)
    assert weights.num_bytes < 0.45 * pack(native_library, checkpoint).num_bytes


def test_int8_of_sizes_that_no_group_divides_names_the_parameter(native_library: NativeLibrary) -> None:
    checkpoint = DummyCheckpoint(small_config(hidden_size=40, head_dim=8))
    with pytest.raises(ModelLoadError, match=r"embed_tokens.*40.*int8"):
        pack(native_library, checkpoint, quantization="int8")


def write_and_open(path: Path, types: dict[str, str]) -> Checkpoint:
    """A tiny Llama whose matrices have these GGUF types, by the endings of their names."""
    model = gguf_models.tiny_model("llama")
    names = [gguf_models.to_gguf(name, value.numpy(), model.config)[0] for name, value in
             gguf_models.parameters(model).items() if value.dim() == 2]  # fmt: skip
    kinds = {
        name: gguf.GGMLQuantizationType[kind]
        for name in names
        for ending, kind in types.items()
        if name.endswith(f"{ending}.weight")
    }
    gguf_models.write_gguf(path, model, kinds)
    return open_checkpoint(ModelFiles(kind="gguf", path=path, name="tiny"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_file_goes_in_as_it_is(native_library: NativeLibrary, kind: str, tmp_path: Path) -> None:
    checkpoint = write_and_open(tmp_path / "model.gguf", {"": kind})
    weights = pack(native_library, checkpoint, quantization="auto", num_threads=2)
    stores = {"Q4": "q4", "Q5_1": "q8_min"}
    assert weights.stores == stores.get(kind, stores.get(kind[:2], "q8"))
    assert_layers_equal(checkpoint, weights, 1e-3)
    embedding = parameter(checkpoint, "model.embed_tokens.weight")
    np.testing.assert_allclose(rows_of(weights.embedding), embedding, rtol=2e-3, atol=2e-3)


def test_none_makes_plain_numbers_of_a_quantized_file(native_library: NativeLibrary, tmp_path: Path) -> None:
    checkpoint = write_and_open(tmp_path / "model.gguf", {"": "Q4_1"})
    weights = pack(native_library, checkpoint, quantization="none")
    assert weights.stores == "f32"
    assert_layers_equal(checkpoint, weights, 0.0)


def test_int8_of_a_quantized_file(native_library: NativeLibrary, tmp_path: Path) -> None:
    checkpoint = write_and_open(tmp_path / "model.gguf", {"": "Q4_1", "ffn_down": "Q8_0"})
    weights = pack(native_library, checkpoint, quantization="int8")
    assert weights.stores == "q8"
    assert_layers_equal(checkpoint, weights, 0.01)
    down = parameter(checkpoint, "model.layers.0.mlp.down_proj.weight")
    np.testing.assert_allclose(rows_of(gated(weights).down), down, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("types", "stores"),
    [
        ({"": "Q4_0", "attn_v": "Q8_0"}, ([Store.Q4, Store.Q8], Store.Q4, Store.Q4)),
        ({"": "Q4_0", "attn_v": "F32"}, ([Store.Q4, Store.F32], Store.Q4, Store.Q4)),
        ({"": "Q4_1", "attn_k": "Q5_1"}, ([Store.Q4, Store.Q8_MIN, Store.Q4], Store.Q4, Store.Q4)),
        ({"": "Q8_0", "attn_k": "Q5_0", "ffn_down": "Q5_1"}, ([Store.Q8], Store.Q8, Store.Q8_MIN)),
        ({"": "Q4_0", "ffn_up": "Q8_0"}, ([Store.Q4], Store.Q8, Store.Q4)),
        ({"": "Q4_1", "ffn_up": "Q8_0"}, ([Store.Q4], Store.Q8_MIN, Store.Q4)),
        ({"": "Q4_1", "ffn_up": "F32"}, ([Store.Q4], Store.F32, Store.Q4)),
    ],
)
def test_parts_of_different_types_lose_nothing(
    native_library: NativeLibrary,
    types: dict[str, str],
    stores: tuple[list[Store], Store, Store],
    tmp_path: Path,
) -> None:
    checkpoint = write_and_open(tmp_path / "model.gguf", types)
    weights = pack(native_library, checkpoint, quantization="auto")
    layer = weights.layers[0]
    found = [matrix.layout.store for matrix in layer.qkv]
    feed_forward = gated(weights)
    assert (found, feed_forward.gate_up.layout.store, feed_forward.down.layout.store) == stores
    assert_layers_equal(checkpoint, weights, 1e-3)


@pytest.mark.parametrize(
    ("dtype", "quantization", "formats"),
    [
        (torch.float32, "none", ("fp32", "fp32")),
        (torch.bfloat16, "auto", ("int4", "int4")),
        (torch.bfloat16, "none", ("bf16", "bf16")),
        (torch.bfloat16, "int8", ("int8", "int8")),
    ],
)
def test_the_plan_knows_the_memory_beforehand(
    native_library: NativeLibrary,
    dtype: torch.dtype,
    quantization: Quantization,
    formats: tuple[str, str],
    tmp_path: Path,
) -> None:
    checkpoint = write_and_open(tmp_path / "model.gguf", {"": "Q4_1"})
    layouts = WeightLayouts(checkpoint, dtype=numpy_dtype(dtype), quantization=quantization)
    assert (layouts.number_format(), layouts.embedding_format()) == formats
    weights = pack(native_library, checkpoint, dtype=dtype, quantization=quantization)
    assert 0.7 * weights.num_bytes < layouts.num_bytes() < 1.3 * weights.num_bytes


def test_the_plan_knows_the_format_of_the_head(tmp_path: Path) -> None:
    checkpoint = write_and_open(tmp_path / "model.gguf", {"": "Q4_1", "output": "Q8_0"})
    assert not checkpoint.config.tie_word_embeddings
    layouts = WeightLayouts(checkpoint, dtype=BFLOAT16, quantization="auto")
    assert layouts.embedding_format() == "int8"


@pytest.mark.parametrize(("form", "expected"), [("MXFP4", "mxfp4"), ("E2M1_16", "nvfp4")])
def test_a_large_embedding_does_not_name_the_format_of_the_layers(form: str, expected: str) -> None:
    config = replace(model_config_from_hf(gguf_models.FAMILIES["mixtral"]().to_dict()), vocab_size=1 << 17)
    layouts = WeightLayouts(DummyCheckpoint(config, form=form), dtype=BFLOAT16, quantization="auto")
    assert (layouts.number_format(), layouts.embedding_format()) == (expected, "bf16")


@pytest.mark.parametrize("source", ["dummy", "gguf", "safetensors"])
def test_a_vocabulary_is_packed_in_pieces(
    native_library: NativeLibrary, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that loading a model takes little more than what it takes in the end."""
    hf_model = gguf_models.tiny_model("llama")
    config = model_config_from_hf(hf_model.config.to_dict())
    checkpoint: Checkpoint = DummyCheckpoint(config)
    if source == "gguf":
        checkpoint = write_and_open(tmp_path / "model.gguf", {"": "Q4_1"})
    elif source == "safetensors":
        hf_model.save_pretrained(tmp_path)
        checkpoint = open_checkpoint(ModelFiles(kind="hf", path=tmp_path, name="tiny"))
    name, read = "model.embed_tokens.weight", []
    whole, get = checkpoint.get(name, FLOAT32), checkpoint.get

    def watch(name: str, dtype: np.dtype[Any], rows: slice = ALL_ROWS) -> Numbers:
        values = get(name, dtype, rows)
        if rows != ALL_ROWS and (name in LOOKED_UP or (".mlp." in name and source != "gguf")):
            read.append(len(values))
        return values

    monkeypatch.setattr(checkpoint, "get", watch)
    monkeypatch.setattr(packing, "_PIECE_NUMBERS", 32 * whole.shape[1])
    weights = pack(native_library, checkpoint, quantization="none")
    np.testing.assert_array_equal(rows_of(weights.embedding), whole)
    assert max(read) == 32
    mlp = "model.layers.0.mlp.down_proj.weight"
    np.testing.assert_array_equal(packed_layer(checkpoint, weights, 0)[mlp[15:-7]], get(mlp, FLOAT32))


def test_int4_keeps_experts_in_mxfp4_and_rounds_the_rest(native_library: NativeLibrary) -> None:
    config = model_config_from_hf(gguf_models.FAMILIES["mixtral"]().to_dict())
    weights = pack(native_library, DummyCheckpoint(config, form="MXFP4"), quantization="int4")
    layer = weights.layers[0]
    assert isinstance(layer.feed_forward, ExpertWeights)
    assert layer.feed_forward.experts[0].down.layout.store == Store.E2M1
    assert {matrix.layout.store for matrix in (*layer.qkv, layer.o)} == {Store.Q4}
    assert weights.embedding.layout.store == Store.Q8
