"""Files of Gemma 4 as the hub has them: the text of a model that sees and hears, and tensors left unread."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onbeat.engine.dtypes import FLOAT32
from onbeat.engine.torch.weights import load_weights
from onbeat.engine.weights.checkpoint import loading_remarks
from onbeat.engine.weights.open import open_checkpoint
from onbeat.hub.files import ModelFiles
from tests.cpu.engine.forwards import on_torch
from tests.cpu.engine.gemma4_models import GEMMA4
from tests.cpu.engine.step_driver import StepDriver
from tests.cpu.engine.tiny_models import hf_tiny_model, random_prompt, tiny_model


@pytest.mark.parametrize("name", GEMMA4)
def test_the_text_is_read_and_answers_as_the_reference(tmp_path: Path, name: str) -> None:
    model, text = hf_tiny_model(name, torch.float32), "model.language_model."
    tensors = {part.replace("model.", text, 1): tensor for part, tensor in model.state_dict().items()}
    del tensors["lm_head.weight"]  # the embedding
    for part in (
        "model.vision_tower.x",
        "model.audio_tower.x",
        "model.embed_audio.x",
        "model.embed_vision.x",
    ):
        tensors[part] = torch.zeros(2)
    if model.config.num_kv_shared_layers:  # the last layers read the KV of others
        tensors |= {f"{text}layers.4.self_attn.{part}_proj.weight": torch.zeros(64, 64) for part in "kv"}
        tensors[f"{text}layers.4.self_attn.k_norm.weight"] = torch.zeros(32)
    save_file({part: tensor.contiguous() for part, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": model.config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    checkpoint = open_checkpoint(ModelFiles(kind="hf", path=tmp_path, name="tiny"))
    assert any(
        "audio and vision part (4 tensors)" in line for line in loading_remarks(checkpoint, [], FLOAT32)
    )
    driver = StepDriver(on_torch(load_weights(checkpoint, torch.float64, torch.device("cpu"))))
    request = driver.add(random_prompt(40), 6)
    driver.run(64)
    expected, _ = tiny_model(name).reference(tuple(random_prompt(40)), 6)
    assert driver.requests[request].output_token_ids == expected
