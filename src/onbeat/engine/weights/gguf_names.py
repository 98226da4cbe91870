"""What tensors of GGUF files are called here, and what the converter has done to their numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import reduce
from typing import Any

from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from numpy.typing import NDArray

from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.families import FAMILIES, GgufRules
from onbeat.engine.weights.parameters import PARTS

_SUFFIXES = {"sinks": ".weight", "A_log": "", "dt_bias": ".bias", "layer_scalar": ".weight"}
"""Of tensors whose parameters are vectors without a module."""
_SCALES = {".router.scale": ".mlp.gate.scale", ".router.per_expert_scale": ".mlp.experts.down_proj.scale"}
"""Vectors that files keep beside a matrix."""
_FUSED = {part: whole for whole, parts in PARTS.items() for part in parts}
_EXPERT = re.compile(r"\.experts\.\d+\.")


def rules_of(config: ModelConfig) -> GgufRules:
    """Return how files of a model's family are written; several architectures may share a family's."""
    return next(
        family.gguf
        for family in FAMILIES.values()
        if family.name == config.family and family.gguf is not None
    )


def hf_names(config: ModelConfig, parameters: Iterable[str]) -> dict[str, str]:
    """Return what tensors of a file are called here: like a parameter, or like several that are in one."""
    rules, renamed = rules_of(config), FAMILIES[config.architecture].hf_names
    architecture = next(each for each, name in MODEL_ARCH_NAMES.items() if name == rules.architecture)
    table = get_tensor_name_map(architecture, config.num_layers)
    names = {}
    for parameter in parameters:
        beside = reduce(lambda name, pair: name.replace(*pair), _SCALES.items(), parameter)
        stem, _, kind = _EXPERT.sub(".experts.", beside).rpartition(".")
        if kind in _SUFFIXES:
            own = table.get_name(parameter.replace("dt_bias", "dt_proj"))
            names[f"{own}{_SUFFIXES[kind]}"] = parameter
            continue
        prefix, _, module = stem.rpartition(".")
        if _FUSED.get(module) in rules.fuses:
            stem = f"{prefix}.{_FUSED[module]}"
        theirs = reduce(lambda name, pair: name.replace(*pair[::-1]), reversed(renamed), f"{stem}.")
        own = f"{table.get_name(theirs[:-1]) or table.get_name(stem)}.{kind}"
        here = parameter if kind == "scale" else f"{stem}.{kind}"
        if module == "gate_proj" and prefix.endswith(".experts"):  # some files have both projections in one
            both = f"{table.get_name(theirs[:-1].replace('gate', 'gate_up'))}.{kind}"
            names |= dict.fromkeys((both, own.replace("gate", "gate_up")), here.replace("gate", "gate_up"))
        names[own] = here
    return names


def unpermute_rows(name: str, values: NDArray[Any], config: ModelConfig) -> NDArray[Any]:
    """Return a tensor's rows in the order of the Hugging Face checkpoint.

    Parameters
    ----------
    name : Hugging Face name of the tensor.
    values : `[rows, ...]`.
    """
    if not rules_of(config).permutes or ".self_attn." not in name:
        return values
    if ".q_proj." in name:
        num_heads = config.num_heads
    elif ".k_proj." in name:
        num_heads = config.num_kv_heads
    else:
        return values
    # Within a head, GGUF's row 2i + j stands for Hugging Face's row j * head_dim / 2 + i.
    by_pair = values.reshape(num_heads, config.head_dim // 2, 2, *values.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(values.shape)


def stored_offset(name: str, config: ModelConfig) -> float:
    """Return what the converter added to a tensor."""
    is_offset = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return config.norm_weight_offset if is_offset else 0.0
