"""What a family declares: how its models, and the files that they come in, differ from Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from onbeat.core.errors import ModelLoadError
from onbeat.engine.model_config.architecture import Activation, Experts, ModelConfig
from onbeat.engine.model_config.hf_rope import RopeRules
from onbeat.engine.model_config.values import Values

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
    complete: Complete = unchanged
    theta: float = 10_000.0
    """Where a file has none."""
    reads: frozenset[str] = frozenset()
    """Keys that `complete` takes in, which other families must leave at what changes nothing."""
    permutes: bool = False
    """Whether rows of queries and keys are in an order that suits interleaved rotary embedding."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer, where they are called otherwise than Llama's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. What is not said is as in Llama."""

    name: str
    architecture: str
    """The Hugging Face class."""
    model_type: str
    context: int
    """`max_position_embeddings` where a configuration has none, tokens."""
    head_dim: int | None = None
    """Likewise; None: the hidden size over the heads."""
    rope: RopeRules = RopeRules()
    activation: Activation = "silu"
    activation_key: str = "hidden_act"
    ties_embeddings: bool = False
    reads: frozenset[str] = frozenset()
    """Keys that `from_hf` takes in, which other families must leave at what changes nothing."""
    from_hf: Complete = unchanged
    gguf: GgufRules | None = None
    """None: another family's GGUF files are this one's, too."""
    hf_names: tuple[tuple[str, str], ...] = ()
    """Parts of parameters' names in its Hugging Face files, and what onbeat calls them."""


def with_window(config: ModelConfig, window: int | None) -> ModelConfig:
    """Return a model of which all layers slide over a window of tokens; None is no window."""
    if window is None:
        return config
    return replace(config, sliding_window=window, sliding_layers=(True,) * config.num_layers)


def experts_of(values: Values, *, count: str, intermediate_size: str, normalizes: bool) -> Experts:
    """Read the experts of a config.json.

    Parameters
    ----------
    count, intermediate_size : the keys of these sizes.
    normalizes : see `Experts`.
    """
    return Experts(
        num_experts=values.size(count),
        num_per_token=values.size("num_experts_per_tok"),
        intermediate_size=values.size(intermediate_size),
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
            raise ModelLoadError(
                f"config.json: layer type {layer_type!r} is not supported; "
                "supported: full_attention, sliding_attention"
            )
    return tuple(layer_type == "sliding_attention" for layer_type in types)


def window_of(values: Values, default: int | None) -> int | None:
    """Return `sliding_window`; absent and null differ: the first is the class's own default."""
    if not values.names("sliding_window"):
        return default
    return None if values.raw("sliding_window") is None else values.size("sliding_window")
