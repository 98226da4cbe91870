"""Mistral: Llama with a sliding window in all layers. Mixtral: with experts, and a window if it is asked for.

GGUF files call both `llama`.
"""

from __future__ import annotations

from dataclasses import replace

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families.base import Family, experts_of, window_of, with_window
from onbeat.engine.model_config.hf_rope import RopeRules
from onbeat.engine.model_config.values import Values


def _mistral(config: ModelConfig, values: Values) -> ModelConfig:
    return with_window(config, window_of(values, 4096))


def _mixtral(config: ModelConfig, values: Values) -> ModelConfig:
    experts = experts_of(
        values, count="num_local_experts", intermediate_size="intermediate_size", normalizes=True
    )
    return replace(with_window(config, window_of(values, None)), experts=experts)


MISTRAL = Family(
    name="llama", architecture="MistralForCausalLM", model_type="mistral", context=131_072, from_hf=_mistral
)
MIXTRAL = Family(
    name="llama",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    context=131_072,
    rope=RopeRules(theta=1_000_000.0),
    reads=frozenset({"num_local_experts"}),
    from_hf=_mixtral,
    hf_names=(
        (".block_sparse_moe.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    ),
)
