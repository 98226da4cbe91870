"""Gemma 3 (text): a norm before and after each block, head norms, most layers with a sliding window.

The window, both rotary embeddings, the embedding's scale and the norms' offset come from the configuration.

Legend: T tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor

from onbeat.engine.attention.base import ForwardContext
from onbeat.engine.layers.rotary import Rotation
from onbeat.engine.models.loader import LayerLoader


class Gemma3Layer:
    """`x + norm(attention(norm(x)))`, then `x + norm(mlp(norm(x)))`."""

    def __init__(self, loader: LayerLoader, layer_index: int) -> None:
        prefix = f"model.layers.{layer_index}"
        self.attention_norm = loader.norm(f"{prefix}.input_layernorm")
        self.attention = loader.self_attention(layer_index)
        self.after_attention_norm = loader.norm(f"{prefix}.post_attention_layernorm")
        self.mlp_norm = loader.norm(f"{prefix}.pre_feedforward_layernorm")
        self.mlp = loader.mlp(layer_index)
        self.after_mlp_norm = loader.norm(f"{prefix}.post_feedforward_layernorm")

    def __call__(self, hidden_TD: Tensor, rotation: Rotation, context: ForwardContext) -> Tensor:
        mixed_TD = self.attention(self.attention_norm(hidden_TD), rotation, context)
        hidden_TD = hidden_TD + self.after_attention_norm(mixed_TD)
        return hidden_TD + self.after_mlp_norm(self.mlp(self.mlp_norm(hidden_TD)))
