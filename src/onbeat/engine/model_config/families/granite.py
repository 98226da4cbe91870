"""Granite 3: Llama with factors on embeddings, attention scores, what layers add, and logits."""

from __future__ import annotations

from dataclasses import replace

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families.base import Family, GgufRules
from onbeat.engine.model_config.values import Values

_HF_KEYS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_GGUF_KEYS = ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")


def _with_factors(config: ModelConfig, values: Values, keys: tuple[str, str, str, str]) -> ModelConfig:
    embedding, attention, residual, logits = keys
    return replace(
        config,
        embedding_scale=values.number(embedding, 1.0),
        attention_multiplier=values.number(attention, 1.0),
        residual_scale=values.number(residual, 1.0),
        logits_divisor=values.number(logits, 1.0),
    )


def _from_hf(config: ModelConfig, values: Values) -> ModelConfig:
    has_bias = values.flag("attention_bias", default=False)
    return replace(
        _with_factors(config, values, _HF_KEYS), attention_bias=has_bias, attention_output_bias=has_bias
    )


def _from_gguf(config: ModelConfig, values: Values) -> ModelConfig:
    if not values.flag("rope.scaling.finetuned", default=True):  # llama.cpp: then nothing turns
        raise values.wrong("rope.scaling.finetuned", values.raw("rope.scaling.finetuned"), "true")
    config = _with_factors(config, values, _GGUF_KEYS)
    # A converter leaves out a factor of 0; attention's is then llama.cpp's own, by the width of a head.
    return config if "attention.scale" in values else replace(config, attention_multiplier=None)


GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    model_type="granite",
    context=2048,
    reads=frozenset(_HF_KEYS),
    from_hf=_from_hf,
    gguf=GgufRules(architecture="granite", complete=_from_gguf, permutes=True, reads=frozenset(_GGUF_KEYS)),
)
