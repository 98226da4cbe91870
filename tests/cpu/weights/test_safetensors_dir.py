from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from onbeat.core.errors import ModelLoadError
from onbeat.engine.weights import Checkpoint, open_checkpoint
from onbeat.hub.files import ModelFiles
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
        assert torch.equal(checkpoint.get(name, torch.float32), tensor)
        assert torch.equal(checkpoint.get(name, torch.bfloat16), tensor.to(torch.bfloat16))


def test_missing_tensor_is_named(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"lacks 1 of \d+ tensors: model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        open_directory(directory)


def test_wrong_shape_is_named(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"model\.norm\.weight has shape \[3\]; the configuration asks for \[64\]"
    ):
        open_directory(directory)


def test_tensors_that_would_be_ignored_are_refused(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # harmless: derived
    save_file(tensors, directory / "model.safetensors")
    open_directory(directory)
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.zeros(1)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"does not use: model\.layers\.0\.mlp\.up_proj\.weight_scale"):
        open_directory(directory)


def test_unsupported_element_type_is_named(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is of type F8_E4M3"):
        open_directory(directory)


@pytest.mark.parametrize("size", [0, 5, 100, 20_000])
def test_truncated_file_is_named(directory: Path, size: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is cut short or damaged"):
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
    with pytest.raises(ModelLoadError, match="outside of its directory"):
        open_directory(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused(directory: Path, name: str) -> None:
    (directory / "model.safetensors").rename(directory / name)
    with pytest.raises(ModelLoadError, match=rf"pickled weights only \({name}\).*safetensors"):
        open_directory(directory)


def test_missing_or_damaged_configuration(directory: Path) -> None:
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json: not valid JSON"):
        open_directory(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"cannot read .*config\.json"):
        open_directory(directory)
