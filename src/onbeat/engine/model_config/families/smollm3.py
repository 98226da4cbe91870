"""SmolLM3: Llama with every fourth layer without positions (NoPE)."""

from __future__ import annotations

from dataclasses import replace

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families.base import Family, GgufRules, listed_layers, window_of
from onbeat.engine.model_config.hf_rope import RopeRules
from onbeat.engine.model_config.values import Values


def _every(period: int, num_layers: int) -> tuple[bool, ...]:
    return tuple((index + 1) % period == 0 for index in range(num_layers))


def _from_hf(config: ModelConfig, values: Values) -> ModelConfig:
    num_layers = config.num_layers
    turning = values.raw("no_rope_layers")  # which has 1 where there is a rotary embedding
    if turning is not None and (not isinstance(turning, list) or len(turning) < num_layers):
        raise values.wrong("no_rope_layers", turning, f"a list of 0 and 1 for {num_layers} layers")
    nope = (
        _every(values.size("no_rope_layer_interval", 4), num_layers)
        if turning is None
        else tuple(not turns for turns in turning[:num_layers])
    )
    window = window_of(values, None) if values.flag("use_sliding_window", default=False) else None
    sliding = () if window is None else listed_layers(values, num_layers) or nope
    has_bias = values.flag("attention_bias", default=False)
    return replace(
        config,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        nope_layers=nope,
        sliding_window=window if any(sliding) else None,
        sliding_layers=sliding if any(sliding) else (),
    )


def _from_gguf(config: ModelConfig, values: Values) -> ModelConfig:  # noqa: ARG001
    # The format leaves the pattern out; llama.cpp has it as a constant.
    return replace(config, nope_layers=_every(4, config.num_layers))


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    context=32_768,
    rope=RopeRules(theta=2_000_000.0),
    ties_embeddings=True,
    from_hf=_from_hf,
    gguf=GgufRules(architecture="smollm3", complete=_from_gguf, permutes=True),
)
