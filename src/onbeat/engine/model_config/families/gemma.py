"""Gemma 2 and the text of Gemma 3: norms before and after each block, scaled embeddings, many sliding layers.

Norms store `scale - 1`. Gemma 2 caps scores and logits softly. Gemma 3 has norms of each head instead, and
its sliding layers have a rotary embedding of their own.
"""

from __future__ import annotations

from dataclasses import replace

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families.base import (
    Family,
    GgufRules,
    every,
    listed_layers,
    number_or_none,
    window_of,
    with_layers,
)
from onbeat.engine.model_config.rope import RopeRules
from onbeat.engine.model_config.values import Values

_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The one size whose query scalar is hidden_size / num_heads, not head_dim; GGUF has no key for it."""


def _scaled(config: ModelConfig, values: Values) -> ModelConfig:
    is_27b = config.num_layers == _27B_LAYERS[config.family]
    scalar = config.hidden_size / config.num_heads if is_27b else config.head_dim
    return replace(
        config,
        embedding_scale=config.hidden_size**0.5,
        query_pre_attn_scalar=values.number("query_pre_attn_scalar", scalar),
    )


def _gemma2(config: ModelConfig, values: Values) -> ModelConfig:
    full = every(2, config.num_layers)
    layers = listed_layers(values, config.num_layers) or tuple(not is_full for is_full in full)
    return replace(
        with_layers(_scaled(config, values), window_of(values), layers),
        attention_softcap=number_or_none(values, "attn_logit_softcapping"),
        logits_softcap=number_or_none(values, "final_logit_softcapping"),
    )


def _gemma3(config: ModelConfig, values: Values) -> ModelConfig:
    pattern = values.raw("sliding_window_pattern")
    if isinstance(pattern, list):
        layers = tuple(map(bool, pattern))
    else:
        full = every(values.size("sliding_window_pattern", 6), config.num_layers)
        layers = listed_layers(values, config.num_layers) or tuple(not is_full for is_full in full)
    return with_layers(_scaled(config, values), window_of(values), layers)


GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    models="Gemma 2",
    defaults={
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256.0,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    always={"norms": "around", "norm_weight_offset": 1.0, "norm_rounds_once": True},
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    reads=frozenset({"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}),
    complete=_gemma2,
    gguf=GgufRules(architecture="gemma2", has_windows=True),
)
GEMMA3 = Family(
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    models="Gemma 3, its text",
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
