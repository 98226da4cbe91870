"""Tiny random Hugging Face models with layers that keep a state of each request."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

LINEAR: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
STATEFUL: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3-next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        LINEAR | EXPERTS | {"num_hidden_layers": 4, "mlp_only_layers": [2], "num_key_value_heads": 1},
    ),
    "qwen3.5": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        LINEAR | {"full_attention_interval": 2, "num_hidden_layers": 3, "tie_word_embeddings": True},
    ),
    "qwen3.5-moe": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        LINEAR
        | EXPERTS
        | {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "linear_attention"],
            "linear_num_key_heads": 4,
        },
    ),
}
"""Families with layers that keep a state of each request."""
for _module in (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe):
    for _name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        # transformers computes these rules in float32, also of a float64 model: nine decimals need float64.
        _source = inspect.getsource(getattr(_module, _name)).partition("def ")
        exec("def " + _source[2].replace("float32", "float64"), vars(_module))
