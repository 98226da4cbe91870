"""Read the rotary embedding of a config.json, as `rope_theta` and `rope_scaling` or as `rope_parameters`."""

from __future__ import annotations

from typing import Any

from onbeat.core.errors import ModelLoadError
from onbeat.engine.model_config.config import RopeConfig
from onbeat.engine.model_config.values import Values

SUPPORTED_KINDS = ("default", "linear", "llama3")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(
    values: Values, max_position_embeddings: int, *, per_layer_type: bool
) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embedding of all (or full-attention) layers, and that of sliding layers.

    Parameters
    ----------
    per_layer_type : whether sliding layers have an embedding of their own (Gemma 3).
    """
    parameters = _table(values, "rope_parameters")
    # `rope_scaling` is the older name; where both are there they are copies of each other.
    scaling = _table(values, "rope_scaling")
    nested = any(name in parameters for name in _LAYER_TYPES)
    if nested and not per_layer_type:
        raise values.wrong("rope_parameters", parameters, "one table for all layers in this architecture")
    theta = values.number("rope_theta", 1_000_000.0 if per_layer_type else 10_000.0)
    partial = values.raw("partial_rotary_factor")
    common = {"rope_theta": theta, "partial_rotary_factor": partial}
    if not per_layer_type:
        return _rope({**common, **scaling, **_set(parameters)}, max_position_embeddings), None
    full = parameters.get("full_attention") if nested else parameters
    local = parameters.get("sliding_attention") if nested else {}
    local_theta = values.number("rope_local_base_freq", 10_000.0)
    return (
        _rope({**common, **scaling, **_set(full)}, max_position_embeddings),
        _rope({**common, "rope_theta": local_theta, **_set(local)}, max_position_embeddings),
    )


def _table(values: Values, key: str) -> dict[str, Any]:
    table = values.raw(key)
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise values.wrong(key, table, "a table")
    return table


def _set(table: Any) -> dict[str, Any]:
    return {key: value for key, value in (table or {}).items() if value is not None}


def _rope(table: dict[str, Any], max_position_embeddings: int) -> RopeConfig:
    values = Values(table, source="config.json's rope parameters")
    kind = values.raw("rope_type") or values.raw("type") or "default"
    if kind not in SUPPORTED_KINDS:
        raise ModelLoadError(
            f"config.json asks for RoPE scaling of kind {kind!r}, which is not supported; "
            f"supported: {', '.join(SUPPORTED_KINDS)}"
        )
    values.refuse_unless("partial_rotary_factor", 1.0)
    theta = values.number("rope_theta")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = values.number("factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=values.number("low_freq_factor"),
        high_freq_factor=values.number("high_freq_factor"),
        original_max_position_embeddings=values.size(
            "original_max_position_embeddings", max_position_embeddings
        ),
    )
