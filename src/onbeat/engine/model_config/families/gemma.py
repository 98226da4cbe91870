"""Gemma 2, the text of Gemma 3 and 4: norms before and after each block, scaled embeddings, sliding layers.

Norms store `scale - 1`. Gemma 2 caps scores and logits softly. Gemma 3 has norms of each head instead, and
its sliding layers have a rotary embedding of their own. In Gemma 4 norms store the scale itself; layers
without a window have wider and fewer heads, of which a part turns; small ones have per-layer embeddings, and
their last layers read the KV of earlier ones; one has experts beside its feed-forward.
"""

from __future__ import annotations

from dataclasses import replace

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families import base
from onbeat.engine.model_config.families.base import Family, GgufRules
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
    layers = base.sliding_layers(values, 2, config.num_layers)
    return replace(
        base.with_layers(_scaled(config, values), base.window_of(values), layers),
        attention_softcap=base.number_or_none(values, "attn_logit_softcapping"),
        logits_softcap=base.number_or_none(values, "final_logit_softcapping"),
    )


def _gemma3(config: ModelConfig, values: Values) -> ModelConfig:
    pattern = values.raw("sliding_window_pattern")
    if isinstance(pattern, list):
        layers = tuple(map(bool, pattern))
    else:
        layers = base.sliding_layers(values, values.size("sliding_window_pattern", 6), config.num_layers)
    return base.with_layers(_scaled(config, values), base.window_of(values), layers)


GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    models="Gemma 2",
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
    always={"norms": "around", "norm_weight_offset": 1.0, "norm_rounds_once": True, "qk_norm": "head"},
    rope=RopeRules(per_layer_type=True),
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    reads=frozenset({"sliding_window"}),
    complete=_gemma3,
    gguf=GgufRules(architecture="gemma3", theta=1_000_000.0, has_windows=True),
)


def _gemma4(config: ModelConfig, values: Values) -> ModelConfig:
    values.refuse_unless("use_bidirectional_attention", False, "vision")  # noqa: FBT003 -- of images alone
    layers = base.sliding_layers(values, 6, config.num_layers)
    if size := values.count("hidden_size_per_layer_input", 0):
        values.refuse_unless("vocab_size_per_layer_input", config.vocab_size)
    if values.flag("enable_moe_block", default=False):
        of_layer = base.experts_of(values, count="num_experts")
        config = replace(config, experts=replace(of_layer, is_beside=True))
    config = replace(
        config,
        embedding_scale=config.hidden_size**0.5,
        logits_softcap=base.number_or_none(values, "final_logit_softcapping"),
        full_values_are_keys=values.flag("attention_k_eq_v", default=False),
        layer_input_size=size,
    )
    # The last one sees everything.
    config = base.with_layers(config, base.window_of(values), (*layers[:-1], False))
    shared = values.count("num_kv_shared_layers", 0)
    widens = values.flag("use_double_wide_mlp", default=False)
    return replace(config, num_kv_sharers=shared, widens_sharers=widens)


GEMMA4 = Family(
    name="gemma4",
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    models="Gemma 4, its text",
    multimodal=("Gemma4ForConditionalGeneration",),
    always={"norms": "around", "norm_rounds_once": True, "qk_norm": "head"}
    | {"norms_values": True, "attention_multiplier": 1.0, "scales_layers": True},
    rope=RopeRules(per_layer_type=True, kinds=("default", "proportional")),
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    reads=frozenset(
        {"sliding_window", "final_logit_softcapping", "num_experts", "use_bidirectional_attention"}
        | {"num_local_experts"}  # as GGUF files are read
    ),
    complete=_gemma4,
    hf_names=((".router.proj.", ".mlp.gate."), (".experts.", ".mlp.experts.")),
    gguf=GgufRules(architecture="gemma4", theta=1_000_000.0, has_windows=True),
)
