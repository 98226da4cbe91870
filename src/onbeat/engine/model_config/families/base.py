"""What a family declares: how its models, and the files that they come in, differ from Llama's.

Values go by their names in a Hugging Face config.json, whichever file they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from onbeat.core.errors import NeedsVllm
from onbeat.engine.model_config.architecture import Activation, Experts, KVHeads, ModelConfig, RopeConfig
from onbeat.engine.model_config.rope import RopeRules, RopeSizes
from onbeat.engine.model_config.values import KEYS, Values


class Biases(NamedTuple):
    """Keys of flags that a model's projections have biases; None: they have none, or `always` says so."""

    attention_bias: str | None = "attention_bias"
    """Of queries, keys and values."""
    attention_output_bias: str | None = "attention_bias"
    mlp_bias: str | None = "mlp_bias"


NO_BIASES = Biases(None, None, None)

Complete = Callable[[ModelConfig, Values], ModelConfig]
"""From what all families have in common, and a file's own values, to all of a model."""


def unchanged(config: ModelConfig, values: Values) -> ModelConfig:  # noqa: ARG001
    """Return a model that has nothing of its own."""
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufRules:
    """How llama.cpp's converter writes a family."""

    architecture: str
    """Its `general.architecture`."""
    with_experts: str | None = None
    """The Hugging Face class of its files that have experts, where that is another family's."""
    with_window: str | None = None
    """Likewise of those that have a sliding window."""
    theta: float = 10_000.0
    """Where a file has none."""
    truncates_yarn: bool = True
    """Whether YaRN counts the pairs between its two speeds in whole ones; a file does not say."""
    has_windows: bool = False
    """Whether llama.cpp keeps to a sliding window."""
    permutes: bool = False
    """Whether rows of queries and keys are in an order that suits interleaved rotary embedding."""
    fuses: tuple[str, ...] = ()
    """Of `qkv_proj` and `gate_up_proj`, what is in one tensor."""
    linear: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `LinearAttention` in which files differ from Hugging Face's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. What is not said is as in Llama."""

    name: str
    architecture: str
    """The Hugging Face class."""
    model_type: str
    models: str = ""
    """The models that it stands for, as documents name them."""
    multimodal: tuple[str, ...] = ()
    """Classes whose `text_config` is such a model."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` that all its models have alike."""
    rope: RopeRules = RopeRules()
    activation: Activation = "silu"
    activation_key: str = "hidden_act"
    bias_keys: Biases = Biases()
    """Keys that say where biases are."""
    eps_key: str = "rms_norm_eps"
    reads: frozenset[str] = frozenset()
    """Keys that `complete` takes in, which other families must leave at what changes nothing."""
    complete: Complete = unchanged
    gguf: GgufRules | None = None
    """None: another family's GGUF files are this one's, too."""
    hf_parts: Callable[[str, Any], Iterator[tuple[str, Any]]] | None = None
    """From a tensor of its Hugging Face files to those that it holds, where their order is one of its own."""
    hf_names: tuple[tuple[str, str], ...] = ()
    """Parts of parameters' names in its Hugging Face files, and what onbeat calls them."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """What a config.json means that leaves keys out. Null is a value like any other."""
        return KEYS.defaults[self.model_type]

    def own_tensors(self, name: str, values: Any) -> Iterator[tuple[str, Any]]:
        """Yield what an array or tensor of a Hugging Face file holds, by the names that onbeat has for it."""
        for theirs, ours in self.hf_names:
            name = name.replace(theirs, ours)
        if self.hf_parts is None:
            yield name, values
        else:
            yield from self.hf_parts(name, values)


def read_model(
    family: Family,
    values: Values,
    ropes: Callable[[RopeSizes], tuple[RopeConfig, RopeConfig | None]],
    *,
    neutral: Mapping[str, tuple[Any, ...]],
    served_len: int | None,
    **own: Any,
) -> ModelConfig:
    """Return the model that a file describes.

    Parameters
    ----------
    ropes : reads the rotary embeddings, those of sliding layers second where they differ.
    neutral : keys that change a model's output, with the values that leave it as onbeat computes it.
    served_len : see `model_config_from_hf`.
    own : fields that this kind of file has in a way of its own.

    Raises
    ------
    ModelLoadError : an unsupported option, or a missing or wrong value.
    """
    for key, allowed in neutral.items():
        if key not in family.reads and key not in family.bias_keys:
            values.refuse_unless(key, *allowed)
    hidden_size, num_heads = values.size("hidden_size"), values.size("num_attention_heads")
    head_dim = values.size("head_dim", hidden_size // num_heads)
    context = values.size("max_position_embeddings")
    heads = KVHeads(values.size("num_key_value_heads", num_heads), head_dim)
    full_heads = _full_heads(values, heads)
    rope, local_rope = ropes(
        RopeSizes(
            head_dim=head_dim,
            full_head_dim=full_heads.width,
            context=context,
            served=min(served_len or context, context),
        )
    )
    if rope.kind == "yarn":
        context = max(context, round(rope.factor * rope.original_max_position_embeddings))
    common: dict[str, Any] = {
        "family": family.name,
        "architecture": family.architecture,
        "vocab_size": values.size("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": values.num_layers("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": heads.num,
        "head_dim": head_dim,
        "full_heads": None if full_heads == heads else full_heads,
        "intermediate_size": values.size("intermediate_size"),
        "max_position_embeddings": context,
        "rms_norm_eps": values.number(family.eps_key),
        "rope": rope,
        "local_rope": local_rope,
        "hidden_activation": family.activation,
    }
    return family.complete(ModelConfig(**common, **{**family.always, **own}), values)


def _full_heads(values: Values, heads: KVHeads) -> KVHeads:
    """Return the heads of layers without a window: a file says them once, or for each of these layers."""
    each, count = values.raw("per_layer_config"), "num_key_value_heads"
    if each is None:
        count = "num_global_key_value_heads" if values.flag("attention_k_eq_v", default=False) else ""
        return KVHeads(values.size(count, heads.num), values.size("global_head_dim", heads.width))
    own = [*each.values()] if isinstance(each, dict) else []
    if not own or any(one != own[0] or {*one} - {"head_dim", count} for one in own):
        raise values.wrong("per_layer_config", each, "the same heads for all layers without a window")
    values = Values(own[0], source="config.json's per_layer_config")
    return KVHeads(values.size(count, heads.num), values.size("head_dim", heads.width))


def with_window(config: ModelConfig, values: Values) -> ModelConfig:
    """Return a model of which all layers slide over the window that a file has, if any."""
    return with_layers(config, window_of(values), (True,) * config.num_layers)


def with_layers(config: ModelConfig, window: int | None, layers: tuple[bool, ...]) -> ModelConfig:
    """Return a model of which some layers slide over a window of tokens; None is no window."""
    if window is None or not any(layers):
        return config
    return replace(config, sliding_window=window, sliding_layers=layers)


def window_of(values: Values) -> int | None:
    """Return the sliding window, tokens."""
    return values.size("sliding_window") if "sliding_window" in values else None


def number_or_none(values: Values, key: str) -> float | None:
    """Return a positive number where there is one."""
    return values.number(key) if key in values else None


def experts_of(values: Values, *, count: str = "num_local_experts", normalizes: bool = True) -> Experts:
    """Read the experts of a model.

    Parameters
    ----------
    count : the key of their number.
    normalizes : see `Experts`.
    """
    return Experts(
        num_experts=values.size(count),
        num_per_token=values.size("top_k_experts" if "top_k_experts" in values else "num_experts_per_tok"),
        intermediate_size=values.size("moe_intermediate_size", values.size("intermediate_size")),
        normalizes=normalizes,
    )


def listed_layers(values: Values, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether `layer_types` has it slide; empty where there is no such list.

    Raises
    ------
    ModelLoadError : a layer of another kind, or not one kind for each layer.
    """
    types = values.raw("layer_types")
    if types is None:
        return ()
    if not isinstance(types, list) or len(types) != num_layers:
        raise values.wrong("layer_types", types, f"a list of {num_layers} layer types")
    for layer_type in types:
        if layer_type not in ("sliding_attention", "full_attention"):
            raise NeedsVllm(
                f"config.json: layer type {layer_type!r} is not supported; "
                "supported: full_attention, sliding_attention"
            )
    return tuple(layer_type == "sliding_attention" for layer_type in types)


def sliding_layers(values: Values, period: int, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it slides: as listed, else all slide but the last of so many each."""
    return listed_layers(values, num_layers) or tuple(not is_full for is_full in every(period, num_layers))


def every(period: int, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is the last of so many."""
    return tuple((index + 1) % period == 0 for index in range(num_layers))
