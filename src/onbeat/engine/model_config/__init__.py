"""What a model is made of, read from a Hugging Face config.json or a GGUF file. No torch."""

from onbeat.engine.model_config.config import (
    ARCHITECTURES,
    Activation,
    Family,
    ModelConfig,
    RopeConfig,
    RopeKind,
)
from onbeat.engine.model_config.gguf import model_config_from_gguf
from onbeat.engine.model_config.hf import model_config_from_hf

__all__ = [
    "ARCHITECTURES",
    "Activation",
    "Family",
    "ModelConfig",
    "RopeConfig",
    "RopeKind",
    "model_config_from_gguf",
    "model_config_from_hf",
]
