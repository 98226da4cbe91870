"""From a Hugging Face configuration to a model's sizes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from onbeat.core.errors import ConfigError
from onbeat.core.hints import likely_meant
from onbeat.files import read
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.typed import take

CONFIG_NAME = "config.json"


@cache
def packaged_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return the configurations in the package, by file name without its ending."""
    found: dict[str, Mapping[str, Any]] = {}
    for entry in sorted(files("onbeat.perfmodel").joinpath("data", "models").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".json"):
            found[entry.name.removesuffix(".json")] = json.loads(entry.read_text("utf-8"))
    return found


@cache
def _names() -> Mapping[str, str]:
    """Every name a packaged configuration goes by (lower case) -> its file name."""
    names: dict[str, str] = {}
    for stem, config in packaged_configs().items():
        for hub_id in config["hub_ids"]:
            names[hub_id.lower()] = stem
            names.setdefault(hub_id.rpartition("/")[2].lower(), stem)
        names[stem.lower()] = stem
    return names


def read_model_config(name_or_path: str) -> tuple[str, Mapping[str, Any]]:
    """Return a model's name and its configuration as Hugging Face writes it.

    Parameters
    ----------
    name_or_path : the name of a packaged configuration, a hub id (letters of either case), a `config.json`,
        or a directory that holds one.

    Raises
    ------
    ConfigError : an unknown name (near matches are named), or a file that is not a JSON object.
    """
    path = config_path(name_or_path)
    if path is not None:
        name = path.parent.resolve().name if path.name == CONFIG_NAME else path.stem
        return name, read(dict[str, Any], path, "the model's configuration")
    stem = _names().get(name_or_path.lower())
    if stem is None:
        if name_or_path.endswith(".json") or name_or_path.startswith((".", "/", "~")):
            raise ConfigError(f"there is no file or directory {name_or_path}; give a model's {CONFIG_NAME}")
        raise ConfigError(_unknown(name_or_path))
    return stem, packaged_configs()[stem]


def config_path(name_or_path: str) -> Path | None:
    """Return the file of a model's configuration; None where it comes with the package, or is not known.

    Raises
    ------
    ConfigError : a directory without one.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        path = path / CONFIG_NAME
        if not path.is_file():
            raise ConfigError(
                f"{name_or_path} holds no {CONFIG_NAME}; give a model's directory or its {CONFIG_NAME}"
            )
    return path if path.is_file() else None


def _unknown(name: str) -> str:
    near = likely_meant(name.lower().rpartition("/")[2], _names())
    hint = f"did you mean {near}? " if near else ""
    return (
        f"unknown model {name!r}: {hint}"
        f"Known: {', '.join(packaged_configs())}; or give the path of a config.json or of its directory"
    )


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
