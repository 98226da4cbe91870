"""Sizes of a decoder-only transformer, the sums that follow from them, and where they come from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from onbeat.core.errors import ConfigError
from onbeat.core.hints import likely_meant
from onbeat.files import read
from onbeat.perfmodel.precision import Precision
from onbeat.typed import Count, Size, take


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
    - `state_bytes`: what layers of linear attention keep of one request, however long it is;
      `draft_state_bytes`: beside that, for each draft that a step may verify.

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
    draft_state_bytes: Count = 0
    lookup_parameters: Count = 0
    """Weights of tables beside the embedding, of which a token reads one row."""

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
            + (self.num_layers - self.num_moe_layers) * self._mlp(self.intermediate_size)
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
        embeddings = self.embedding_parameters * (1 if self.ties_embeddings else 2)
        return self.layer_parameters + embeddings + self.lookup_parameters

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token uses, both embeddings included."""
        return self.embedding_parameters * (2 - self.ties_embeddings) + self.active_layer_parameters

    def dense_bytes(self, precision: Precision) -> float:
        """Return the bytes of the layers' weights, experts apart: 16 bits each beside experts in mxfp4."""
        is_beside = precision.weights == "mxfp4" and self.is_moe
        return self.dense_parameters * (2.0 if is_beside else precision.weight_bytes)

    def expert_bytes(self, precision: Precision) -> float:
        """Return the bytes of all experts of all layers."""
        return self.num_moe_layers * self.num_experts * self.expert_parameters * precision.weight_bytes

    def weight_bytes(self, precision: Precision) -> float:
        """Return the bytes of all weights."""
        embeddings = self.embedding_parameters * (1 if self.ties_embeddings else 2) + self.lookup_parameters
        layers = self.dense_bytes(precision) + self.expert_bytes(precision)
        return layers + embeddings * precision.embedding_bytes

    def kv_bytes_per_token(self, precision: Precision) -> float:
        """Return the KV-cache bytes of one token in all layers."""
        kv = self.kv_width or 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return kv * precision.kv_bytes

    def sliding_share(self, width: int, of: int) -> float:
        """Return the share of layers with a window in a sum over all layers; 0: that of the layers."""
        return width / of if of else self.num_sliding_layers / self.num_layers

    def _mlp(self, width: int) -> int:
        return (3 if self.is_gated_mlp else 2) * self.hidden_size * width


