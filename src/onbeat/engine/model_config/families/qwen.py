"""Qwen: 2 and 2.5 with biases on queries, keys and values; 3 with norms of each head instead; 3 with experts.

A window holds from some layer on, if it is switched on. In Qwen3-Next, 3.5 and 3.6 three layers of four have
linear attention, the others a gate on what they mix, and one expert is every token's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onbeat.engine.model_config.architecture import LinearAttention, ModelConfig
from onbeat.engine.model_config.families import base
from onbeat.engine.model_config.families.base import NO_BIASES, Family, GgufRules
from onbeat.engine.model_config.rope import RopeRules
from onbeat.engine.model_config.values import Values


def _sliding(config: ModelConfig, values: Values) -> ModelConfig:
    if not values.flag("use_sliding_window", default=False):
        return config
    max_window_layers = values.raw("max_window_layers")
    first = 28 if max_window_layers is None else max_window_layers
    layers = base.listed_layers(values, config.num_layers) or tuple(
        index >= first for index in range(config.num_layers)
    )
    return base.with_layers(config, base.window_of(values), layers)


def _with_experts(config: ModelConfig, values: Values) -> ModelConfig:
    experts = base.experts_of(
        values,
        count="num_experts" if "num_experts" in values else "num_local_experts",
        normalizes=values.flag("norm_topk_prob", default=False),
    )
    dense = values.raw("mlp_only_layers") or []
    period = values.size("decoder_sparse_step", 1)
    layers = tuple(index not in dense and (index + 1) % period == 0 for index in range(config.num_layers))
    if values.flag("use_sliding_window", default=False):
        config = base.with_window(config, values)  # unlike in Qwen 3, in all layers
    return replace(
        config, experts=replace(experts, layers=() if all(layers) else layers) if any(layers) else None
    )


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    models="Qwen 2 and 2.5, text of their VL models",
    multimodal=("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
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
    always={"qk_norm": "head"},
    reads=frozenset({"num_experts", "num_local_experts", "sliding_window"}),
    complete=_with_experts,
    gguf=GgufRules(architecture="qwen3moe"),
)


def _linear(config: ModelConfig, values: Values) -> ModelConfig:
    """Return a model with layers of linear attention, and a gate on what the others mix."""
    values.refuse_unless("attention_bias", False)  # noqa: FBT003 -- one of the values that it may have
    values.refuse_unless("attn_output_gate", True)  # noqa: FBT003
    kinds = values.raw("layer_types")
    if kinds is None:
        full = base.every(values.size("full_attention_interval", 4), config.num_layers)
    elif isinstance(kinds, list) and not {*kinds} - {"linear_attention", "full_attention"}:
        full = tuple(kind == "full_attention" for kind in kinds)
    else:
        raise values.wrong("layer_types", kinds, "a list of linear_attention and full_attention")
    linear = LinearAttention(
        num_key_heads=values.size("linear_num_key_heads"),
        num_value_heads=values.size("linear_num_value_heads"),
        key_dim=values.size("linear_key_head_dim"),
        value_dim=values.size("linear_value_head_dim"),
        conv_width=values.size("linear_conv_kernel_dim"),
        layers=tuple(not is_full for is_full in full),
    )
    if config.architecture == QWEN3_NEXT.architecture:
        linear = replace(linear, inputs=("qkvz", "ba"))
    return replace(config, linear=linear)


def _linear_with_experts(config: ModelConfig, values: Values) -> ModelConfig:
    config = _with_experts(_linear(config, values), values)
    if config.experts is None:
        return config
    shared = values.size("shared_expert_intermediate_size")
    return replace(config, experts=replace(config.experts, shared_size=shared))


_LINEAR: dict[str, Any] = {
    "always": {
        "qk_norm": "head",
        "norm_weight_offset": 1.0,
        "norm_rounds_once": True,
        "gates_attention": True,
    },
    "rope": RopeRules(is_partial=True),
}
QWEN3_NEXT = Family(
    name="qwen3-next",
    models="Qwen3-Next",
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    reads=frozenset({"num_experts", "num_local_experts"}),
    complete=_linear_with_experts,
    gguf=GgufRules(architecture="qwen3next", linear={"inputs": ("qkv", "z", "ba")}),
    **_LINEAR,
)
QWEN3_5 = Family(
    name="qwen3.5",
    models="Qwen 3.5 and 3.6",
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    multimodal=("Qwen3_5ForConditionalGeneration",),
    complete=_linear,
    gguf=GgufRules(architecture="qwen35", linear={"alternates": True}),
    **_LINEAR,
)
QWEN3_5_MOE = Family(
    name="qwen3.5-moe",
    models="Qwen 3.5 and 3.6 with experts",
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    multimodal=("Qwen3_5MoeForConditionalGeneration",),
    reads=frozenset({"num_experts", "num_local_experts"}),
    complete=_linear_with_experts,
    gguf=GgufRules(architecture="qwen35moe", linear={"alternates": True}),
    **_LINEAR,
)
