"""Families whose layers differ more from Llama's, each of a maker of its own.

Command-R and Cohere 2 have LayerNorm without biases, one for attention and feed-forward, which read the
same; Command-R+ has norms of each head, Cohere 2 no positions where its layers see everything. StarCoder2
and Phi-3.5-MoE have LayerNorm with biases; the feed-forward of the first has no gates, the second routes by
sparsemixer. In GLM-4 half of each head turns, and there are norms behind attention and feed-forward. Seed-
OSS has biases of its own choice. In all but StarCoder2, Phi-3.5-MoE and Seed-OSS neighbours turn together.

gpt-oss has experts with biases and a clamped activation, attention sinks, and windows in every other layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families import base
from onbeat.engine.model_config.families.base import Biases, Family, GgufRules
from onbeat.engine.model_config.families.llama import MIXTRAL
from onbeat.engine.model_config.rope import RopeRules
from onbeat.engine.model_config.values import Values


def _gpt_oss(config: ModelConfig, values: Values) -> ModelConfig:
    values.refuse_unless("swiglu_alpha", 1.702)
    values.refuse_unless("swiglu_limit", 7.0)
    layers = base.sliding_layers(values, 2, config.num_layers)
    return replace(
        base.with_layers(config, base.window_of(values), layers),
        hidden_activation="clamped_swiglu",
        experts=replace(base.experts_of(values), chooses_first=True, has_bias=True),
    )


def _parts(name: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a tensor of all experts holds: of each, gate and up row by row in turn.

    Numbers have their inputs first, [experts, D, 2 F]; blocks of MXFP4 and their scales come row by row.
    """
    prefix, found, kind = name.rpartition(".experts.")
    if not found:
        yield name, values
        return
    module, _, kind = kind.partition("_proj")
    kind = kind.removeprefix("_") or "weight"
    if kind == "weight":
        values = values.swapaxes(1, 2)
    for index, rows in enumerate(values):
        expert = f"{prefix}.experts.{index}"
        if module == "down":
            yield f"{expert}.down_proj.{kind}", rows
        else:
            yield f"{expert}.gate_proj.{kind}", rows[::2]
            yield f"{expert}.up_proj.{kind}", rows[1::2]


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    models="gpt-oss-20b, 120b",
    always={"has_sinks": True},
    reads=frozenset({"num_local_experts", "sliding_window"}),
    complete=_gpt_oss,
    hf_names=((".mlp.router.", ".mlp.gate."),),
    hf_parts=_parts,
    gguf=GgufRules(architecture="gpt-oss", theta=150_000.0, truncates_yarn=False, has_windows=True),
)


_INTERLEAVED = RopeRules(interleaves=True)


def _command_r(config: ModelConfig, values: Values) -> ModelConfig:
    return replace(
        config,
        logits_divisor=1 / values.number("logit_scale"),
        qk_norm="own" if values.flag("use_qk_norm", default=False) else None,
    )


def _cohere2(config: ModelConfig, values: Values) -> ModelConfig:
    sliding = base.sliding_layers(values, values.size("sliding_window_pattern", 4), config.num_layers)
    return replace(
        base.with_layers(_command_r(config, values), base.window_of(values), sliding),
        nope_layers=tuple(not slides for slides in sliding),
    )


COMMAND_R = Family(
    name="command-r",
    architecture="CohereForCausalLM",
    model_type="cohere",
    models="Command-R, Command-R+, Aya",
    always={"norms": "parallel", "norms_center": True},
    rope=_INTERLEAVED,
    bias_keys=Biases(mlp_bias=None),
    eps_key="layer_norm_eps",
    reads=frozenset({"logit_scale", "logits_scaling"}),  # which in GGUF files have one name
    complete=_command_r,
    gguf=GgufRules(architecture="command-r"),
)
COHERE2 = replace(
    COMMAND_R,
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    models="Command R7B, Command A",
    reads=COMMAND_R.reads | {"sliding_window"},
    complete=_cohere2,
    gguf=GgufRules(architecture="cohere2", has_windows=True),
)
STARCODER2 = Family(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    models="StarCoder2",
    always={"norms_center": True, "norm_bias": True, "is_gated": False},
    activation="gelu_pytorch_tanh",
    bias_keys=Biases("use_bias", "use_bias", "use_bias"),
    eps_key="norm_epsilon",
    reads=frozenset({"sliding_window"}),
    complete=base.with_window,
    gguf=GgufRules(architecture="starcoder2"),
    hf_names=((".c_fc.", ".up_proj."), (".c_proj.", ".down_proj.")),
)


def _phi_moe(config: ModelConfig, values: Values) -> ModelConfig:
    jitter = values.number("router_jitter_noise", 0.01)
    return replace(
        base.with_window(config, values),
        experts=replace(base.experts_of(values), mixer_jitter=jitter),
        head_bias=values.flag("lm_head_bias", default=False),
    )


PHI_MOE = Family(
    name="phi-moe",
    architecture="PhiMoEForCausalLM",
    model_type="phimoe",
    models="Phi-3.5-MoE",
    always={"norms_center": True, "norm_bias": True},
    rope=RopeRules(kinds=("default", "longrope")),
    bias_keys=Biases(mlp_bias=None),
    reads=frozenset({"num_local_experts", "sliding_window"}),
    complete=_phi_moe,
    hf_names=(*MIXTRAL.hf_names, (".mlp.router.", ".mlp.gate.")),
)
GLM4 = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    models="GLM-4-0414",
    always={"norms": "around"},
    rope=RopeRules(is_partial=True, interleaves=True),
    bias_keys=Biases(attention_output_bias=None, mlp_bias=None),
    gguf=GgufRules(architecture="glm4", fuses=("gate_up_proj",)),
    hf_names=(
        (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
        (".post_self_attn_layernorm.", ".post_attention_layernorm."),
        (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
    ),
)
ERNIE = Family(
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    models="dense ERNIE 4.5",
    rope=_INTERLEAVED,
    bias_keys=Biases("use_bias", "use_bias", "use_bias"),
    gguf=GgufRules(architecture="ernie4_5"),
)
SEED_OSS = Family(
    name="seed-oss",
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    models="Seed-OSS",
    bias_keys=Biases(attention_output_bias="attention_out_bias"),
    gguf=GgufRules(architecture="seed_oss"),
)
