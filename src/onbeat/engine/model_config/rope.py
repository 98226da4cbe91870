"""Rotary embeddings: the frequencies of each kind, and how a config.json says which it is.

It has `rope_theta` and `rope_scaling`, or `rope_parameters`.

Legend: P the part of a head that turns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ModelLoadError, NeedsVllm
from onbeat.engine.model_config.architecture import RopeConfig
from onbeat.engine.model_config.values import Values

Frequencies = NDArray[np.float32]


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Frequencies:
    """Return the angle per position of each pair of dimensions that turns, [P / 2].

    Powers are computed in float64 and rounded, so that they are the same on every processor; all else is
    float32, as in the reference implementations.
    """
    width = config.rotary_dim or head_dim
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    if config.kind == "none":
        return np.zeros_like(exponents)
    powers = (config.theta ** exponents.astype(np.float64)).astype(np.float32)
    if config.kind == "factors":
        assert config.frequency_factors is not None, "kind 'factors' comes with frequency_factors"
        powers *= np.array(config.frequency_factors, np.float32)
    frequencies: Frequencies = np.float32(1) / powers
    if config.kind == "linear":
        return frequencies / np.float32(config.factor)
    if config.kind == "yarn":
        return _scale_yarn(frequencies, np.float32(1) / (np.float32(config.factor) * powers), config.ramp)
    return _scale_llama3(frequencies, config) if config.kind == "llama3" else frequencies


def head_order(config: RopeConfig, head_dim: int) -> NDArray[np.int64] | None:
    """Return a family's places of a head's numbers in the order in which pairs are half of what turns apart.

    None where this is the family's own order. What turns comes first.
    """
    if not config.interleaves:
        return None
    width = config.rotary_dim or head_dim
    return np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2), np.arange(width, head_dim)])


def _scale_llama3(frequencies: Frequencies, config: RopeConfig) -> Frequencies:
    """Divide low frequencies by the factor, keep high ones, blend between (Llama 3.1)."""
    context = config.original_max_position_embeddings
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / frequencies
    smooth = (np.float32(context) / wavelengths - np.float32(low)) / np.float32(high - low)
    divided = frequencies / np.float32(config.factor)
    blended = (1 - smooth) * divided + smooth * frequencies
    scaled = np.where(wavelengths > context / low, divided, blended)
    return np.where(wavelengths < context / high, frequencies, scaled)


def _scale_yarn(frequencies: Frequencies, divided: Frequencies, ramp: tuple[float, float]) -> Frequencies:
    """Keep high frequencies, divide low ones, blend between (Peng et al., 2023)."""
    low, high = ramp
    places = np.arange(len(frequencies), dtype=np.float32)
    kept = 1 - np.clip((places - np.float32(low)) / np.float32(high - low), 0, 1)
    blended: Frequencies = divided * (1 - kept) + frequencies * kept
    return blended


_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRules:
    """What a family says of its rotary embedding."""

    kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "dynamic", "mrope")
    """Kinds of scaling that it knows."""
    is_partial: bool = False
    """Whether a part of a head may turn."""
    interleaves: bool = False
    """Whether neighbours turn together."""
    grows: bool = False
    """Whether queries may grow with their position (Ministral 3)."""
    per_layer_type: bool = False
    """Whether sliding layers have an embedding of their own (Gemma 3)."""
    local_theta: float | None = 10_000.0
    """Theirs, where a file does not say; None: that of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSizes:
    """What a rotary embedding must go with."""

    head_dim: int
    full_head_dim: int
    """In layers without a window."""
    context: int
    """The longest context that the model was made for, tokens."""
    served: int
    """The longest that it is to serve: LongRoPE turns by other angles for long ones."""


