"""What a model is made of, whatever file it came from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from onbeat.core.errors import ModelLoadError

Family = Literal["llama", "qwen2", "qwen3", "gemma3"]
Activation = Literal["silu", "gelu_pytorch_tanh"]
RopeKind = Literal["default", "linear", "llama3", "factors"]

ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
"""Supported `architectures` entries of a config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer.

    The unscaled frequencies are `theta ** (-2i / head_dim)`; `kind` says how they are scaled.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    """linear, llama3: frequencies (llama3: the low ones) are divided by this."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths over `original_max_position_embeddings / low_freq_factor` are scaled in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths under `original_max_position_embeddings / high_freq_factor` are not scaled."""
    original_max_position_embeddings: int = 8192
    """llama3: the context length of pre-training."""
    frequency_factors: tuple[float, ...] | None = None
    """factors: one divisor for each of the head_dim / 2 frequencies (how GGUF files store llama3 scaling)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """An architecture-neutral description of a decoder-only model.

    Raises
    ------
    ModelLoadError : sizes that do not fit together.
    """

    family: Family
    architecture: str
    """The Hugging Face class name, such as `LlamaForCausalLM`."""
    vocab_size: int
    """Rows of the embedding; may be more than the tokenizer's."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    """The longest context the model was made for, tokens."""
    rms_norm_eps: float
    rope: RopeConfig
    """For every layer, or for the full-attention layers where `local_rope` is set."""
    local_rope: RopeConfig | None = None
    """For sliding layers, where they differ (Gemma 3)."""
    hidden_activation: Activation = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Whether q, k and v projections have a bias."""
    attention_output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    qk_norm: bool = False
    """Whether each head's query and key pass an RMSNorm before the rotary embedding."""
    sliding_window: int | None = None
    """A sliding layer's token sees itself and the `sliding_window - 1` tokens before it."""
    sliding_layers: tuple[bool, ...] = ()
    """For each layer whether it slides; empty means that none does."""
    query_pre_attn_scalar: float | None = None
    """Attention scores are scaled by its inverse square root; None stands for `head_dim`."""
    embedding_scale: float = 1.0
    """Factor on embeddings at the input (not on a tied output head)."""
    norm_weight_offset: float = 0.0
    """RMSNorm multiplies by `weight + norm_weight_offset` (Gemma: 1)."""
    dtype: str | None = None
    """The checkpoint's own type, such as `bfloat16`; None where it does not say or has several."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    has_head: bool = True
    """Whether the checkpoint is of a model that generates; if not, the embedding stands in for the head."""
    pooling: str | None = None
    """How the checkpoint says that embeddings are pooled (`last`, `mean`, or what is not supported); None
    where it says nothing."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"the model has {self.num_heads} attention heads, which is no multiple of its "
                f"{self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        if self.sliding_layers and len(self.sliding_layers) != self.num_layers:
            raise ModelLoadError(
                f"the layer pattern names {len(self.sliding_layers)} layers, the model has {self.num_layers}"
            )
        if any(self.sliding_layers) and self.sliding_window is None:
            raise ModelLoadError("the layer pattern has sliding layers, but sliding_window is not set")

    @property
    def attention_scale(self) -> float:
        """Factor on the scores q.k."""
        return 1.0 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    def is_sliding(self, layer_index: int) -> bool:
        """Whether a layer attends to the sliding window only."""
        return bool(self.sliding_layers) and self.sliding_layers[layer_index]

    def layer_window(self, layer_index: int) -> int | None:
        """Return a layer's sliding window in tokens, or None where it attends to everything."""
        return self.sliding_window if self.is_sliding(layer_index) else None

    def layer_rope(self, layer_index: int) -> RopeConfig:
        """Return the rotary embedding of a layer."""
        return self.local_rope if self.local_rope is not None and self.is_sliding(layer_index) else self.rope


def unsupported_architecture(name: object, supported: Iterable[str], *, source: str) -> ModelLoadError:
    """Return the error for an architecture that onbeat does not run.

    Parameters
    ----------
    name, supported : as the source spells architectures.
    source : what names it.
    """
    return ModelLoadError(
        f"{source}'s architecture {name!r} is not supported; supported: {', '.join(sorted(supported))}"
    )
