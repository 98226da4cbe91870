"""GGUF tensors under their Hugging Face names, and what converting to GGUF did to them, undone.

llama.cpp's converter stores a model in its own way: short names, a row order of Llama's query and key weights
that suits interleaved rotary embedding, and Gemma's norm weights plus one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from onbeat.engine.model_config import ModelConfig

ROPE_FACTORS = "rope_freqs.weight"
"""Not a parameter: Llama 3.1's frequency factors, which the configuration takes in."""

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PATTERN = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def hf_name(gguf_name: str, config: ModelConfig) -> str:
    """Return the Hugging Face name of a tensor; the name itself where there is none for this architecture."""
    match = _PATTERN.fullmatch(gguf_name)
    if match is None:
        return gguf_name
    layer, part, kind = match["layer"], match["part"], match["kind"]
    names: Mapping[str, str] = _GLOBAL
    if layer is not None:
        names = _GEMMA_LAYER if config.family == "gemma3" else _LAYER
    if part not in names:
        return gguf_name
    prefix = "" if layer is None else f"model.layers.{int(layer)}."
    return f"{prefix}{names[part]}.{kind}"


def unpermute_rows(name: str, values: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Return a tensor's rows in the order of the Hugging Face checkpoint.

    Parameters
    ----------
    name : Hugging Face name of the tensor.
    values : `[rows, ...]`.
    """
    if config.family != "llama" or ".self_attn." not in name:
        return values
    if ".q_proj." in name:
        num_heads = config.num_heads
    elif ".k_proj." in name:
        num_heads = config.num_kv_heads
    else:
        return values
    # Within a head, GGUF's row 2i + j stands for Hugging Face's row j * head_dim / 2 + i.
    by_pair = values.reshape(num_heads, config.head_dim // 2, 2, *values.shape[1:])
    return by_pair.transpose(1, 2).reshape(values.shape)


def stored_offset(name: str, config: ModelConfig) -> float:
    """Return what the converter added to a tensor."""
    return config.norm_weight_offset if name.endswith("norm.weight") else 0.0
