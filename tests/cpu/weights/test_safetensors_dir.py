from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from onbeat.core.errors import ConfigError, ModelLoadError
from onbeat.engine.dtypes import BFLOAT16, FLOAT32
from onbeat.engine.torch.types import numpy_dtype
from onbeat.engine.torch.weights import load_weights
from onbeat.engine.weights.checkpoint import Checkpoint, loading_remarks
from onbeat.engine.weights.open import open_checkpoint
from onbeat.hub.files import ModelFiles
from tests.cpu.engine.forwards import on_torch
from tests.cpu.engine.tiny_models import random_prompt, to_array
from tests.cpu.native.test_forward import first_logits, relative_error
from tests.cpu.weights.tiny_models import FAMILIES, parameters, tiny_model


def open_directory(path: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles(kind="hf", path=path, name="tiny"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_model("qwen2").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard_size", ["100MB", "50KB"])
def test_equals_the_saved_model(family: str, shard_size: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "50KB")
    checkpoint = open_directory(tmp_path)
    expected = parameters(model)
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        assert np.array_equal(checkpoint.get(name, FLOAT32), tensor.numpy())
        assert np.array_equal(checkpoint.get(name, BFLOAT16), to_array(tensor.to(torch.bfloat16)))


VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3": ("gemma3", {"vision_config": VISION, "mm_tokens_per_image": 4}),
    "Mistral3": ("mistral", {"vision_config": VISION | {"model_type": "pixtral"}}),
    "Qwen3VL": ("qwen3", {"vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]}}),
    "Qwen2_5_VL": ("qwen2", {"vision_config": QWEN_VISION}),
}


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_text_part_of_a_multimodal_model(tmp_path: Path, name: str) -> None:
    """Under the names of any version of transformers; tokens are those of the whole model."""
    of_text, options = MULTIMODAL[name]
    text_config = FAMILIES[of_text]().to_dict() | {"vocab_size": 211}
    if "VL" in name:
        del text_config["model_type"]
        text_config["rope_parameters"]["mrope_section"] = [8, 4, 4] if name == "Qwen3VL" else [2, 3, 3]
    config = getattr(transformers, f"{name}Config")(text_config=text_config, **options)
    config.tie_word_embeddings = name == "Gemma3"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    text = {
        re.sub(r"^(model\.)?(language_model\.)?(model\.)?", "", name): value
        for name, value in tensors.items()
    }
    text = {name: value for name, value in text.items() if not re.search("visual|vision|projector", name)}
    head = text.pop("lm_head.weight", None)
    assert "embed_tokens.weight" in text
    for prefix, vision in (("language_model.model.", ""), ("model.language_model.", "model.")):
        renamed = {prefix + name: value for name, value in text.items()}
        if head is not None:
            renamed[
                f"{prefix.removesuffix('model.')}lm_head.weight" if vision == "" else "lm_head.weight"
            ] = head
        save_file({**renamed, f"{vision}vision_tower.x": torch.zeros(2)}, tmp_path / "model.safetensors")
        checkpoint = open_directory(tmp_path)
        for name, value in text.items():
            assert np.array_equal(checkpoint.get(f"model.{name}", FLOAT32), value.numpy())
        (line,) = loading_remarks(checkpoint, checkpoint.names(), FLOAT32)
        assert "vision part (1 tensors)" in line
    expected = model.eval()(torch.tensor([random_prompt(20)])).logits[0, -1].detach()
    ours = first_logits(
        on_torch(load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"))), (20,)
    )
    assert relative_error(ours, expected[None]) < 1e-5


@pytest.mark.parametrize(
    ("saved", "dtype", "line"),
    [
        (
            torch.float16,
            torch.bfloat16,
            "weights of type F16 become bfloat16 .*--dtype float32 rounds nothing",
        ),
        (torch.float32, torch.bfloat16, "weights of type F32 become bfloat16"),
        (torch.float64, torch.bfloat16, "weights of type F64 become bfloat16"),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.float16, torch.float32, None),
    ],
)
def test_numbers_are_never_rounded_silently(
    saved: torch.dtype, dtype: torch.dtype, line: str | None, tmp_path: Path
) -> None:
    model = tiny_model("qwen2").to(saved)
    model.save_pretrained(tmp_path)
    checkpoint = open_directory(tmp_path)
    lines = list(loading_remarks(checkpoint, checkpoint.names(), numpy_dtype(dtype)))
    assert len(lines) == (line is not None)
    assert line is None or re.match(line, lines[0])
    for name, tensor in parameters(model).items():
        assert np.array_equal(checkpoint.get(name, numpy_dtype(dtype)), to_array(tensor.to(dtype)))


def test_missing_tensor_is_named(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"1.*model\.layers\.1\.mlp\.up_proj\.weight"):
        open_directory(directory)


def test_wrong_shape_is_named(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight.*\[3\].*\[64\]"):
        open_directory(directory)


def test_tensors_that_would_be_ignored_are_refused(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # harmless: derived
    save_file(tensors, directory / "model.safetensors")
    open_directory(directory)
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.zeros(1)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.layers\.0\.mlp\.up_proj\.weight_scale"):
        open_directory(directory)


def test_unsupported_element_type_is_named(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight.*F8_E4M3"):
        open_directory(directory)


@pytest.mark.parametrize("size", [0, 5, 100, 20_000])
def test_truncated_file_is_named(directory: Path, size: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        open_directory(directory)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_model("qwen2").save_pretrained(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-0*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=f"{shard.name} is missing"):
        open_directory(tmp_path)


def test_index_must_stay_in_its_directory(directory: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"\.\./elsewhere\.safetensors"):
        open_directory(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused(directory: Path, name: str) -> None:
    (directory / "model.safetensors").rename(directory / name)
    with pytest.raises(ModelLoadError, match=rf"pickled .*\({name}\).*safetensors"):
        open_directory(directory)


def test_missing_or_damaged_configuration(directory: Path) -> None:
    (directory / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_directory(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_directory(directory)
