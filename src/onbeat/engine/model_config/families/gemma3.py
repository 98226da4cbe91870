"""Gemma 3 (text): norms before and after each block and of each head, most layers with a sliding window.

Sliding layers have a rotary embedding of their own, embeddings are scaled, and norms store `scale - 1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onbeat.engine.model_config.architecture import ModelConfig, RopeConfig
from onbeat.engine.model_config.families.base import Family, GgufRules, listed_layers, window_of
from onbeat.engine.model_config.hf_rope import RopeRules
from onbeat.engine.model_config.values import Values

_27B_LAYERS = 62
"""The one size whose query scalar is hidden_size / num_heads, not head_dim."""
_TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Of transformers' `Gemma3TextConfig`."""


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a multimodal Gemma 3's text; that of any other model as it is.

    Raises
    ------
    ModelLoadError : the text has none.
    """
    if config.get("architectures") != ["Gemma3ForConditionalGeneration"]:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise Values(config, source="the model").wrong("text_config", text, "a table")
    shared = {key: config[key] for key in ("eos_token_id", "dtype", "torch_dtype") if key in config}
    return {**_TEXT_DEFAULTS, **text, **shared, "architectures": ["Gemma3ForCausalLM"]}


def _gemma(
    config: ModelConfig, query_scalar: float, window: int | None, layers: tuple[bool, ...]
) -> ModelConfig:
    return replace(
        config,
        norms="around",
        norm_weight_offset=1.0,
        norm_rounds_once=True,
        qk_norm="head",
        embedding_scale=config.hidden_size**0.5,
        query_pre_attn_scalar=query_scalar,
        sliding_window=window if any(layers) else None,
        sliding_layers=layers if any(layers) else (),
    )


def _all_but_every(period: int, num_layers: int) -> tuple[bool, ...]:
    return tuple((index + 1) % period != 0 for index in range(num_layers))


def _from_hf(config: ModelConfig, values: Values) -> ModelConfig:
    has_bias = values.flag("attention_bias", default=False)
    layers = listed_layers(values, config.num_layers) or _all_but_every(
        values.size("sliding_window_pattern", 6), config.num_layers
    )
    window = window_of(values, 4096)
    return replace(
        _gemma(config, values.number("query_pre_attn_scalar", 256.0), window, layers if window else ()),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
    )


def _from_gguf(config: ModelConfig, values: Values) -> ModelConfig:
    pattern = values.raw("attention.sliding_window_pattern")
    layers = (
        tuple(bool(slides) for slides in pattern)
        if isinstance(pattern, list)
        else _all_but_every(values.size("attention.sliding_window_pattern", 6), config.num_layers)
    )
    is_27b = config.num_layers == _27B_LAYERS
    scalar = config.hidden_size / config.num_heads if is_27b else float(config.head_dim)
    return replace(
        _gemma(config, scalar, values.size("attention.sliding_window"), layers),
        local_rope=RopeConfig(theta=values.number("rope.freq_base_swa", 10_000.0)),
        hidden_activation="gelu_pytorch_tanh",
    )


GEMMA3 = Family(
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    context=131_072,
    head_dim=256,
    rope=RopeRules(theta=1_000_000.0, per_layer_type=True),
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    ties_embeddings=True,
    from_hf=_from_hf,
    gguf=GgufRules(
        architecture="gemma3",
        complete=_from_gguf,
        theta=1_000_000.0,
        reads=frozenset({"attention.sliding_window"}),
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
)
