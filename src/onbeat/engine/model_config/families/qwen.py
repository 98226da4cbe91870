"""Qwen: 2 and 2.5 with biases on queries, keys and values; 3 with norms of each head instead; 3 with experts.

A window holds from some layer on, if it is switched on.
"""

from __future__ import annotations

from dataclasses import replace

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families.base import Family, GgufRules, experts_of, listed_layers, window_of
from onbeat.engine.model_config.values import Values


def _sliding(config: ModelConfig, values: Values) -> ModelConfig:
    window = window_of(values, 4096)
    if window is None or not values.flag("use_sliding_window", default=False):
        return config
    max_window_layers = values.raw("max_window_layers")
    first = 28 if max_window_layers is None else max_window_layers
    layers = listed_layers(values, config.num_layers) or tuple(
        index >= first for index in range(config.num_layers)
    )
    return replace(config, sliding_window=window, sliding_layers=layers) if any(layers) else config


def _qwen2(config: ModelConfig, values: Values) -> ModelConfig:
    return replace(_sliding(config, values), attention_bias=True)


def _qwen3(config: ModelConfig, values: Values) -> ModelConfig:
    has_bias = values.flag("attention_bias", default=False)
    return replace(
        _sliding(config, values), attention_bias=has_bias, attention_output_bias=has_bias, qk_norm="head"
    )


def _qwen3_moe(config: ModelConfig, values: Values) -> ModelConfig:
    experts = experts_of(
        values,
        count="num_experts" if "num_experts" in values else "num_local_experts",
        intermediate_size="moe_intermediate_size",
        normalizes=values.flag("norm_topk_prob", default=False),
    )
    dense = values.raw("mlp_only_layers") or []
    every = values.size("decoder_sparse_step", 1)
    layers = tuple(index not in dense and (index + 1) % every == 0 for index in range(config.num_layers))
    has_bias = values.flag("attention_bias", default=False)
    # Unlike in Qwen 3, a window that is switched on holds in all layers.
    window = window_of(values, 4096) if values.flag("use_sliding_window", default=False) else None
    return replace(
        config,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        qk_norm="head",
        sliding_window=window,
        sliding_layers=() if window is None else (True,) * config.num_layers,
        experts=replace(experts, layers=() if all(layers) else layers) if any(layers) else None,
    )


def _with_head_norms(config: ModelConfig, values: Values) -> ModelConfig:  # noqa: ARG001
    return replace(config, qk_norm="head")


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    context=32_768,
    from_hf=_qwen2,
    gguf=GgufRules(architecture="qwen2"),
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    context=32_768,
    head_dim=128,
    from_hf=_qwen3,
    gguf=GgufRules(architecture="qwen3", complete=_with_head_norms),
)
QWEN3_MOE = Family(
    name="qwen3-moe",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    context=32_768,
    reads=frozenset({"num_experts", "num_local_experts"}),
    from_hf=_qwen3_moe,
    gguf=GgufRules(architecture="qwen3moe", complete=_with_head_norms, reads=frozenset({"expert_count"})),
)
