"""A decoder-only model: embedding, layers, final norm, output projection.

Legend: T tokens of the step, R sampling rows, D model width, V vocabulary.

The one decoder layer of all families; what differs is declared in `ModelConfig`.

Legend: T tokens, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onbeat.engine.attention.torch_sdpa import ForwardContext
from onbeat.engine.layers.rotary import RotaryEmbedding, Rotation
from onbeat.engine.model_config import ModelConfig, RopeConfig
from onbeat.engine.models.loader import LayerLoader
from onbeat.engine.weights import Checkpoint
from onbeat.engine.weights.layer_norms import LAYER_NORMS


class DecoderLayer:
    """`x + norm(attention(norm(x)))`, then `x + norm(mlp(norm(x)))`, with the norms that the family has."""

    def __init__(self, loader: LayerLoader, layer_index: int) -> None:
        names = LAYER_NORMS[loader.config.norms]
        self.attention_norm, self.after_attention_norm, self.mlp_norm, self.after_mlp_norm = (
            None if name is None else loader.norm(f"model.layers.{layer_index}.{name}") for name in names
        )
        self.attention = loader.self_attention(layer_index)
        self.mlp = (
            loader.experts(layer_index) if loader.config.has_experts(layer_index) else loader.mlp(layer_index)
        )
        self.residual_scale = loader.config.residual_scale

    def __call__(self, hidden_TD: Tensor, rotation: Rotation, context: ForwardContext) -> Tensor:
        x_TD = hidden_TD if self.attention_norm is None else self.attention_norm(hidden_TD)
        x_TD = self.attention(x_TD, rotation, context)
        if self.after_attention_norm is not None:
            x_TD = self.after_attention_norm(x_TD)
        hidden_TD = self._add(hidden_TD, x_TD)
        x_TD = self.mlp(hidden_TD if self.mlp_norm is None else self.mlp_norm(hidden_TD))
        if self.after_mlp_norm is not None:
            x_TD = self.after_mlp_norm(x_TD)
        return self._add(hidden_TD, x_TD)

    def _add(self, hidden_TD: Tensor, x_TD: Tensor) -> Tensor:
        return hidden_TD + (x_TD if self.residual_scale == 1.0 else x_TD * self.residual_scale)


class Model:
    """Layers between embedding and output projection.

    Parameters
    ----------
    loader : source of the parts.
    """

    def __init__(self, loader: LayerLoader) -> None:
        config = loader.config
        self.config: ModelConfig = config
        self.dtype = loader.dtype
        self.device = loader.device
        self.embedding = loader.embedding()
        self.layers = [DecoderLayer(loader, index) for index in range(config.num_layers)]
        self.layer_ropes: list[RopeConfig] = [config.layer_rope(index) for index in range(config.num_layers)]
        self.rotaries: dict[RopeConfig, RotaryEmbedding] = {
            rope: loader.rotary(rope) for rope in dict.fromkeys(self.layer_ropes)
        }
        self.norm = loader.norm("model.norm")
        self.lm_head = loader.lm_head(self.embedding)
        self.linear_kernel = loader.linear_kernel.kernel
        """Name of the kernel that multiplies by the layers' weights."""

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        """Run new tokens through the layers and return hidden states before the final norm, [T, D]."""
        hidden_TD = self.embedding(token_ids_T)
        rotations = {rope: rotary.at(positions_T) for rope, rotary in self.rotaries.items()}
        for layer, rope in zip(self.layers, self.layer_ropes, strict=True):
            hidden_TD = layer(hidden_TD, rotations[rope], context)
        return hidden_TD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return logits of rows of `forward`'s result, [R, V], float32 (float64 in a float64 model)."""
        logits_RV = self.lm_head(self.norm(hidden_RD))
        if self.config.logits_divisor != 1.0:
            logits_RV = logits_RV / self.config.logits_divisor
        return logits_RV if self.dtype == torch.float64 else logits_RV.float()


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
        return Model(LayerLoader(checkpoint, dtype=dtype, device=device))
