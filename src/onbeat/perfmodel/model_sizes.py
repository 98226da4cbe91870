"""Sizes of a decoder-only transformer, and the sums that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.precision import Precision
from onbeat.typed import Count, Size

SPREAD_OVER = 4096
"""Tokens of a request over which what it holds but once is spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes of one model, dense or mixture of experts.

    Counts leave biases and learned positions out (together under 0.5 % of any model here). What follows the
    windows are sums over all layers, for attention that is not that of the heads, which 0 stands for:

    - `attention_weights`.
    - `kv_width`: numbers that the KV cache keeps of a token; `sliding_kv_width`: of these, in layers with a
      window.
    - `pair_width`: products of a query with one key and its value; `sliding_pair_width`: of these, in layers
      with a window; `decode_pair_width`: where decodes multiply with what is cached as it is (latent
      attention).
    - `state_bytes`: what layers of linear attention keep of one request, however long it is.

    Raises
    ------
    ConfigError : a size below 1, query heads that KV heads do not divide, more experts a token than exist.
    """

    name: str
    num_layers: Count
    hidden_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    intermediate_size: Count
    """Width of the dense MLP; of layers with experts see `moe_intermediate_size`."""
    vocab_size: Count
    max_position_embeddings: Count
    is_gated_mlp: bool = True
    """Whether the MLP has three matrices (gate, up, down) or two."""
    ties_embeddings: bool = False
    num_experts: Count = 0
    num_experts_per_token: Count = 0
    moe_intermediate_size: Count = 0
    shared_intermediate_size: Count = 0
    """Width of the experts that every token passes, together; 0 for none."""
    num_moe_layers: Count = 0
    sliding_window: Size | None = None
    """Most tokens that a windowed layer attends to."""
    num_sliding_layers: Count = 0
    attention_weights: Count = 0
    kv_width: Count = 0
    sliding_kv_width: Count = 0
    pair_width: Count = 0
    sliding_pair_width: Count = 0
    decode_pair_width: Count = 0
    state_bytes: Count = 0

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"model {self.name}: {name} is {getattr(self, name)}; it must be at least 1"
                )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model {self.name}: {self.num_heads} query heads cannot share "
                f"{self.num_kv_heads} KV heads evenly"
            )
        if self.num_moe_layers and not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ConfigError(
                f"model {self.name}: {self.num_experts_per_token} experts a token of {self.num_experts}"
            )

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return self.num_moe_layers > 0

    @property
    def pair_products(self) -> int:
        """Products of a query with one key and its value, in all layers."""
        return self.pair_width or 2 * self.num_layers * self.num_heads * self.head_dim

    @property
    def mlp_parameters(self) -> int:
        """Weights of one dense layer's MLP."""
        return self._mlp(self.intermediate_size)

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert of one layer."""
        return self._mlp(self.moe_intermediate_size)

    @property
    def embedding_parameters(self) -> int:
        """Weights of the input embedding; the LM head has as many, or shares them."""
        return self.vocab_size * self.hidden_size

    @property
    def inner_width(self) -> int:
        """Numbers a token has inside one layer: queries, keys, values, the MLP before its activation."""
        dense = self.num_layers - self.num_moe_layers
        experts = self.num_experts_per_token * self.moe_intermediate_size + self.shared_intermediate_size
        mlp = (dense * self.intermediate_size + self.num_moe_layers * experts) // self.num_layers
        heads = self.num_heads + 2 * self.num_kv_heads
        return heads * self.head_dim + (2 if self.is_gated_mlp else 1) * mlp

    @property
    def dense_parameters(self) -> int:
        """Weights in the layers that every token passes, experts apart."""
        heads = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        per_moe_layer = self.hidden_size * self.num_experts + self._mlp(self.shared_intermediate_size)
        return (
            (self.attention_weights or self.num_layers * heads)
            + 2 * self.num_layers * self.hidden_size
            + (self.num_layers - self.num_moe_layers) * self.mlp_parameters
            + self.num_moe_layers * per_moe_layer
        )

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers, all experts."""
        return self.dense_parameters + self.num_moe_layers * self.num_experts * self.expert_parameters

    @property
    def active_layer_parameters(self) -> int:
        """Weights of the layers that one token is multiplied with."""
        return (
            self.dense_parameters + self.num_moe_layers * self.num_experts_per_token * self.expert_parameters
        )

    @property
    def num_parameters(self) -> int:
        """All weights, tied ones counted once."""
        return self.layer_parameters + self.embedding_parameters * (1 if self.ties_embeddings else 2)

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token uses, both embeddings included."""
        inactive = self.layer_parameters - self.active_layer_parameters
        return self.num_parameters - inactive

    def dense_bytes(self, precision: Precision) -> float:
        """Return the bytes of the layers' weights, experts apart: 16 bits each beside experts in mxfp4."""
        is_beside = precision.weights == "mxfp4" and self.is_moe
        return self.dense_parameters * (2.0 if is_beside else precision.weight_bytes)

    def expert_bytes(self, precision: Precision) -> float:
        """Return the bytes of all experts of all layers."""
        return self.num_moe_layers * self.num_experts * self.expert_parameters * precision.weight_bytes

    def weight_bytes(self, precision: Precision) -> float:
        """Return the bytes of all weights."""
        embeddings = self.embedding_parameters * (1 if self.ties_embeddings else 2)
        layers = self.dense_bytes(precision) + self.expert_bytes(precision)
        return layers + embeddings * precision.embedding_bytes

    def kv_bytes_per_token(self, precision: Precision) -> float:
        """Return the KV-cache bytes of one token in all layers."""
        kv = self.kv_width or 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return kv * precision.kv_bytes

    def sliding_share(self, width: int, of: int) -> float:
        """Return the share of layers with a window in a sum over all layers; 0: that of the layers."""
        return width / of if of else self.num_sliding_layers / self.num_layers

    def held_bytes_per_token(self, precision: Precision) -> float:
        """Return what a request of `SPREAD_OVER` tokens holds, for each of them.

        Layers with a window hold no more than that many tokens, layers of linear attention one state.
        """
        kept = min(self.sliding_window or SPREAD_OVER, SPREAD_OVER) / SPREAD_OVER
        share = 1 - self.sliding_share(self.sliding_kv_width, self.kv_width) * (1 - kept)
        return self.kv_bytes_per_token(precision) * share + self.state_bytes / SPREAD_OVER

    def _mlp(self, width: int) -> int:
        return (3 if self.is_gated_mlp else 2) * self.hidden_size * width


_SIZES = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    "max_position_embeddings",
)