def read_rope(values: Values, rules: RopeRules, sizes: RopeSizes) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embedding of all (or full-attention) layers, and that of sliding layers."""
    parameters = _table(values, "rope_parameters")
    # `rope_scaling` is the older name; where both are there they are copies of each other.
    scaling = _table(values, "rope_scaling")
    nested = any(name in parameters for name in _LAYER_TYPES)
    if nested and not rules.per_layer_type:
        raise values.wrong("rope_parameters", parameters, "one table for all layers in this architecture")
    common = {
        "rope_theta": values.number("rope_theta"),
        "partial_rotary_factor": values.raw("partial_rotary_factor"),
    }
    if not rules.per_layer_type:
        return _rope(
            {**common, **scaling, **_set(parameters), **_original(values, rules)}, rules, sizes
        ), None
    full = parameters.get("full_attention") if nested else parameters
    local = parameters.get("sliding_attention") if nested else {}
    local_theta = values.number("rope_local_base_freq", rules.local_theta or values.number("rope_theta"))
    return (
        _rope({**common, **scaling, **_set(full)}, rules, replace(sizes, head_dim=sizes.full_head_dim)),
        _rope({**common, "rope_theta": local_theta, **_set(local)}, rules, sizes),
    )


def _original(values: Values, rules: RopeRules) -> dict[str, Any]:
    """Return the context of pre-training where it stands beside the rope parameters, as in Phi-3: it wins."""
    key = "original_max_position_embeddings"
    return {key: values.size(key, 4096)} if "longrope" in rules.kinds or key in values else {}


def _table(values: Values, key: str) -> dict[str, Any]:
    table = values.raw(key)
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise values.wrong(key, table, "a table")
    return table


def _set(table: Any) -> dict[str, Any]:
    return {key: value for key, value in (table or {}).items() if value is not None}


def _rope(table: dict[str, Any], rules: RopeRules, sizes: RopeSizes) -> RopeConfig:
    values = Values(table, source="config.json's rope parameters")
    kind = values.raw("rope_type") or values.raw("type") or "default"
    if kind not in rules.kinds:
        raise NeedsVllm(
            f"config.json asks for RoPE scaling of kind {kind!r}, which is not supported; "
            f"supported: {', '.join(rules.kinds)}"
            + ", and longrope in Phi-3"
            * ("longrope" not in rules.kinds)
        )
    if not rules.grows:
        values.refuse_unless("llama_4_scaling_beta", 0)
    if kind == "proportional":
        return _proportional(values, sizes)
    rope = RopeConfig(
        theta=values.number("rope_theta"),
        rotary_dim=_rotary_dim(values, rules, sizes),
        interleaves=rules.interleaves,
    )
    if kind in ("default", "dynamic", "mrope"):
        # Dynamic scaling begins behind the model's context, where nothing is served. The three positions of
        # multimodal models are equal in text.
        values.refuse_unless("alpha")
        return rope
    if kind == "linear":
        return replace(rope, kind="linear", factor=values.number("factor"))
    if kind == "llama3":
        return replace(
            rope,
            kind="llama3",
            factor=values.number("factor"),
            low_freq_factor=values.number("low_freq_factor"),
            high_freq_factor=values.number("high_freq_factor"),
            original_max_position_embeddings=values.size("original_max_position_embeddings", sizes.context),
        )
    if "longrope" not in rules.kinds:
        return _yarn(rope, values, sizes)
    return _longrope(rope, values, sizes)


def _proportional(values: Values, sizes: RopeSizes) -> RopeConfig:
    """Return an embedding of which the first pairs turn, as they would if all did."""
    values.refuse_unless("factor", 1.0)
    num_pairs = sizes.head_dim // 2
    num_turning = int(values.number("partial_rotary_factor", 1.0) * num_pairs)
    factors = (1.0,) * num_turning + (math.inf,) * (num_pairs - num_turning)
    return RopeConfig(theta=values.number("rope_theta"), kind="factors", frequency_factors=factors)


def _yarn(rope: RopeConfig, values: Values, sizes: RopeSizes) -> RopeConfig:
    original = values.size("original_max_position_embeddings", sizes.context)
    factor = values.number("factor", sizes.context / original)
    magnitude = yarn_magnitude(factor)
    if values.raw("mscale") and values.raw("mscale_all_dim"):
        magnitude = yarn_magnitude(factor, values.number("mscale"))
        magnitude /= yarn_magnitude(factor, values.number("mscale_all_dim"))
    return yarn(
        replace(rope, factor=factor, original_max_position_embeddings=original),
        values.number("beta_fast", 32.0),
        values.number("beta_slow", 1.0),
        width=rope.rotary_dim or sizes.head_dim,
        truncates=values.flag("truncate", default=True),
        attention_factor=values.number("attention_factor", magnitude),
    )


def yarn(
    rope: RopeConfig, fast: float, slow: float, *, width: int, attention_factor: float, truncates: bool = True
) -> RopeConfig:
    """Return an embedding scaled by YaRN (Peng et al., 2023), whose factor and context it has already.

    Parameters
    ----------
    fast, slow : pairs that turn so many times in the context of pre-training stay, and are divided in full.
    width : dimensions that turn.
    truncates : whether the pairs between are counted in whole ones.
    """
    low, high = (
        width
        * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi))
        / (2 * math.log(rope.theta))
        for turns in (fast, slow)
    )
    if truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = low, high if high != low else high + 0.001
    return replace(rope, kind="yarn", ramp=ramp, attention_factor=attention_factor)


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Return what YaRN multiplies by where a file does not say."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _rotary_dim(values: Values, rules: RopeRules, sizes: RopeSizes) -> int | None:
    if not rules.is_partial:
        values.refuse_unless("partial_rotary_factor", 1.0)
    rotary_dim = int(sizes.head_dim * values.number("partial_rotary_factor", 1.0))
    return None if rotary_dim == sizes.head_dim else rotary_dim


def _longrope(rope: RopeConfig, values: Values, sizes: RopeSizes) -> RopeConfig:
    original = values.size("original_max_position_embeddings")
    factor = values.number("factor", sizes.context / original)
    is_long = sizes.served > original
    return longrope(
        replace(rope, is_long=is_long, original_max_position_embeddings=original),
        values.numbers("long_factor" if is_long else "short_factor"),
        attention_factor=values.number(
            "long_mscale" if is_long else "short_mscale",  # Phi-3.5-MoE's
            values.number("attention_factor", longrope_attention_factor(factor, original)),
        ),
        num_frequencies=(rope.rotary_dim or sizes.head_dim) // 2,
    )


def longrope(
    rope: RopeConfig, factors: tuple[float, ...], *, attention_factor: float, num_frequencies: int
) -> RopeConfig:
    """Return an embedding scaled by LongRoPE (Ding et al., 2024).

    Raises
    ------
    ModelLoadError : there is not one factor for each frequency.
    """
    if len(factors) != num_frequencies:
        raise ModelLoadError(
            f"the model has {len(factors)} factors of LongRoPE for its {num_frequencies} frequencies"
        )
    return replace(rope, kind="factors", frequency_factors=factors, attention_factor=attention_factor)


def longrope_attention_factor(factor: float, original: int) -> float:
    """Return what LongRoPE multiplies by where a file does not say.

    Parameters
    ----------
    factor : how many times longer the context has become.
    original : the context of pre-training, tokens. One token, whose logarithm is 0, says nothing.
    """
    scales = factor > 1.0 and original > 1
    return math.sqrt(1 + math.log(factor) / math.log(original)) if scales else 1.0
