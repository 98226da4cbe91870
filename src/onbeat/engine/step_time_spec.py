"""What step-time models need of an engine: sizes, number formats, device, and the key of its profile."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from onbeat.engine.dtypes import BFLOAT16, FLOAT32
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.weights.parameters import parameter_shapes
from onbeat.perfmodel.device_spec import DeviceSpec, cpu_device, find_device
from onbeat.perfmodel.model_spec import ModelSpec, sizes_with_states
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.profile import MachineLimits, ProfileKey

_ATTENDS = re.compile(r"self_attn|per_layer_(model_)?(projection|input_gate)")
FORMATS = {FLOAT32: "fp32", BFLOAT16: "bf16"}
"""Step-time models know no float64, which is for tests of exactness."""
COMMON_SIZES = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim"),
    *("intermediate_size", "max_position_embeddings"),
)
"""What `ModelConfig` and `ModelSpec` call the same."""
QUANTIZED_GROUP = 32
"""Of most types that the native engine multiplies as they are."""


def model_spec_of(config: ModelConfig, name: str) -> ModelSpec:
    """Return the sizes that determine step times."""
    num_sliding, experts = sum(config.sliding_layers), config.experts
    return ModelSpec(
        name=name,
        **{name: getattr(config, name) for name in COMMON_SIZES},
        is_gated_mlp=config.is_gated,
        vocab_size=config.vocab_size,
        ties_embeddings=config.tie_word_embeddings,
        sliding_window=config.sliding_window if num_sliding else None,
        num_sliding_layers=num_sliding,
        num_experts=0 if experts is None else experts.num_experts,
        num_experts_per_token=0 if experts is None else experts.num_per_token,
        moe_intermediate_size=0 if experts is None else experts.intermediate_size,
        shared_intermediate_size=_shared_size(config),
        num_moe_layers=config.num_expert_layers,
        **_own_sizes(config),
    )


def _shared_size(config: ModelConfig) -> int:
    """Return the width of what every token passes in a layer with experts."""
    experts = config.experts
    if experts is None:
        return 0
    return experts.shared_size + (config.intermediate_size if experts.is_beside else 0)


def _own_sizes(config: ModelConfig) -> dict[str, int]:
    """Return sums over layers of attention that is not that of the heads alone."""
    linear, layers, num_heads = config.linear, range(config.num_layers), config.num_heads
    if linear is not None:
        attention = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
        heads = linear.num_key_heads, linear.num_value_heads
        sizes = *attention, *heads, linear.key_dim, linear.value_dim, linear.conv_width
        num_layers = config.num_kv_layers, config.num_linear_layers
        return sizes_with_states(sizes, *num_layers, is_gated=config.gates_attention)
    if config.full_heads is None:
        return {}
    sliding = [index for index in layers if config.is_sliding(index)]
    kept = (config.kv_heads(index) for index in sliding if config.kv_layer(index) == index)
    named = ((name, math.prod(shape)) for name, shape in parameter_shapes(config).items() if len(shape) > 1)
    wider = sum(config.mlp_size(index) - config.intermediate_size for index in layers)
    return {
        "attention_weights": sum(number for name, number in named if _ATTENDS.search(name))
        + 3 * config.hidden_size * wider,
        "kv_width": sum(2 * num * width for num, width in config.kept_heads),
        "sliding_kv_width": sum(2 * num * width for num, width in kept),
        "pair_width": sum(2 * num_heads * config.kv_heads(index).width for index in layers),
        "sliding_pair_width": 2 * num_heads * config.head_dim * len(sliding),
        "lookup_parameters": config.vocab_size * config.num_layers * config.layer_input_size,
    }


def precision_of(
    dtype: np.dtype[Any], weights: str | None = None, embedding: str | None = None, kv: str | None = None
) -> Precision | None:
    """Return the formats of weights, KV cache and arithmetic; None where step-time models lack them.

    Parameters
    ----------
    dtype : of arithmetic; fp8 weights are multiplied in fp8.
    weights : number format of most weights, where they are not of this type.
    embedding, kv : of the LM head and of the KV cache, likewise; the former has 16 bits beside fewer.
    """
    name = FORMATS.get(dtype)
    if name is None:
        return None
    return Precision(
        weights=weights or name,
        kv=kv or name,
        compute="fp8" if weights == "fp8" else name,
        embedding=None if embedding == name else embedding,
        group=QUANTIZED_GROUP if {weights, embedding} & {"int8", "int4"} else None,
    )


def device_spec_of(key: ProfileKey, limits: MachineLimits | None) -> DeviceSpec:
    """Return the specification: the data sheet's, or that of the measured limits where there is none.

    Parameters
    ----------
    key : names the device, and what computes there.
    limits : needed for `cpu` and devices without a data sheet.
    """
    if limits is None:
        return find_device(key.device)
    return cpu_device(
        memory_bandwidth=limits.memory_bandwidth,
        peak_flops=limits.peak_flops,
        product_rates=limits.product_rates,
        architecture="cpu-native" if key.backend == "native" else "cpu",
    )
