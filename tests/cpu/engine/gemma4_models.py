"""Tiny random models of Gemma 4: one like its small sizes, with much shared, and one with experts."""

from __future__ import annotations

from typing import Any

from transformers import Gemma4ForCausalLM, Gemma4TextConfig

_SIZES = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 20,
    "vocab_size_per_layer_input": 211,
}
GEMMA4: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gemma4": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        _SIZES
        | {
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4-moe": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        _SIZES
        | {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    ),
}
WINDOWED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gemma4-windows": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        GEMMA4["gemma4"][2]
        | {
            "num_hidden_layers": 8,
            "layer_types": ["sliding_attention"] * 4 + ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
        },
    ),
    "gemma4-wide-windows": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        GEMMA4["gemma4-moe"][2]
        | {
            "num_hidden_layers": 7,
            "head_dim": 32,
            "layer_types": ["sliding_attention"] + ["sliding_attention", "full_attention"] * 3,
            "enable_moe_block": False,
        },
    ),
}
"""Two whose windows give KV back. A layer with one keeps half as much as a layer without, or twice as much: a
block of the one layer without has room for two, and two take more room than the three without."""
