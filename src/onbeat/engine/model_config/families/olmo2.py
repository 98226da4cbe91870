"""OLMo 2: norms after attention and feed-forward, none before; norms of queries and keys span all heads."""

from __future__ import annotations

from dataclasses import replace

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families.base import Family, GgufRules
from onbeat.engine.model_config.values import Values


def _olmo2(config: ModelConfig) -> ModelConfig:
    return replace(config, norms="after", qk_norm="all", norm_rounds_once=True)


def _from_hf(config: ModelConfig, values: Values) -> ModelConfig:
    has_bias = values.flag("attention_bias", default=False)
    return replace(_olmo2(config), attention_bias=has_bias, attention_output_bias=has_bias)


def _from_gguf(config: ModelConfig, values: Values) -> ModelConfig:  # noqa: ARG001
    return _olmo2(config)


OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    context=2048,
    from_hf=_from_hf,
    gguf=GgufRules(
        architecture="olmo2",
        complete=_from_gguf,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
)
