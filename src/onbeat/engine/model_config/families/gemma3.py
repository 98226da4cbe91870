"""Gemma 3 (text): norms before and after each block and of each head, most layers with a sliding window.

Sliding layers have a rotary embedding of their own, embeddings are scaled, and norms store `scale - 1`.
"""

from __future__ import annotations

from dataclasses import replace

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families.base import (
    Family,
    GgufRules,
    every,
    listed_layers,
    window_of,
    with_layers,
)
from onbeat.engine.model_config.rope import RopeRules
from onbeat.engine.model_config.values import Values

_27B_LAYERS = 62
"""The one size whose query scalar is hidden_size / num_heads, not head_dim; GGUF has no key for it."""


def _gemma3(config: ModelConfig, values: Values) -> ModelConfig:
    pattern = values.raw("sliding_window_pattern")
    if isinstance(pattern, list):
        layers = tuple(map(bool, pattern))
    else:
        full = every(values.size("sliding_window_pattern", 6), config.num_layers)
        layers = listed_layers(values, config.num_layers) or tuple(not is_full for is_full in full)
    is_27b = config.num_layers == _27B_LAYERS
    scalar = config.hidden_size / config.num_heads if is_27b else config.head_dim
    return replace(
        with_layers(config, window_of(values), layers),
        embedding_scale=config.hidden_size**0.5,
        query_pre_attn_scalar=values.number("query_pre_attn_scalar", scalar),
    )


GEMMA3 = Family(
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    multimodal=("Gemma3ForConditionalGeneration",),
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256.0,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    always={"norms": "around", "norm_weight_offset": 1.0, "norm_rounds_once": True, "qk_norm": "head"},
    rope=RopeRules(per_layer_type=True),
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    reads=frozenset({"sliding_window"}),
    complete=_gemma3,
    gguf=GgufRules(architecture="gemma3", theta=1_000_000.0, has_windows=True),
)
