"""Llama 2 and 3, Yi, SmolLM2: two norms in each layer, each before the block that it feeds."""

from __future__ import annotations

from dataclasses import replace

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families.base import Family, GgufRules
from onbeat.engine.model_config.values import Values


def _from_hf(config: ModelConfig, values: Values) -> ModelConfig:
    # The class has no window; a configuration that asks for one was meant for another class.
    values.refuse_unless("sliding_window")
    has_bias = values.flag("attention_bias", default=False)
    return replace(config, attention_bias=has_bias, attention_output_bias=has_bias)


def _from_gguf(config: ModelConfig, values: Values) -> ModelConfig:  # noqa: ARG001
    return config if config.experts is None else replace(config, architecture="MixtralForCausalLM")


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    context=2048,
    from_hf=_from_hf,
    gguf=GgufRules(
        architecture="llama", complete=_from_gguf, permutes=True, reads=frozenset({"expert_count"})
    ),
)
