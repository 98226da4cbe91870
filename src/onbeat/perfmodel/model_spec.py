"""From a Hugging Face configuration to a model's sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.attention_sizes import SizeReader, latent_attention, linear_attention, two_widths
from onbeat.perfmodel.model_files import read_model_config
from onbeat.perfmodel.model_sizes import ModelSpec


@dataclass(frozen=True, slots=True)
class _Family:
    """What a `model_type` leaves unsaid in its configuration."""

    is_gated_mlp: bool = True
    ties_embeddings: bool = False
    sliding_share: Callable[[Mapping[str, Any], int], int] | None = None
    """(config, layers) -> layers with a sliding window; None where there are none."""
    divides_intermediate_size: int = 1
    default_intermediate_factor: int | None = None
    """MLP width over hidden size where the configuration has no width."""
    attention: Callable[[SizeReader], dict[str, int]] | None = None
    """Attention that differs from layer to layer, or has no heads of KV; None: that of the heads."""


def _all_layers(config: Mapping[str, Any], num_layers: int) -> int:
    return num_layers if config.get("use_sliding_window", True) else 0


def _alternating(config: Mapping[str, Any], num_layers: int) -> int:
    """Every other layer, the first one included, unless the layers are listed."""
    return _listed(config, (num_layers + 1) // 2)


def _listed(config: Mapping[str, Any], otherwise: int) -> int:
    types = config.get("layer_types")
    return sum(kind == "sliding_attention" for kind in types) if types else otherwise


def _by_pattern(config: Mapping[str, Any], num_layers: int) -> int:
    """All but every n-th layer."""
    return _listed(config, num_layers - num_layers // int(config.get("sliding_window_pattern", 6)))


def _qwen_windows(config: Mapping[str, Any], num_layers: int) -> int:
    """Layers beyond `max_window_layers`, and only if the window is switched on."""
    if not config.get("use_sliding_window", False):
        return 0
    return max(0, num_layers - int(config.get("max_window_layers", num_layers)))


_PLAIN = _Family()
_FAMILIES: Mapping[str, _Family] = {
    "llama": _PLAIN,
    "internlm": _PLAIN,
    "mistral": _Family(sliding_share=_all_layers),
    "mixtral": _Family(sliding_share=_all_layers),
    "qwen": _Family(divides_intermediate_size=2),  # its MLP halves the width that its configuration states
    "qwen2": _Family(sliding_share=_qwen_windows),
    "qwen2_moe": _Family(sliding_share=_qwen_windows),
    "qwen3": _Family(sliding_share=_qwen_windows),
    "qwen3_moe": _Family(sliding_share=_qwen_windows),
    "phi": _Family(is_gated_mlp=False),
    "phi3": _Family(sliding_share=_all_layers),
    "olmo2": _PLAIN,
    "smollm3": _Family(ties_embeddings=True),
    "granite": _PLAIN,
    "gemma": _Family(ties_embeddings=True),
    "gemma2": _Family(ties_embeddings=True, sliding_share=_alternating),
    "gemma3_text": _Family(ties_embeddings=True, sliding_share=_by_pattern),
    "opt": _Family(is_gated_mlp=False, ties_embeddings=True),
    "bloom": _Family(is_gated_mlp=False, ties_embeddings=True, default_intermediate_factor=4),
    "minimax_m2": _PLAIN,
    "gpt_oss": _Family(sliding_share=_alternating),
    "glm4_moe": _PLAIN,
    "deepseek_v3": _Family(attention=latent_attention),
    "qwen3_5_text": _Family(attention=linear_attention),
    "qwen3_5_moe_text": _Family(attention=linear_attention),
    "gemma4_text": _Family(ties_embeddings=True, sliding_share=_by_pattern, attention=two_widths),
    "falcon": _Family(is_gated_mlp=False, ties_embeddings=True, default_intermediate_factor=4),
}


def find_model_spec(name_or_path: str) -> ModelSpec:
    """Return the sizes of a model by name (hub ids too), by `config.json`, or by the directory that has one.

    Raises
    ------
    ConfigError : the model is not known or its configuration cannot be used.
    """
    name, config = read_model_config(name_or_path)
    return model_spec_from_hf(config, name=name)


def model_spec_from_hf(config: Mapping[str, Any], *, name: str) -> ModelSpec:
    """Return the sizes that a Hugging Face configuration states.

    Parameters
    ----------
    config : the content of `config.json`; of a multi-modal model its `text_config` is used.
    name : what the model is called in messages and reports.

    Raises
    ------
    ConfigError : a `model_type` that is not known, or a size that is missing or not a whole number.
    """
    if isinstance(text := config.get("text_config"), Mapping):
        config = {"model_type": _text_type(config), **text}
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ConfigError(
            f"model {name}: model_type {config.get('model_type')!r} is not known; "
            f"known are {', '.join(_FAMILIES)}"
        )
    read = SizeReader(config, name)
    hidden_size = read.size("hidden_size", "n_embed", "n_embd")
    num_layers = read.size("num_hidden_layers", "n_layer")
    num_heads = read.size("num_attention_heads", "n_head")
    sizes = {
        "num_kv_heads": _kv_heads(read, num_heads),
        "head_dim": read.size("head_dim", "kv_channels", default=hidden_size // max(num_heads, 1)),
    }
    if family.attention is not None:
        sizes |= family.attention(read)
    return ModelSpec(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=_intermediate_size(read, family, hidden_size),
        vocab_size=read.size("vocab_size"),
        max_position_embeddings=read.size(
            "max_position_embeddings", "seq_length", "n_positions", default=2048
        ),
        is_gated_mlp=family.is_gated_mlp,
        ties_embeddings=bool(config.get("tie_word_embeddings", family.ties_embeddings)),
        **sizes,
        **_experts(read, num_layers),
        **_windows(config, family, num_layers),
    )


def _text_type(config: Mapping[str, Any]) -> str:
    kind = str(config.get("model_type"))
    return kind if kind.endswith("_text") else f"{kind}_text"


def _kv_heads(read: SizeReader, num_heads: int) -> int:
    config = read.config
    if config.get("model_type") == "falcon" and not config.get("new_decoder_architecture", False):
        return 1 if config.get("multi_query", True) else num_heads
    return read.size("num_key_value_heads", "num_kv_heads", default=num_heads)


def _intermediate_size(read: SizeReader, family: _Family, hidden_size: int) -> int:
    factor = family.default_intermediate_factor
    default = hidden_size * factor if factor else read.config.get("moe_intermediate_size")
    width = read.size("intermediate_size", "ffn_dim", "ffn_hidden_size", default=default)
    return width // family.divides_intermediate_size


def _experts(read: SizeReader, num_layers: int) -> dict[str, int]:
    num_experts = read.size("num_experts", "num_local_experts", "n_routed_experts", default=0)
    if num_experts == 0:
        return {}
    dense_layers = set(read.config.get("mlp_only_layers") or ())
    every = read.size("decoder_sparse_step", "moe_layer_freq", default=1)
    first = read.size("first_k_dense_replace", default=0)
    sparse = [i for i in range(first, num_layers) if i not in dense_layers and (i + 1) % every == 0]
    width = read.size("moe_intermediate_size", "intermediate_size")
    shared = read.size("n_shared_experts", default=0) * width
    if read.config.get("enable_moe_block"):  # beside the layer's own MLP
        shared = read.size("intermediate_size")
    return {
        "num_experts": num_experts,
        "num_experts_per_token": read.size("num_experts_per_tok", "top_k_experts"),
        "moe_intermediate_size": width,
        "shared_intermediate_size": read.size("shared_expert_intermediate_size", default=shared),
        "num_moe_layers": len(sparse),
    }


def _windows(config: Mapping[str, Any], family: _Family, num_layers: int) -> dict[str, int]:
    window = config.get("sliding_window")
    if window is None or family.sliding_share is None:
        return {}
    num_sliding = family.sliding_share(config, num_layers)
    return {"sliding_window": int(window), "num_sliding_layers": num_sliding} if num_sliding else {}
