"""Qwen: 2 and 2.5 with biases on queries, keys and values; 3 with norms of each head instead; 3 with experts.

A window holds from some layer on, if it is switched on.
"""

from __future__ import annotations

from dataclasses import replace

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families.base import (
    NO_BIASES,
    Family,
    GgufRules,
    experts_of,
    listed_layers,
    window_of,
    with_layers,
    with_window,
)
from onbeat.engine.model_config.values import Values

_DEFAULTS = {"max_position_embeddings": 32_768, "sliding_window": 4096}


def _sliding(config: ModelConfig, values: Values) -> ModelConfig:
    if not values.flag("use_sliding_window", default=False):
        return config
    max_window_layers = values.raw("max_window_layers")
    first = 28 if max_window_layers is None else max_window_layers
    layers = listed_layers(values, config.num_layers) or tuple(
        index >= first for index in range(config.num_layers)
    )
    return with_layers(config, window_of(values), layers)


def _with_experts(config: ModelConfig, values: Values) -> ModelConfig:
    experts = experts_of(
        values,
        count="num_experts" if "num_experts" in values else "num_local_experts",
        normalizes=values.flag("norm_topk_prob", default=False),
    )
    dense = values.raw("mlp_only_layers") or []
    period = values.size("decoder_sparse_step", 1)
    layers = tuple(index not in dense and (index + 1) % period == 0 for index in range(config.num_layers))
    if values.flag("use_sliding_window", default=False):
        config = with_window(config, values)  # unlike in Qwen 3, in all layers
    return replace(
        config, experts=replace(experts, layers=() if all(layers) else layers) if any(layers) else None
    )


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    models="Qwen 2 and 2.5, text of their VL models",
    multimodal=("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
    defaults=_DEFAULTS,
    always={"attention_bias": True},
    bias_keys=NO_BIASES,
    reads=frozenset({"sliding_window"}),
    complete=_sliding,
    gguf=GgufRules(architecture="qwen2"),
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    models="Qwen 3, text of Qwen3-VL",
    multimodal=("Qwen3VLForConditionalGeneration",),
    defaults={**_DEFAULTS, "head_dim": 128},
    always={"qk_norm": "head"},
    reads=frozenset({"sliding_window"}),
    complete=_sliding,
    gguf=GgufRules(architecture="qwen3"),
)
QWEN3_MOE = Family(
    name="qwen3-moe",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    models="Qwen3-30B-A3B, 235B-A22B",
    defaults=_DEFAULTS,
    always={"qk_norm": "head"},
    reads=frozenset({"num_experts", "num_local_experts", "sliding_window"}),
    complete=_with_experts,
    gguf=GgufRules(architecture="qwen3moe"),
)
