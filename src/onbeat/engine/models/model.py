"""A decoder-only model: embedding, layers, final norm, output projection.

Legend: T tokens of the step, R sampling rows, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from onbeat.engine.attention.base import ForwardContext
from onbeat.engine.layers.rotary import RotaryEmbedding, Rotation
from onbeat.engine.model_config import ModelConfig, RopeConfig
from onbeat.engine.models.loader import LayerLoader


class DecoderLayer(Protocol):
    """One layer; adds to the residual stream."""

    def __call__(self, hidden_TD: Tensor, rotation: Rotation, context: ForwardContext) -> Tensor: ...


class Model:
    """A family's layers between embedding and output projection.

    Parameters
    ----------
    loader : source of the shared parts.
    build_layer : makes the layer of an index.
    """

    def __init__(self, loader: LayerLoader, build_layer: Callable[[LayerLoader, int], DecoderLayer]) -> None:
        config = loader.config
        self.config: ModelConfig = config
        self.dtype = loader.dtype
        self.device = loader.device
        self.embedding = loader.embedding()
        self.layers = [build_layer(loader, index) for index in range(config.num_layers)]
        self.layer_ropes: list[RopeConfig] = [config.layer_rope(index) for index in range(config.num_layers)]
        self.rotaries: dict[RopeConfig, RotaryEmbedding] = {
            rope: loader.rotary(rope) for rope in dict.fromkeys(self.layer_ropes)
        }
        self.norm = loader.norm("model.norm")
        self.lm_head = loader.lm_head(self.embedding)
        self.linear_kernel = loader.linear_kernel.kernel
        """Name of the kernel that multiplies by the layers' weights."""

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        context: ForwardContext,
    ) -> Tensor:
        """Run new tokens through the layers and return hidden states before the final norm, [T, D]."""
        hidden_TD = self.embedding(token_ids_T)
        rotations = {rope: rotary.at(positions_T) for rope, rotary in self.rotaries.items()}
        for layer, rope in zip(self.layers, self.layer_ropes, strict=True):
            hidden_TD = layer(hidden_TD, rotations[rope], context)
        return hidden_TD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return logits of rows of `forward`'s result, [R, V], float32 (float64 in a float64 model)."""
        logits_RV = self.lm_head(self.norm(hidden_RD))
        return logits_RV if self.dtype == torch.float64 else logits_RV.float()
