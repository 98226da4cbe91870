"""Sizes of attention that differs between layers, or keeps something else than keys and values of heads.

What the fields are says `ModelSpec`. They are sums over all layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from onbeat.core.errors import ConfigError
from onbeat.typed import take

FULL, LINEAR = "full_attention", "linear_attention"


_LARGEST = 2**26
"""Of any size of a model, such as its context; a list of its layers would take memory and time."""
_Size = Annotated[int, Meta(ge=0, le=_LARGEST)]


class SizeReader:
    """Reads whole numbers of a Hugging Face configuration and names what is missing."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self._name = name

    def size(self, *keys: str, default: int | None = None) -> int:
        """Return the first key that is there and not null.

        Raises
        ------
        ConfigError : it is no whole number of at least 0, or there is none and no default.
        """
        for key in keys:
            if (value := take(_Size, self.config, key, f"model {self._name}")) is not None:
                return int(value)
        if default is None:
            raise ConfigError(f"model {self._name}: the configuration lacks {' or '.join(keys)}")
        return default

    def sizes(self, *keys: str) -> list[int]:
        """Return these sizes.

        Raises
        ------
        ConfigError : as `size` does.
        """
        return [self.size(key) for key in keys]

    def layers(self) -> list[str]:
        """Return the kind of attention of each layer.

        Raises
        ------
        ConfigError : the configuration does not say.
        """
        kinds = self.config.get("layer_types")
        if not isinstance(kinds, list) or len(kinds) != self.size("num_hidden_layers"):
            raise ConfigError(f"model {self._name}: layer_types must name the attention of each layer")
        return kinds


def latent_attention(read: SizeReader) -> dict[str, int]:
    """Return the sizes of multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024).

    All heads share one latent vector, which every device holds whole. Prompts multiply with keys and values
    made of it, decodes with itself.
    """
    layers, hidden, heads = read.sizes("num_hidden_layers", "hidden_size", "num_attention_heads")
    latent, rope, nope, value = read.sizes(
        "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
    )
    query, of_queries = read.size("q_lora_rank", default=0), heads * (nope + rope)
    weights = query * (hidden + of_queries) if query else hidden * of_queries
    weights += hidden * (latent + rope) + heads * (latent * (nope + value) + value * hidden)
    return {
        "num_kv_heads": 1,
        "head_dim": value,
        "attention_weights": layers * weights,
        "kv_width": layers * (latent + rope),
        "pair_width": layers * heads * (nope + rope + value),
        "decode_pair_width": layers * heads * (2 * latent + rope),
    }


def linear_attention(read: SizeReader) -> dict[str, int]:
    """Return the sizes of layers of gated delta rules between some of full attention (Qwen3.5).

    A linear layer keeps a matrix of each value head in float32, and the last inputs of its convolution in 16
    bits.
    """
    kinds, (hidden, dim) = read.layers(), read.sizes("hidden_size", "head_dim")
    heads, kv_heads = read.sizes("num_attention_heads", "num_key_value_heads")
    key, value, kernel = read.sizes("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
    key_heads, value_heads = read.sizes("linear_num_key_heads", "linear_num_value_heads")
    values, inputs = value_heads * value, 2 * key_heads * key + value_heads * value
    full, linear = kinds.count(FULL), kinds.count(LINEAR)
    queries = 2 * heads if read.config.get("attn_output_gate") else heads
    return {
        "attention_weights": full * hidden * dim * (queries + heads + 2 * kv_heads)
        + linear * (hidden * (inputs + 2 * values + 2 * value_heads) + inputs * kernel),
        "kv_width": full * 2 * kv_heads * dim,
        "pair_width": full * 2 * heads * dim,
        "state_bytes": linear * (4 * value_heads * key * value + 2 * inputs * (kernel - 1)),
    }


def two_widths(read: SizeReader) -> dict[str, int]:
    """Return the sizes of attention whose heads are wider in layers without a window (Gemma 4).

    Values may be the keys there, and the last layers may use the KV of earlier ones.
    """
    kinds, (hidden, heads) = read.layers(), read.sizes("hidden_size", "num_attention_heads")
    own = len(kinds) - read.size("num_kv_shared_layers", default=0)
    sizes: Counter[str] = Counter()
    for layer, kind in enumerate(kinds):
        is_full = kind == FULL
        prefix = "global_" if is_full else ""
        dim = read.size(f"{prefix}head_dim", "head_dim")
        kv_heads = (layer < own) * read.size(f"num_{prefix}key_value_heads", "num_key_value_heads")
        projections = 1 if is_full and read.config.get("attention_k_eq_v") else 2
        widths = {"kv_width": 2 * kv_heads * dim, "pair_width": 2 * heads * dim}
        sizes.update(widths, attention_weights=hidden * dim * (2 * heads + projections * kv_heads))
        if not is_full:
            sizes.update({f"sliding_{name}": width for name, width in widths.items()})
    return dict(sizes)
