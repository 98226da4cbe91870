"""Llama family: Llama 2 and 3, Mistral (its sliding window included), Yi, SmolLM2.

Two norms in each layer, both before the block they feed.

Legend: T tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor

from onbeat.engine.attention.base import ForwardContext
from onbeat.engine.layers.rotary import Rotation
from onbeat.engine.models.loader import LayerLoader


class LlamaLayer:
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, loader: LayerLoader, layer_index: int) -> None:
        prefix = f"model.layers.{layer_index}"
        self.attention_norm = loader.norm(f"{prefix}.input_layernorm")
        self.attention = loader.self_attention(layer_index)
        self.mlp_norm = loader.norm(f"{prefix}.post_attention_layernorm")
        self.mlp = loader.mlp(layer_index)

    def __call__(self, hidden_TD: Tensor, rotation: Rotation, context: ForwardContext) -> Tensor:
        hidden_TD = hidden_TD + self.attention(self.attention_norm(hidden_TD), rotation, context)
        return hidden_TD + self.mlp(self.mlp_norm(hidden_TD))
