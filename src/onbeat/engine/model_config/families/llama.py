"""Llama's kin: what differs is a constant, a factor, or a few layers.

Llama 2 and 3, Yi and SmolLM2 have two norms in each layer, each before the block that it feeds. Mistral has
a sliding window in all layers, Ministral 3 queries that grow with their position, Mixtral experts, and a
window if it is asked for; GGUF files call Mistral and Mixtral `llama`, newer ones Mistral `mistral3`.
Granite 3, and Granite 4 where it is dense, have factors on embeddings, attention scores, what layers add,
and logits. OLMo 2 and 3 have their norms after attention and feed-forward, and norms of queries and keys
that span all heads; most layers of OLMo 3 slide. SmolLM3 has every fourth layer without positions (NoPE).
In Phi-3, Phi-3.5 and Phi-4-mini a part of each head may turn, by angles that LongRoPE scales; files have
queries, keys and values in one tensor, and gate and up in another.
"""

from __future__ import annotations

from dataclasses import replace

from onbeat.core.errors import NeedsVllm
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families import base
from onbeat.engine.model_config.families.base import NO_BIASES, Family, GgufRules
from onbeat.engine.model_config.rope import RopeRules
from onbeat.engine.model_config.values import Values

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    models="Llama 2 and 3, Yi, SmolLM2",
    gguf=GgufRules(architecture="llama", with_experts="MixtralForCausalLM", permutes=True),
)
MISTRAL = Family(
    name="llama",
    architecture="MistralForCausalLM",
    model_type="mistral",
    models="Mistral 7B, Nemo, Small 3 to 3.2",
    multimodal=("Mistral3ForConditionalGeneration",),
    bias_keys=NO_BIASES,
    reads=frozenset({"sliding_window"}),
    complete=base.with_window,
)


def _ministral3(config: ModelConfig, values: Values) -> ModelConfig:
    config = base.with_window(config, values)
    if (table := values.raw("rope_parameters")) is not None:
        values = Values(table, source="config.json's rope parameters")
    elif "llama_4_scaling_beta" not in values:  # a GGUF file of Mistral Small 3
        return config
    growth = values.number("llama_4_scaling_beta"), values.size("original_max_position_embeddings")
    return replace(config, query_growth=growth)


MINISTRAL3 = Family(
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    models="Ministral 3",
    multimodal=MISTRAL.multimodal,
    rope=RopeRules(kinds=("yarn",), grows=True),
    bias_keys=NO_BIASES,
    reads=frozenset({"sliding_window"}),
    complete=_ministral3,
    gguf=GgufRules(architecture="mistral3", permutes=True),
)


def _mixtral(config: ModelConfig, values: Values) -> ModelConfig:
    return replace(base.with_window(config, values), experts=base.experts_of(values))


MIXTRAL = Family(
    name="llama",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    models="Mixtral 8x7B, 8x22B",
    bias_keys=NO_BIASES,
    reads=frozenset({"num_local_experts", "sliding_window"}),
    complete=_mixtral,
    hf_names=(
        (".block_sparse_moe.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    ),
)
OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    models="OLMo 2",
    always={"norms": "after", "qk_norm": "all", "norm_rounds_once": True},
    gguf=GgufRules(architecture="olmo2", with_window="Olmo3ForCausalLM", has_windows=True),
)


def _olmo3(config: ModelConfig, values: Values) -> ModelConfig:
    layers = base.sliding_layers(values, 4, config.num_layers)
    return base.with_layers(config, base.window_of(values), layers)


OLMO3 = Family(
    name="olmo2",
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    models="OLMo 3",
    always=OLMO2.always,
    rope=RopeRules(per_layer_type=True, local_theta=None),
    reads=frozenset({"sliding_window"}),
    complete=_olmo3,
)
PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    models="Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
    rope=RopeRules(kinds=("default", "longrope", "su", "yarn"), is_partial=True),
    bias_keys=NO_BIASES,
    reads=frozenset({"sliding_window"}),
    complete=base.with_window,
    gguf=GgufRules(architecture="phi3", has_windows=True, fuses=("qkv_proj", "gate_up_proj")),
)


def _granite(config: ModelConfig, values: Values) -> ModelConfig:
    # GGUF's; llama.cpp: then nothing turns
    values.refuse_unless("rope.scaling.finetuned", True)  # noqa: FBT003 -- one of the values that it may have
    # A converter leaves out a factor of 0; attention's is then llama.cpp's own, by the width of a head.
    has_multiplier = "attention_multiplier" in values
    return replace(
        config,
        embedding_scale=values.number("embedding_multiplier", 1.0),
        attention_multiplier=values.number("attention_multiplier") if has_multiplier else None,
        residual_scale=values.number("residual_multiplier", 1.0),
        logits_divisor=values.number("logits_scaling", 1.0),
    )


GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    model_type="granite",
    models="dense Granite 3",
    reads=frozenset(
        {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}
    ),
    complete=_granite,
    gguf=GgufRules(architecture="granite", permutes=True),
)


def _granite4(config: ModelConfig, values: Values) -> ModelConfig:
    values.refuse_unless("num_local_experts", 0)
    types = values.raw("layer_types") or values.raw("layers_block_type") or ["mamba"]
    if not {*types} <= {"attention", "full_attention"}:
        raise NeedsVllm(
            "config.json has Mamba layers, which are not supported; Granite 4 is served where it has none"
        )
    turns = values.raw("position_embedding_type") == "rope"
    return replace(
        _granite(config, values),
        intermediate_size=values.size("shared_intermediate_size", 1024),
        nope_layers=() if turns else (True,) * config.num_layers,
    )


GRANITE4 = Family(
    name="granite",
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    models="Granite 4 without Mamba and experts",
    reads=GRANITE.reads | {"num_local_experts"},
    complete=_granite4,
    hf_names=(
        (".shared_mlp.input_linear.", ".mlp.gate_up_proj."),
        (".shared_mlp.output_linear.", ".mlp.down_proj."),
    ),
)


def _smollm3(config: ModelConfig, values: Values) -> ModelConfig:
    num_layers = config.num_layers
    turning = values.raw("no_rope_layers")  # which has 1 where there is a rotary embedding
    if turning is not None and (not isinstance(turning, list) or len(turning) < num_layers):
        raise values.wrong("no_rope_layers", turning, f"a list of 0 and 1 for {num_layers} layers")
    nope = (
        base.every(values.size("no_rope_layer_interval", 4), num_layers)
        if turning is None
        else tuple(not turns for turns in turning[:num_layers])
    )
    window = base.window_of(values) if values.flag("use_sliding_window", default=False) else None
    sliding = base.listed_layers(values, num_layers) or nope
    return replace(base.with_layers(config, window, sliding), nope_layers=nope)


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    models="SmolLM3",
    reads=frozenset({"sliding_window"}),
    complete=_smollm3,
    gguf=GgufRules(architecture="smollm3", permutes=True),
)
