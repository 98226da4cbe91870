"""The one decoder layer of all families; what differs is declared in `ModelConfig`.

Legend: T tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor

from onbeat.engine.attention.base import ForwardContext
from onbeat.engine.layers.rotary import Rotation
from onbeat.engine.models.loader import LayerLoader
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
