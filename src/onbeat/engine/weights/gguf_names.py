"""GGUF tensors under their Hugging Face names, and what converting to GGUF did to them, undone.

llama.cpp's converter stores a model in its own way: short names, a row order of Llama's query and key weights
that suits interleaved rotary embedding, and Gemma's norm weights plus one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from onbeat.engine.model_config import ModelConfig
from onbeat.engine.model_config.families import FAMILIES, GgufRules

ROPE_FREQS = "rope_freqs.weight"
ROPE_SHORT, ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = frozenset({ROPE_FREQS, ROPE_SHORT, ROPE_LONG})
"""No parameters: frequency factors, which the configuration takes in."""

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
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_PATTERN = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def rules_of(config: ModelConfig) -> GgufRules:
    """Return how files of a model's family are written; several architectures may share a family's."""
    return next(
        family.gguf
        for family in FAMILIES.values()
        if family.name == config.family and family.gguf is not None
    )


def hf_name(gguf_name: str, config: ModelConfig) -> str:
    """Return the Hugging Face name of a tensor; the name itself where there is none for this architecture."""
    match = _PATTERN.fullmatch(gguf_name)
    if match is None:
        return gguf_name
    layer, part, kind = match["layer"], match["part"], match["kind"]
    names: Mapping[str, str] = _GLOBAL
    if layer is not None:
        names = {**_LAYER, **rules_of(config).names}
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
    if not rules_of(config).permutes or ".self_attn." not in name:
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
