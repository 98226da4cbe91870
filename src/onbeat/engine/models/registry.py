"""The table of model families, and how a model is built from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from onbeat.core.errors import ConfigError
from onbeat.engine.model_config import Family
from onbeat.engine.models.gemma3 import Gemma3Layer
from onbeat.engine.models.llama import LlamaLayer
from onbeat.engine.models.loader import LayerLoader
from onbeat.engine.models.model import DecoderLayer, Model
from onbeat.engine.models.qwen2 import Qwen2Layer
from onbeat.engine.models.qwen3 import Qwen3Layer
from onbeat.engine.weights import Checkpoint, DummyCheckpoint, open_checkpoint, read_model_config
from onbeat.hub.files import ModelFiles

DECODER_LAYERS: Mapping[Family, Callable[[LayerLoader, int], DecoderLayer]] = {
    "llama": LlamaLayer,
    "qwen2": Qwen2Layer,
    "qwen3": Qwen3Layer,
    "gemma3": Gemma3Layer,
}


def build_model(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Model:
    """Build a model and load its weights.

    Parameters
    ----------
    checkpoint : configuration and weights.
    dtype : of weights and activations: float32, bfloat16 or float64.
    device : where it runs.

    Raises
    ------
    ModelLoadError : a weight is missing or cannot be read.
    """
    with torch.inference_mode():
        loader = LayerLoader(checkpoint, dtype=dtype, device=device)
        return Model(loader, DECODER_LAYERS[checkpoint.config.family])


def load_model(
    files: ModelFiles, *, dtype: torch.dtype, device: torch.device, load_format: str = "auto", seed: int = 0
) -> Model:
    """Build the model of some files.

    Parameters
    ----------
    files : a Hugging Face directory or a GGUF file.
    dtype, device : as for `build_model`.
    load_format : `auto` reads the weights; `dummy` makes random ones for the files' configuration.
    seed : of the random weights.

    Raises
    ------
    ConfigError : an unknown load format.
    ModelLoadError : the model cannot be read or is not supported.
    """
    if load_format == "auto":
        return build_model(open_checkpoint(files), dtype=dtype, device=device)
    if load_format == "dummy":
        return build_model(DummyCheckpoint(read_model_config(files), seed=seed), dtype=dtype, device=device)
    raise ConfigError(f"unknown load format {load_format!r}; choose auto or dummy")
