from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from onbeat.core.errors import ModelLoadError
from onbeat.engine.dtypes import BFLOAT16, FLOAT32
from onbeat.engine.model_config.hf import model_config_from_hf
from onbeat.engine.native.layouts import WeightLayouts
from onbeat.engine.weights.checkpoint import loading_remarks
from onbeat.engine.weights.open import open_checkpoint
from onbeat.hub.files import ModelFiles
from tests.cpu.weights.ggml_blocks import DECODERS
from tests.cpu.weights.tiny_models import (
    FAMILIES,
    finish,
    gguf_tensors,
    head_dim,
    parameters,
    tiny_model,
    to_gguf,
    write_gguf,
    write_metadata,
)

QUANTIZABLE = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"]
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]


def gguf_files(path: Path) -> ModelFiles:
    return ModelFiles(kind="gguf", path=path, name=path.name)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_model_that_was_converted(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    write_gguf(tmp_path / "model.gguf", model)
    checkpoint = open_checkpoint(gguf_files(tmp_path / "model.gguf"))
    expected = parameters(model)
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        # Gemma's norms went through + 1 and - 1 in float32.
        atol = 1e-6 if family.startswith("gemma") and "norm" in name else 0.0
        np.testing.assert_allclose(checkpoint.get(name, FLOAT32), tensor.numpy(), rtol=0, atol=atol)
    config = checkpoint.config
    assert config.vocab_size == model.config.vocab_size
    assert config.tie_word_embeddings == ("lm_head.weight" not in expected)
    assert config.head_dim == head_dim(model.config)
    # The format has fewer digits, and none of these.
    theirs = model_config_from_hf(model.config.to_dict())
    assert config == replace(
        theirs,
        architecture=config.architecture,
        rms_norm_eps=config.rms_norm_eps,
        dtype=None,
        bos_token_id=None,
        eos_token_ids=(),
    )


def test_gates_and_ups_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    path, tensors = tmp_path / "model.gguf", dict(gguf_tensors(model))
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer, model.config)
    for name, values in tensors.items():
        if "ffn_up_exps" in name:
            continue
        if "ffn_gate_exps" in name:
            parts = values, tensors[name.replace("gate", "up")]
            writer.add_tensor(name.replace("gate", "gate_up"), np.concatenate(parts, axis=1))
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    finish(writer)
    checkpoint = open_checkpoint(gguf_files(path))
    for name, tensor in parameters(model).items():
        np.testing.assert_array_equal(checkpoint.get(name, FLOAT32), tensor.numpy())


def test_longrope_goes_by_the_context_that_is_served(tmp_path: Path) -> None:
    """A file of a model whose context was made four times longer, served short and long."""
    model = tiny_model("phi3")
    model.config.original_max_position_embeddings = 64
    model.save_pretrained(tmp_path)
    write_gguf(tmp_path / "model.gguf", model)
    for files in (gguf_files(tmp_path / "model.gguf"), ModelFiles(kind="hf", path=tmp_path, name="phi3")):
        short = open_checkpoint(files, served_len=64).config.rope.frequency_factors
        long = open_checkpoint(files, served_len=65).config.rope.frequency_factors
        assert short == tuple(1.0 + index for index in range(6))
        assert long == tuple(2.0 + index for index in range(6))
        assert open_checkpoint(files).config.rope.frequency_factors == long


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_quantized_weights_are_dequantized_then_put_in_order(name: str, tmp_path: Path) -> None:
    model, kind = tiny_model("llama"), gguf.GGMLQuantizationType[name]
    wanted = ["blk.1.attn_q.weight", "blk.1.attn_k.weight", "blk.2.ffn_down.weight", "token_embd.weight"]
    write_gguf(tmp_path / "model.gguf", model, dict.fromkeys(wanted, kind))
    checkpoint = open_checkpoint(gguf_files(tmp_path / "model.gguf"))
    for hf_name in (
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.embed_tokens.weight",
    ):
        # Quantization runs along rows, so the order of rows does not matter to it.
        tensor = parameters(model)[hf_name].numpy()
        expected = gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)
        assert np.array_equal(checkpoint.get(hf_name, FLOAT32), expected)