_SIZES = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    "max_position_embeddings",
)


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
    """Return the sizes of layers of gated delta rules between some of attention (Qwen3-Next, Qwen3.5)."""
    if read.config.get("layer_types") is None:
        period = read.size("full_attention_interval", default=4)
        kinds = [LINEAR if (i + 1) % period else FULL for i in range(read.size("num_hidden_layers"))]
    else:
        kinds = read.layers()
    attention = read.sizes("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    heads = read.sizes("linear_num_key_heads", "linear_num_value_heads")
    dims = read.sizes("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
    is_gated = read.config.get("attn_output_gate") is not False
    layers = kinds.count(FULL), kinds.count(LINEAR)
    return sizes_with_states((*attention, *heads, *dims), *layers, is_gated=is_gated)


def sizes_with_states(sizes: Sequence[int], full: int, linear: int, *, is_gated: bool) -> dict[str, int]:
    """Return the sizes of a model of which some layers keep a state, in float32: matrices, and last inputs.

    Parameters
    ----------
    sizes : width of a token; of attention the width of a head, heads, and KV heads; of the other layers key
        heads, value heads, width of a key, of a value, and tokens that their convolution sees.
    full, linear : layers that attend, and others.
    is_gated : whether attention has a gate.
    """
    hidden, dim, heads, kv_heads, key_heads, value_heads, key, value, kernel = sizes
    values, inputs = value_heads * value, 2 * key_heads * key + value_heads * value
    queries = 2 * heads if is_gated else heads
    return {
        "attention_weights": full * hidden * dim * (queries + heads + 2 * kv_heads)
        + linear * (hidden * (inputs + 2 * values + 2 * value_heads) + inputs * kernel),
        "kv_width": full * 2 * kv_heads * dim,
        "pair_width": full * 2 * heads * dim,
        "state_bytes": linear * 4 * (value_heads * key * value + inputs * (kernel - 1)),
        "draft_state_bytes": linear * 4 * (inputs + 2 * value_heads),
    }


def two_widths(read: SizeReader) -> dict[str, int]:
    """Return the sizes of attention whose heads are wider in layers without a window (Gemma 4).

    Values may be the keys there. The last layers may use the KV of earlier ones, with a wider feed-forward.
    Its additional weights, and those of per-layer embeddings, count as the attention's.
    """
    kinds, (hidden, heads) = read.layers(), read.sizes("hidden_size", "num_attention_heads")
    own = len(kinds) - (shared := read.size("num_kv_shared_layers", default=0))
    per_layer = len(kinds) * read.size("hidden_size_per_layer_input", default=256)
    wider = shared * read.size("intermediate_size") if read.config.get("use_double_wide_mlp") else 0
    sizes = Counter(attention_weights=3 * hidden * (per_layer + wider))
    sizes["lookup_parameters"] = read.size("vocab_size") * per_layer
    for layer, kind in enumerate(kinds):
        prefix = "global_" if kind == FULL else ""
        dim = read.size(f"{prefix}head_dim", "head_dim")
        kv_heads = (layer < own) * read.size(f"num_{prefix}key_value_heads", "num_key_value_heads")
        projections = 1 if prefix and read.config.get("attention_k_eq_v") else 2
        widths = {"kv_width": 2 * kv_heads * dim, "pair_width": 2 * heads * dim}
        sizes.update(widths, attention_weights=hidden * dim * (2 * heads + projections * kv_heads))
        if not prefix:
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


def _by_pattern(config: Mapping[str, Any], num_layers: int, period: int = 6) -> int:
    """All but every n-th layer."""
    return _listed(config, num_layers - num_layers // int(config.get("sliding_window_pattern", period)))


def _qwen_windows(config: Mapping[str, Any], num_layers: int) -> int:
    """Layers beyond `max_window_layers`, and only if the window is switched on."""
    if not config.get("use_sliding_window", False):
        return 0
    return max(0, num_layers - int(config.get("max_window_layers", num_layers)))


_PLAIN = _Family()
_FAMILIES: Mapping[str, _Family] = {
    **dict.fromkeys(("llama", "internlm", "olmo2", "granite", "glm4", "glm4_moe", "seed_oss"), _PLAIN),
    **dict.fromkeys(("qwen3_vl_text", "qwen2_5_vl_text", "minimax_m2"), _PLAIN),
    **dict.fromkeys(
        ("mistral", "ministral3", "mixtral", "phi3", "phimoe"), _Family(sliding_share=_all_layers)
    ),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _Family(sliding_share=_qwen_windows)),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _Family(attention=linear_attention)),
    **dict.fromkeys(("smollm3", "cohere", "ernie4_5", "gemma"), _Family(ties_embeddings=True)),
    **dict.fromkeys(
        ("bloom", "falcon"), _Family(is_gated_mlp=False, ties_embeddings=True, default_intermediate_factor=4)
    ),
    "qwen": _Family(divides_intermediate_size=2),  # its MLP halves the width that its configuration states
    "phi": _Family(is_gated_mlp=False),
    "olmo3": _Family(sliding_share=partial(_by_pattern, period=4)),
    "cohere2": _Family(ties_embeddings=True, sliding_share=partial(_by_pattern, period=4)),
    "starcoder2": _Family(is_gated_mlp=False, ties_embeddings=True, sliding_share=_all_layers),
    "gemma2": _Family(ties_embeddings=True, sliding_share=_alternating),
    "gemma3_text": _Family(ties_embeddings=True, sliding_share=_by_pattern),
    "opt": _Family(is_gated_mlp=False, ties_embeddings=True),
    "gpt_oss": _Family(sliding_share=_alternating),
    "deepseek_v3": _Family(attention=latent_attention),
    "gemma4_text": _Family(ties_embeddings=True, sliding_share=_by_pattern, attention=two_widths),
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
