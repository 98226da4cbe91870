"""Files of models with linear attention, as llama.cpp's converter writes them, give transformers' tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from onbeat.engine.weights.open import open_checkpoint
from onbeat.hub.files import ModelFiles
from tests.cpu.engine.stateful_models import STATEFUL
from tests.cpu.engine.tiny_models import hf_tiny_model
from tests.cpu.weights.tiny_models import check_tokens, finish, write_metadata
from tests.many_cases import each_case

pytestmark = pytest.mark.golden

ARCHITECTURES = {"qwen3-next in files": "qwen3next", "qwen3.5": "qwen35", "qwen3.5-moe": "qwen35moe"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "_proj.weight": ".weight",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.": "attn_",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{part}.": f"ffn_{part}_shexp." for part in ("gate", "up", "down")},
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")},
    "mlp.": "ffn_",
    "linear_attn.in_proj_qkv.": "attn_qkv.",
    "linear_attn.in_proj_z.": "attn_gate.",
    "linear_attn.in_proj_b.": "ssm_beta.",
    "linear_attn.in_proj_a.": "ssm_alpha.",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.out": "ssm_out",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.": "ssm_",
}
"""What the converter puts in place of parts of a parameter's name, one after the other."""


@pytest.fixture(params=["torch", "native"])
def is_native(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "native")


@pytest.fixture
def every_layer_has_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a model beside Qwen3-Next's that files can tell."""
    model_class, config_class, options = STATEFUL["qwen3-next"]
    every = model_class, config_class, {**options, "mlp_only_layers": []}
    monkeypatch.setitem(STATEFUL, "qwen3-next in files", every)


@pytest.mark.usefixtures("every_layer_has_experts")
@each_case("name", ARCHITECTURES)
def test_tokens_and_logits_equal_the_reference(
    name: str, is_native: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, hf_tiny_model(name, torch.float64), ARCHITECTURES[name])
    checkpoint = open_checkpoint(ModelFiles(kind="gguf", path=path, name="tiny"))
    check_tokens(checkpoint, name, request.getfixturevalue("native_library") if is_native else None)


def write_gguf(path: Path, model: Any, architecture: str) -> None:
    config = model.config
    if not hasattr(config, "intermediate_size"):
        config.intermediate_size = config.moe_intermediate_size
    writer = gguf.GGUFWriter(path, architecture)
    config.num_hidden_layers += 1  # one that guesses further tokens
    write_metadata(writer, config)
    config.num_hidden_layers -= 1
    writer.add_nextn_predict_layers(1)
    writer.add_rope_dimension_count(config.head_dim // 4)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    layers = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{architecture}.attention.recurrent_layers", [*layers, False])
    if "num_experts" in config.to_dict():
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    for name, tensor in model.named_parameters():
        for part, values in converted(name, tensor.detach().float().numpy(), config, architecture):
            writer.add_tensor(renamed(part), np.ascontiguousarray(values.squeeze()))
    writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight", np.zeros((4, 8), np.float32))
    finish(writer)


def renamed(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def converted(name: str, values: np.ndarray, config: Any, architecture: str) -> Any:
    """Yield a parameter as the converter writes it: in one tensor, or two."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_size = keys * config.linear_key_head_dim
    if name.endswith(".A_log"):
        values = -np.exp(values)
    elif name.endswith("norm.weight") and "linear_attn" not in name:
        values = values + np.float32(1)
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            yield name.replace("gate_up", part), half
    elif "in_proj_qkvz" in name:
        wide = heads // keys * config.linear_value_head_dim
        ends = np.cumsum([config.linear_key_head_dim, config.linear_key_head_dim, wide])
        parts = [
            part.reshape(-1, values.shape[1])
            for part in np.split(values.reshape(keys, -1, values.shape[1]), ends, axis=1)
        ]
        yield name.replace("qkvz", "qkv"), np.concatenate(parts[:3])
        yield name.replace("qkvz", "z"), parts[3]
    elif "linear_attn" not in name or architecture == "qwen3next" or name.endswith("norm.weight"):
        yield name, values
    elif "in_proj_qkv" in name or "conv1d" in name:
        yield name, np.concatenate([values[: 2 * key_size], alternating(values[2 * key_size :], keys, heads)])
    elif "out_proj" in name:
        yield name, alternating(values.T, keys, heads).T
    else:
        yield name, alternating(values, keys, heads)


def alternating(values: np.ndarray, keys: int, heads: int) -> np.ndarray:
    """Return rows with the first value head of each key head first, then the second of each, and so on."""
    return values.reshape(keys, heads // keys, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
