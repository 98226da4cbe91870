"""Phi-3, Phi-3.5 and Phi-4-mini: a part of each head may turn, by angles that LongRoPE scales.

Files have queries, keys and values in one tensor, and gate and up in another.
"""

from __future__ import annotations

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families.base import Family, GgufRules, window_of, with_window
from onbeat.engine.model_config.hf_rope import RopeRules
from onbeat.engine.model_config.values import Values


def _from_hf(config: ModelConfig, values: Values) -> ModelConfig:
    return with_window(config, window_of(values, None))


def _from_gguf(config: ModelConfig, values: Values) -> ModelConfig:
    # llama.cpp writes 0 for none, and computes without the window that the model was trained with.
    return with_window(config, values.raw("attention.sliding_window") or None)


PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    context=4096,
    rope=RopeRules(kinds=("default", "longrope", "su", "yarn"), is_partial=True),
    from_hf=_from_hf,
    gguf=GgufRules(
        architecture="phi3",
        complete=_from_gguf,
        reads=frozenset({"attention.sliding_window", "rope.dimension_count"}),
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
)
