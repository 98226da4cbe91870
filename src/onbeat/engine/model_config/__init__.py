"""What a model is made of, read from a Hugging Face config.json or a GGUF file. No torch."""

from onbeat.engine.model_config.architecture import (
    Activation,
    Experts,
    KVHeads,
    LinearAttention,
    ModelConfig,
    NormPlaces,
    RopeConfig,
    RopeKind,
)
from onbeat.engine.model_config.gguf import RopeFactors, model_config_from_gguf
from onbeat.engine.model_config.hf import model_config_from_hf
from onbeat.engine.model_config.rope import head_order, inverse_frequencies

__all__ = [
    "Activation",
    "Experts",
    "KVHeads",
    "LinearAttention",
    "ModelConfig",
    "NormPlaces",
    "RopeConfig",
    "RopeFactors",
    "RopeKind",
    "head_order",
    "inverse_frequencies",
    "model_config_from_gguf",
    "model_config_from_hf",
]
