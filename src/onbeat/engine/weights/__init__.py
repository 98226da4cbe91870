"""Weights under their Hugging Face parameter names, from safetensors, GGUF, or a random generator."""

from onbeat.engine.weights.checkpoint import Checkpoint, QuantizedRows
from onbeat.engine.weights.dummy import DummyCheckpoint
from onbeat.engine.weights.open import open_checkpoint, read_model_config
from onbeat.engine.weights.parameters import parameter_shapes

__all__ = [
    "Checkpoint",
    "DummyCheckpoint",
    "QuantizedRows",
    "open_checkpoint",
    "parameter_shapes",
    "read_model_config",
]
