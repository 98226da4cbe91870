"""The attention block of a layer: projections, optional norms, rotation, paged attention.

Legend: T tokens, D model width, N query heads, K KV heads, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from onbeat.engine.attention.torch_sdpa import ForwardContext
from onbeat.engine.layers.linear import Linear
from onbeat.engine.layers.norm import RMSNorm
from onbeat.engine.layers.rotary import Rotation


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How the columns of the fused projection are divided: N query heads, K key heads, K value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class QKNorms:
    """Norms of queries and keys."""

    query: RMSNorm
    key: RMSNorm
    spans_all: bool = False
    """Whether they span all heads of a token together, else each by itself."""

    def apply(self, norm: RMSNorm, x_TNH: Tensor) -> Tensor:
        return norm(x_TNH.flatten(1)).view(x_TNH.shape) if self.spans_all else norm(x_TNH)


class SelfAttention:
    """Causal self-attention of one layer.

    Parameters
    ----------
    layer_index : which layer's KV cache it reads and writes.
    heads : the division of `qkv`'s output.
    qkv, output : projections.
    norms : applied to queries and keys before the rotation, where the family has them.
    """

    def __init__(
        self, layer_index: int, heads: HeadLayout, *, qkv: Linear, output: Linear, norms: QKNorms | None
    ) -> None:
        self.layer_index = layer_index
        self.heads = heads
        self.qkv = qkv
        self.output = output
        self.norms = norms

    def __call__(self, x_TD: Tensor, rotation: Rotation, context: ForwardContext) -> Tensor:
        num_heads, num_kv_heads = self.heads.num_heads, self.heads.num_kv_heads
        heads_THH = self.qkv(x_TD).view(x_TD.shape[0], num_heads + 2 * num_kv_heads, self.heads.head_dim)
        v_TKH = heads_THH[:, num_heads + num_kv_heads :]
        if self.norms is None:
            # Queries and keys are neighbours in the fused output, so that one rotation serves both.
            rotated_THH = rotation.apply(heads_THH[:, : num_heads + num_kv_heads])
            q_TNH, k_TKH = rotated_THH[:, :num_heads], rotated_THH[:, num_heads:]
        else:
            norms = self.norms
            q_TNH = rotation.apply(norms.apply(norms.query, heads_THH[:, :num_heads]))
            k_TKH = heads_THH[:, num_heads : num_heads + num_kv_heads]
            k_TKH = rotation.apply(norms.apply(norms.key, k_TKH))
        mixed_TNH = context.attention.run(self.layer_index, q_TNH, k_TKH, v_TKH, context.metadata)
        return self.output(mixed_TNH.flatten(1))
