"""Turns a checkpoint's tensors into layers: fuses projections, repacks weights.

Legend: D model width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onbeat.engine.layers.attention import HeadLayout, QKNorms, SelfAttention
from onbeat.engine.layers.embedding import Embedding
from onbeat.engine.layers.experts import SparseMLP
from onbeat.engine.layers.linear import Linear, select_linear_kernel
from onbeat.engine.layers.mlp import GatedMLP
from onbeat.engine.layers.norm import RMSNorm
from onbeat.engine.layers.rotary import RotaryEmbedding
from onbeat.engine.model_config import RopeConfig
from onbeat.engine.torch_weights import parameter_on
from onbeat.engine.weights import Checkpoint


class LayerLoader:
    """Builds the shared layers of one model from a checkpoint.

    Parameters
    ----------
    checkpoint : gives each tensor once.
    dtype : of weights and activations.
    device : where the weights go.
    """

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.dtype = dtype
        self.device = device
        self.linear_kernel = select_linear_kernel(dtype, device)

    def tensor(self, *names: str) -> Tensor:
        """Return the tensors joined along their first dimension."""
        parts = [parameter_on(self.checkpoint, name, self.dtype, self.device) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """Return one product with the projections of these names (without `.weight`) side by side."""
        weight_OI = self.tensor(*(f"{name}.weight" for name in names))
        bias_O = self.tensor(*(f"{name}.bias" for name in names)) if bias else None
        return self.linear_kernel(weight_OI, bias_O)

    def norm(self, name: str) -> RMSNorm:
        config = self.config
        return RMSNorm(
            self.tensor(f"{name}.weight"),
            config.rms_norm_eps,
            config.norm_weight_offset,
            rounds_once=config.norm_rounds_once,
        )

    def embedding(self) -> Embedding:
        return Embedding(self.tensor("model.embed_tokens.weight"), self.config.embedding_scale)

    def lm_head(self, embedding: Embedding) -> Linear:
        """Return the output projection.

        A tied one shares the embedding's memory, unless the kernel repacks weights: rows of a packed weight
        cannot be looked up, so this one matrix is then held twice. For a small model with a large vocabulary
        the plain product would take a quarter of a decode step.
        """
        if self.config.tie_word_embeddings:
            return self.linear_kernel(embedding.weight_VD)
        return self.linear("lm_head")

    def self_attention(self, layer_index: int) -> SelfAttention:
        config, prefix = self.config, f"model.layers.{layer_index}.self_attn"
        norms = (
            QKNorms(self.norm(f"{prefix}.q_norm"), self.norm(f"{prefix}.k_norm"), config.qk_norm == "all")
            if config.qk_norm
            else None
        )
        return SelfAttention(
            layer_index,
            HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim),
            qkv=self.linear(*(f"{prefix}.{part}_proj" for part in "qkv"), bias=config.attention_bias),
            output=self.linear(f"{prefix}.o_proj", bias=config.attention_output_bias),
            norms=norms,
        )

    def mlp(self, layer_index: int) -> GatedMLP:
        return self._mlp(f"model.layers.{layer_index}.mlp")

    def experts(self, layer_index: int) -> Linear:
        prefix, sizes = f"model.layers.{layer_index}.mlp", self.config.experts
        assert sizes is not None, "the layer has experts"
        experts = [self._mlp(f"{prefix}.experts.{index}") for index in range(sizes.num_experts)]
        return SparseMLP(self.linear(f"{prefix}.gate"), experts, sizes)

    def _mlp(self, prefix: str) -> GatedMLP:
        return GatedMLP(
            self.linear(f"{prefix}.gate_proj", f"{prefix}.up_proj"),
            self.linear(f"{prefix}.down_proj"),
            self.config.hidden_activation,
        )

    def rotary(self, rope: RopeConfig) -> RotaryEmbedding:
        return RotaryEmbedding(rope, self.config.head_dim, dtype=self.dtype, device=self.device)
