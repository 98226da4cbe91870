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
    return _scale_llama3(frequencies, config) if config.kind == "llama3" else frequencies


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


_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRules:
    """What a family says of its rotary embedding."""

    kinds: tuple[str, ...] = ("default", "linear", "llama3")
    """Kinds of scaling that it knows."""
    is_partial: bool = False
    """Whether a part of a head may turn."""
    per_layer_type: bool = False
    """Whether sliding layers have an embedding of their own (Gemma 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSizes:
    """What a rotary embedding must go with."""

    head_dim: int
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
    local_theta = values.number("rope_local_base_freq", 10_000.0)
    return (
        _rope({**common, **scaling, **_set(full)}, rules, sizes),
        _rope({**common, "rope_theta": local_theta, **_set(local)}, rules, sizes),
    )


def _original(values: Values, rules: RopeRules) -> dict[str, Any]:
    """Return the context of pre-training; Phi-3 keeps it beside its rope parameters, where it wins."""
    key = "original_max_position_embeddings"
    return {key: values.size(key, 4096)} if "longrope" in rules.kinds else {}


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
    rope = RopeConfig(theta=values.number("rope_theta"), rotary_dim=_rotary_dim(values, rules, sizes))
    if kind == "default":
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
    return _longrope(rope, values, sizes)


def _rotary_dim(values: Values, rules: RopeRules, sizes: RopeSizes) -> int | None:
    if not rules.is_partial:
        values.refuse_unless("partial_rotary_factor", 1.0)
    rotary_dim = int(sizes.head_dim * values.number("partial_rotary_factor", 1.0))
    return None if rotary_dim == sizes.head_dim else rotary_dim


def _longrope(rope: RopeConfig, values: Values, sizes: RopeSizes) -> RopeConfig:
    original = values.size("original_max_position_embeddings")
    factor = values.number("factor", sizes.context / original)
    return longrope(
        rope,
        values.numbers("short_factor" if sizes.served <= original else "long_factor"),
        attention_factor=values.number("attention_factor", longrope_attention_factor(factor, original)),
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
    original : the context of pre-training, tokens.
    """
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
