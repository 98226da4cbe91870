"""The table of model families, and how a model is built from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from onbeat.engine.layers.ranks import ONE_RANK, Ranks
from onbeat.engine.model_config import Family
from onbeat.engine.models.gemma3 import Gemma3Layer
from onbeat.engine.models.llama import LlamaLayer
from onbeat.engine.models.loader import LayerLoader
from onbeat.engine.models.model import DecoderLayer, Model
from onbeat.engine.models.qwen2 import Qwen2Layer
from onbeat.engine.models.qwen3 import Qwen3Layer
from onbeat.engine.weights import Checkpoint

DECODER_LAYERS: Mapping[Family, Callable[[LayerLoader, int], DecoderLayer]] = {
    "llama": LlamaLayer,
    "qwen2": Qwen2Layer,
    "qwen3": Qwen3Layer,
    "gemma3": Gemma3Layer,
}


def build_model(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_RANK
) -> Model:
    """Build a model and load its weights.

    Parameters
    ----------
    checkpoint : configuration and weights.
    dtype : of weights and activations: float32, bfloat16 or float64.
    device : where it runs.
    ranks : the processes that it is split among; the checkpoint then has this rank's parts.

    Raises
    ------
    ModelLoadError : a weight is missing or cannot be read.
    """
    with torch.inference_mode():
        loader = LayerLoader(checkpoint, dtype=dtype, device=device, ranks=ranks)
        return Model(loader, DECODER_LAYERS[checkpoint.config.family])