def write_k_quants(path: Path, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Write a model whose feed-forward has one K-quantized matrix of random bytes; return those."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8, hidden_size=64, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2
    )
    block_inputs, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (64, 256 // block_inputs, block_bytes), dtype=np.uint8)
    for offset in DECODERS[kind.name][3]:
        blocks[:, :, offset : offset + 2] = (
            np.linspace(-1, 1, 64, dtype=np.float16).view(np.uint8).reshape(64, 1, 2)
        )
    raw = blocks.reshape(64, -1)
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer, config)
    for name, tensor in parameters(LlamaForCausalLM(config)).items():
        short, values = to_gguf(name, tensor.numpy(), config)
        if short == "blk.0.ffn_down.weight":
            writer.add_tensor(short, raw, raw_dtype=kind)
        else:
            writer.add_tensor(short, values)
    finish(writer)
    return raw


@pytest.mark.parametrize("name", K_QUANTS)
def test_k_quants(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    raw = write_k_quants(tmp_path / "model.gguf", kind)
    checkpoint = open_checkpoint(gguf_files(tmp_path / "model.gguf"))
    expected = gguf.quants.dequantize(raw, kind)
    down = "model.layers.0.mlp.down_proj.weight"
    assert np.array_equal(checkpoint.get(down, FLOAT32), expected)
    (line,) = loading_remarks(checkpoint, [down], BFLOAT16)
    assert re.search(rf" {name} .*bfloat16", line)
    assert list(loading_remarks(checkpoint, [down], FLOAT32)) == []
    plain = WeightLayouts(checkpoint, dtype=BFLOAT16, quantization="auto").plain_names()
    assert down not in plain  # the native engine has it as it is
    assert "model.layers.0.mlp.up_proj.weight" in plain


def test_llama3_frequency_factors_go_into_the_configuration(tmp_path: Path) -> None:
    model = tiny_model("llama")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    write_metadata(writer, model.config)
    for name, tensor in parameters(model).items():
        writer.add_tensor(*to_gguf(name, tensor.numpy(), model.config))
    writer.add_tensor("rope_freqs.weight", np.array([1, 1, 2, 4, 8, 8, 8, 8], dtype=np.float32))
    finish(writer)
    checkpoint = open_checkpoint(gguf_files(tmp_path / "model.gguf"))
    assert checkpoint.config.rope.kind == "factors"
    assert checkpoint.config.rope.frequency_factors == (1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0)
    assert "rope_freqs.weight" not in checkpoint.names()


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    write_gguf(tmp_path / "model.gguf", model, {"blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q8_0})
    data = (tmp_path / "model.gguf").read_bytes()
    # The type stands after the name, the number of dimensions (4 bytes) and the dimensions (8 each).
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    assert data[at] == gguf.GGMLQuantizationType.Q8_0
    refused = ("IQ1_S", "IQ2_XXS", "IQ2_S", "IQ3_S", "TQ1_0", "TQ2_0", "NVFP4")
    for number, shown in (
        *((gguf.GGMLQuantizationType[name], name) for name in refused),
        (250, "number 250"),
    ):
        (tmp_path / "odd.gguf").write_bytes(data[:at] + bytes([number]) + data[at + 1 :])
        with pytest.raises(ModelLoadError, match=rf"blk\.0\.ffn_up\.weight.* {shown}.*: BF16,.*NAME:Q4_K_M"):
            open_checkpoint(gguf_files(tmp_path / "odd.gguf"))


def test_a_file_cut_short_anywhere_is_a_clear_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_model("gemma3"))
    data = (tmp_path / "model.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    start = data.index(b"token_embd.weight")
    places = [0, 3, 4, 10, 20, 23, 30, *range(start - 700, start + 60, 31), len(data) // 2, len(data) - 40]
    for place in places:
        cut.write_bytes(data[:place])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            open_checkpoint(gguf_files(cut))


def test_truncation_names_the_tensor(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError, match=r"cut short: .*\.weight.* \d+"):
        open_checkpoint(gguf_files(tmp_path / "model.gguf"))


def test_other_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"none\.gguf.*No such"):
        open_checkpoint(gguf_files(tmp_path / "none.gguf"))
    (tmp_path / "text.gguf").write_text("this is no model" * 10)
    with pytest.raises(ModelLoadError, match=r"text\.gguf.*not a GGUF"):
        open_checkpoint(gguf_files(tmp_path / "text.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.add_block_count(1)
    finish(writer)
    with pytest.raises(ModelLoadError, match=r"'mamba'.*gemma3"):
        open_checkpoint(gguf_files(tmp_path / "mamba.gguf"))


def test_the_vision_part_of_a_model_is_no_model(tmp_path: Path) -> None:
    finish(gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip"))
    with pytest.raises(ModelLoadError, match=r"vision .*mmproj.*text"):
        open_checkpoint(gguf_files(tmp_path / "mmproj.gguf"))


PARTS = [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def write_split(directory: Path) -> Any:
    """Write a model in three parts, the first of metadata alone; as the gguf package splits files."""
    model = tiny_model("qwen2")
    writer = gguf.GGUFWriter(directory / "model.gguf", "qwen2", split_max_tensors=20, small_first_shard=True)
    write_metadata(writer, model.config)
    for name, tensor in parameters(model).items():
        writer.add_tensor(*to_gguf(name, tensor.numpy(), model.config))
    finish(writer)
    assert sorted(path.name for path in directory.iterdir()) == PARTS
    return model


@pytest.mark.parametrize("name", PARTS)
def test_a_split_file_is_read_as_one(name: str, tmp_path: Path) -> None:
    model = write_split(tmp_path)
    checkpoint = open_checkpoint(gguf_files(tmp_path / name))
    expected = parameters(model)
    assert set(checkpoint.names()) == set(expected)
    for parameter, tensor in expected.items():
        assert np.array_equal(checkpoint.get(parameter, FLOAT32), tensor.numpy())


def test_parts_that_do_not_go_together(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in PARTS)
    write_split(tmp_path)

    def refused(message: str) -> None:
        with pytest.raises(ModelLoadError, match=message):
            open_checkpoint(gguf_files(first))

    whole = third.read_bytes()
    third.write_bytes(whole[: len(whole) // 2])
    refused(rf"{third.name} is cut short")
    third.write_bytes(second.read_bytes())
    refused(rf"{third.name} says that it is part 2 of 3, not 3 of 3 as its name does")
    write_gguf(third, tiny_model("qwen2"))
    refused(rf"{third.name} says that it is part 1 of 1, not 3 of 3")
    number = whole.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    third.write_bytes(whole[:number] + bytes([9]) + whole[number + 1 :])
    refused(rf"{third.name} is of a model of 9 tensors, but its 3 parts have \d+: .* different models")
    third.unlink()
    refused(f"{third.name}: No such file")


def test_a_part_under_another_name_says_how_to_name_it(tmp_path: Path) -> None:
    write_split(tmp_path)
    alone = (tmp_path / PARTS[1]).rename(tmp_path / "part.gguf")
    with pytest.raises(ModelLoadError, match=r"2.*3.*NAME-00002-of-00003\.gguf"):
        open_checkpoint(gguf_files(alone))


def test_rows_that_blocks_do_not_divide_are_named(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    write_gguf(tmp_path / "model.gguf", model, {"blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q8_0})
    data = (tmp_path / "model.gguf").read_bytes()
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4
    (tmp_path / "model.gguf").write_bytes(data[:at] + bytes([48]) + data[at + 1 :])
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ffn_up\.weight.*48.*32.*\(Q8_0\)"):
        open_checkpoint(gguf_files(tmp_path / "model.gguf"))


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    write_metadata(writer, model.config)
    for name, tensor in parameters(model).items():
        if name != "model.layers.2.self_attn.k_norm.weight":
            writer.add_tensor(*to_gguf(name, tensor.numpy(), model.config))
    finish(writer)
    with pytest.raises(ModelLoadError, match=r"1.*model\.layers\.2\.self_attn\.k_norm\.weight"):
        open_checkpoint(gguf_files(tmp_path / "model.gguf"))


def test_damaged_headers_give_our_error_or_a_checkpoint(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    data = (tmp_path / "model.gguf").read_bytes()
    header = data.index(b"token_embd.weight") + 2000
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 2, 4])):
            damaged[rng.randrange(header)] = rng.choice([0, 1, 255, rng.randrange(256)])
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(gguf_files(tmp_path / "damaged.gguf"))
            checkpoint.get("model.embed_tokens.weight", FLOAT32)
        except ModelLoadError:
            refused += 1
    assert refused > 50
