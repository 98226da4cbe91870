"""The library's view of a model: its C structures, from what is declared and packed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onbeat.engine.engine_config import ActivationQuantization
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.model_config.rope import inverse_frequencies
from onbeat.engine.native.layouts import PLAIN_LAYOUTS
from onbeat.engine.native.library import (
    ACTIVATION_QUANTIZATIONS,
    ACTIVATIONS,
    HEAD_NORMS,
    MOST_QKV,
    LayerStructure,
    ModelStructure,
    PackedMatrix,
    address,
)
from onbeat.engine.native.packing import ExpertWeights, FloatArray, GatedWeights, LayerWeights, NativeWeights

HEAD_MULTIPLE = 16
"""The KV cache pads values to a multiple of this width."""
_SIZES_OF_MODEL = (
    *("num_layers", "hidden_size", "num_heads", "vocab_size"),
    *("norms_center", "gates_attention", "rms_norm_eps", "residual_scale"),
)
"""What `ModelConfig` and the library call by the same name."""
_OPTIONS = ("block_size", "num_blocks", "num_threads", "num_tables", "batch_invariant")
"""Likewise of `NativeOptions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions:
    """How the native engine runs a model; `num_tables`: see `SchedulerConfig`."""

    dtype: np.dtype[Any]
    """Of activations inside products, and of the KV cache: float32 or bfloat16."""
    num_blocks: int
    block_size: int
    num_threads: int
    num_tables: int = 1
    num_slots: int = 0
    """Requests whose states are kept, where layers keep any."""
    most_drafts: int = 0
    """Of a request in a step, where layers keep states."""
    activation_quantization: ActivationQuantization = "auto"
    """Of what quantized weights are multiplied with."""
    instruction_set: str | None = None
    """None takes the best one of this processor."""
    batch_invariant: bool = False
    """Whether a token's numbers are the same whatever else is in its step."""


class EngineStructures:
    """The library's view of a model, and everything that its pointers point to."""

    def __init__(self, config: ModelConfig, weights: NativeWeights, options: NativeOptions) -> None:
        turns = list(dict.fromkeys(map(config.layer_turn, range(config.num_layers))))
        self._frequencies: list[FloatArray] = [
            np.ascontiguousarray(inverse_frequencies(*turn)) for turn in turns
        ]
        self._rotary_dims = np.array([2 * len(each) for each in self._frequencies], np.int64)
        self._rope_scales = np.array([rope.attention_factor for rope, _ in turns], np.float32)
        self._frequency_pointers = (ctypes.c_void_p * len(turns))(
            *(address(each, np.float32) for each in self._frequencies)
        )
        self._expert_pointers: list[Any] = []
        places, kv_numbers = _kv_places(config, options.num_tables)
        self._layers = (LayerStructure * config.num_layers)(
            *(
                self._layer(
                    layer,
                    window=config.layer_window(index) or 0,
                    rope=turns.index(config.layer_turn(index)),
                    num_kv_heads=config.kv_heads(index).num,
                    head_dim=config.kv_heads(index).width,
                    shares_kv=config.kv_layer(index) != index,
                    place=places[index],
                    table=config.place(index, options.num_tables)[0],
                )
                for index, layer in enumerate(weights.layers)
            )
        )
        inputs, experts = weights.inputs, config.experts
        query_growth, growth_context = config.query_growth or (0.0, 0)
        # The factor is rounded to the model's type first, as the reference does.
        embedding_scale = float(np.array(config.embedding_scale, options.dtype))
        self.model = ModelStructure(
            **{name: getattr(config, name) for name in _SIZES_OF_MODEL},
            **{name: getattr(options, name) for name in _OPTIONS},
            activation=ACTIVATIONS[config.hidden_activation],
            precision=PLAIN_LAYOUTS[options.dtype].store,
            activation_quantization=ACTIVATION_QUANTIZATIONS[options.activation_quantization],
            head_norms=HEAD_NORMS[config.qk_norm],
            norms_have_bias=config.norm_bias,
            is_ungated=not config.is_gated,
            is_parallel=config.norms == "parallel",
            growth_context=growth_context,
            num_experts=0 if experts is None else experts.num_experts,
            experts_per_token=0 if experts is None else experts.num_per_token,
            expert_size=weights.expert_size,
            shared_experts=experts is not None and experts.shared_size > 0,
            num_state_layers=config.num_linear_layers,
            kv_numbers=kv_numbers,
            **self._linear_sizes(config, options),
            layer_input_size=0 if inputs is None else len(inputs.norm),
            layer_table=None if inputs is None else inputs.table.handle,
            layer_projection=None if inputs is None else inputs.projection.handle,
            layer_input_norm=None if inputs is None else address(inputs.norm, np.float32),
            normalizes_experts=experts is not None and experts.normalizes,
            query_growth=query_growth,
            attention_scale=config.attention_scale / (config.attention_softcap or 1.0),
            attention_softcap=config.attention_softcap or 0.0,
            logits_softcap=config.logits_softcap or 0.0,
            mixer_jitter=0.0 if experts is None else experts.mixer_jitter or 0.0,
            embedding_scale=embedding_scale,
            embedding=weights.embedding.handle,
            lm_head=weights.lm_head.handle,
            final_norm=address(weights.final_norm, np.float32),
            head_norm=address(weights.head_norm, np.float32),
            head_bias=address(weights.head_bias, np.float32),
            layers=ctypes.addressof(self._layers),
            rotary_dims=address(self._rotary_dims, np.int64),
            rope_frequencies=ctypes.addressof(self._frequency_pointers),
            rope_scales=address(self._rope_scales, np.float32),
        )

    def _linear_sizes(self, config: ModelConfig, options: NativeOptions) -> dict[str, int]:
        linear = config.linear
        if linear is None or not any(linear.layers):
            return {}
        return {
            "num_slots": options.num_slots,
            "most_drafts": options.most_drafts,
            "key_heads": linear.num_key_heads,
            "value_heads": linear.num_value_heads,
            "key_dim": linear.key_dim,
            "value_dim": linear.value_dim,
            "conv_width": linear.conv_width,
            "alternates_values": linear.alternates,
        }

    def _layer(self, layer: LayerWeights, **sizes: int) -> LayerStructure:
        own_input = zip(("input_gate", "input_projection"), layer.own_input, strict=False)
        return LayerStructure(
            qkv=_handles(layer.qkv, MOST_QKV),
            o=layer.o.handle,
            **{name: matrix.handle for name, matrix in own_input},
            scale=layer.scale,
            **sizes,
            **self._feed_forward(layer.feed_forward),
            **({} if layer.beside is None else self._feed_forward(layer.beside)),
            **{name: address(vector, np.float32) for name, vector in layer.vectors.items()},
        )

    def _feed_forward(self, weights: GatedWeights | ExpertWeights) -> dict[str, Any]:
        if isinstance(weights, GatedWeights):
            return {
                "gate_up": weights.gate_up.handle,
                "down": weights.down.handle,
                "gate_up_bias": address(weights.gate_up_bias, np.float32),
                "down_bias": address(weights.down_bias, np.float32),
            }
        gate_up = _handles([expert.gate_up for expert in weights.experts], len(weights.experts))
        down = _handles([expert.down for expert in weights.experts], len(weights.experts))
        biases = (
            _stacked([expert.gate_up_bias for expert in weights.experts]),
            _stacked([expert.down_bias for expert in weights.experts]),
        )
        self._expert_pointers += [gate_up, down, biases]
        return {
            "router": weights.router.handle,
            "router_bias": address(weights.router_bias, np.float32),
            "expert_gate_up_bias": address(biases[0], np.float32),
            "expert_down_bias": address(biases[1], np.float32),
            "expert_gate_up": ctypes.addressof(gate_up),
            "expert_down": ctypes.addressof(down),
        }


def _kv_places(config: ModelConfig, num_tables: int) -> tuple[list[int], int]:
    """Return `ob_layer`'s place of each layer, and how many numbers of a token a block has."""
    places, ends = list[int](), [0] * num_tables
    for index in range(config.num_layers):
        own, (table, number) = config.kv_layer(index), config.place(index, num_tables)
        num, width = config.kv_heads(index)
        is_kept = own == index and not config.is_linear(index)
        places.append(ends[table] if is_kept else number if own == index else places[own])
        ends[table] += is_kept * num * (width + -(-width // HEAD_MULTIPLE) * HEAD_MULTIPLE)
    return places, max(ends)


def _stacked(arrays: Sequence[FloatArray | None]) -> FloatArray | None:
    found = [array for array in arrays if array is not None]
    return np.stack(found) if found else None


def _handles(matrices: Sequence[PackedMatrix], length: int) -> Any:
    return (ctypes.c_void_p * length)(*(matrix.handle for matrix in matrices))
