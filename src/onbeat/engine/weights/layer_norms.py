"""Where the norms of a layer are, by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from onbeat.engine.model_config import NormPlaces


class LayerNorms(NamedTuple):
    """A layer's norms; None where there is none."""

    attention: str | None = None
    after_attention: str | None = None
    mlp: str | None = None
    after_mlp: str | None = None


LAYER_NORMS: Mapping[NormPlaces, LayerNorms] = {
    "before": LayerNorms(attention="input_layernorm", mlp="post_attention_layernorm"),
    "after": LayerNorms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"),
    "around": LayerNorms(
        attention="input_layernorm",
        after_attention="post_attention_layernorm",
        mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
}
