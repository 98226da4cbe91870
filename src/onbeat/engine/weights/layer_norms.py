"""Where the norms of a layer are, for the engines that run all families by one generic layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from onbeat.engine.model_config import Family


class LayerNorms(NamedTuple):
    """A layer's norms by their names in a checkpoint."""

    attention: str
    mlp: str
    after_attention: str | None = None
    after_mlp: str | None = None


_TWO_NORMS = LayerNorms("input_layernorm", "post_attention_layernorm")
LAYER_NORMS: Mapping[Family, LayerNorms] = {
    "llama": _TWO_NORMS,
    "qwen2": _TWO_NORMS,
    "qwen3": _TWO_NORMS,
    "gemma3": LayerNorms(
        attention="input_layernorm",
        mlp="pre_feedforward_layernorm",
        after_attention="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
}
"""The families that a generic layer runs."""
