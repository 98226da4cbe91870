"""The forward pass of a step in the native engine: one call of the library, no Python between layers.

Legend: R sampling rows, V vocabulary, H head width, P tokens whose hidden states are wanted, D model width.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError, EngineError
from onbeat.engine.device import CPU
from onbeat.engine.engine_config import ActivationQuantization
from onbeat.engine.forward import ForwardPass, RowProducts, StepLogits
from onbeat.engine.input_batch import AttentionBatch, IntArray, StepInputs
from onbeat.engine.kv_access import KVRegion
from onbeat.engine.model_config import ModelConfig, inverse_frequencies
from onbeat.engine.native.layouts import PLAIN_LAYOUTS
from onbeat.engine.native.library import (
    ACTIVATION_QUANTIZATIONS,
    ACTIVATIONS,
    ERROR_BYTES,
    HEAD_NORMS,
    MOST_QKV,
    CallStatus,
    LayerStructure,
    ModelStructure,
    NativeLibrary,
    PackedMatrix,
    StepStructure,
    address,
)
from onbeat.engine.native.packing import ExpertWeights, FloatArray, GatedWeights, LayerWeights, NativeWeights
from onbeat.engine.sampler import BestTokens
from onbeat.perfmodel.device_spec import ROW_COUNTS

_BYTES_AHEAD = 256 << 20
"""Of the KV cache, that an idle engine has provided beyond what it has used."""
_STEP_PROBLEMS = {
    CallStatus.MALFORMED: "the native engine refused",
    CallStatus.NO_MEMORY: "there is not enough memory for the native engine to run",
    CallStatus.FAILED: "the native engine failed in",
}


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
    activation_quantization: ActivationQuantization = "auto"
    """Of what quantized weights are multiplied with."""
    instruction_set: str | None = None
    """None takes the best one of this processor."""
    batch_invariant: bool = False
    """Whether a token's numbers are the same whatever else is in its step."""


class NativeModel(NamedTuple):
    """What `NativeForward` runs."""

    library: NativeLibrary
    config: ModelConfig
    weights: NativeWeights
    options: NativeOptions


class NativeForward(ForwardPass):
    """Runs steps in the library, with a KV cache of its own.

    Parameters
    ----------
    library : what runs.
    config : the model.
    weights : its weights, packed by the same library.
    options : precision, KV cache and threads.

    Raises
    ------
    ConfigError : the library refuses: memory, sizes or the instruction set.
    """

    def __init__(
        self, library: NativeLibrary, config: ModelConfig, weights: NativeWeights, options: NativeOptions
    ) -> None:
        self.library = library
        self.config = config
        self.options = options
        self.device = CPU
        self.weights = weights  # the library only borrows them
        self.instruction_set = options.instruction_set or library.instruction_sets[0]
        self.settings = {
            "backend": "native",
            "instruction_set": self.instruction_set,
            "weights": weights.stores,
        }
        if options.batch_invariant:
            self.settings["batch_invariant"] = "yes"
        self._num_threads = options.num_threads
        num_layers = max(config.layers_of_block(options.num_tables), 1)
        kv_numbers = 2 * num_layers * config.num_kv_heads * config.head_dim * options.block_size
        self._num_blocks_ahead = max(1, _BYTES_AHEAD // (kv_numbers * options.dtype.itemsize))
        self._library, self._options = library, options
        self._functions = library.functions
        self._structures = _EngineStructures(config, weights, options)
        error = ctypes.create_string_buffer(ERROR_BYTES)
        self._engine: int | None = self._functions.ob_engine_create(
            self._structures.model, self.instruction_set.encode(), error, len(error)
        )
        if self._engine is None:
            raise ConfigError(f"the native engine cannot run: {error.value.decode(errors='replace')}")
        self._free = weakref.finalize(self, self._functions.ob_engine_free, self._engine)
        self._free.atexit = False  # the process's end frees it too
        self._logits_RV = np.empty((0, config.vocab_size), np.float32)

    def run(self, inputs: StepInputs, *, wants_logits: bool) -> StepLogits:
        """Run one step; see `ForwardPass.run`. Logits are valid until the next step."""
        batch = inputs.attention
        num_samples = len(inputs.sampling_tokens)
        logits_RV = self._logits(num_samples) if wants_logits and num_samples else None
        best = BestTokens(np.empty(num_samples, np.int64), np.empty(num_samples, np.float32))
        hidden_PD = np.empty((len(inputs.pooled_tokens), self.config.hidden_size), np.float32)
        kept_3K = np.array(sorted(batch.kept), np.int64).reshape(-1, 3).T.copy()
        step = StepStructure(
            num_tokens=len(inputs.token_ids_T),
            token_ids=address(inputs.token_ids_T, np.int64),
            positions=address(inputs.positions_T, np.int64),
            slot_mapping=address(batch.slot_mapping_T, np.int64),
            num_rows=len(batch.query_lens_R),
            query_lens=address(batch.query_lens_R, np.int64),
            context_lens=address(batch.context_lens_R, np.int64),
            slots=address(batch.slots_R, np.int64),
            block_tables=address(batch.block_tables_SB, np.int32),
            num_block_tables=batch.block_tables_SB.shape[0],
            block_table_stride=batch.block_tables_SB.shape[1],
            num_samples=num_samples,
            sample_tokens=address(inputs.sampling_tokens, np.int64),
            logits=address(logits_RV, np.float32),
            best_ids=address(best.ids_R, np.int64),
            best_logits=address(best.logits_R, np.float32),
            num_hidden=len(hidden_PD),
            hidden_tokens=address(inputs.pooled_tokens, np.int64),
            hidden=address(hidden_PD, np.float32),
            num_kept=kept_3K.shape[1],
            kept_rows=address(kept_3K[0], np.int64),
            kept_tokens=address(kept_3K[1], np.int64),
            kept_slots=address(kept_3K[2], np.int64),
        )
        status = self._functions.ob_engine_step(self._engine, ctypes.byref(step))
        if status != CallStatus.OK:
            problem = _STEP_PROBLEMS[CallStatus(status)]
            raise EngineError(f"{problem} a step of {step.num_tokens} tokens in {step.num_rows} rows")
        return StepLogits(logits_RV, best if num_samples else None, step.seconds, hidden_PD)

    def scrub(self, block_ids: IntArray) -> None:
        """Make stored keys and values of blocks finite; see `ForwardPass.scrub`."""
        status = self._functions.ob_engine_scrub(self._engine, address(block_ids, np.int64), len(block_ids))
        if status != CallStatus.OK:
            raise EngineError(f"the native engine has no blocks {block_ids.tolist()} to scrub")

    def kv_regions(self) -> list[KVRegion]:
        """Return the one piece of memory that the library has for all blocks; see `GivesKV`."""
        block_bytes = ctypes.c_int64()
        address = self._functions.ob_engine_kv(self._engine, ctypes.byref(block_bytes))
        return [KVRegion(address, block_bytes.value)]

    def state_regions(self) -> list[KVRegion]:
        """Return the one piece that the library has for all states; see `Computes.state_regions`."""
        state_bytes = ctypes.c_int64()
        address = self._functions.ob_engine_states(self._engine, ctypes.byref(state_bytes))
        return [KVRegion(address, state_bytes.value)] if state_bytes.value else []

    def touch_ahead(self) -> bool:
        """Have a little of the KV cache's memory provided; see `ForwardPass.touch_ahead`."""
        return bool(self._functions.ob_engine_touch(self._engine, self._num_blocks_ahead))

    def products(self) -> RowProducts:
        """Return those of the model's first layer; see `GivesProducts`."""
        return _FirstLayer(self._library, self.config, self.weights, self._options)

    def close(self) -> None:
        """Let threads and KV cache go; no step may run any more. Being forgotten does the same."""
        self._free()

    def _logits(self, num_rows: int) -> NDArray[np.float32]:
        """Return room for logits: used again, for fresh memory would be cleared page by page in each step."""
        if len(self._logits_RV) < num_rows:
            self._logits_RV = np.empty((num_rows, self.config.vocab_size), np.float32)
        return self._logits_RV[:num_rows]


def first_layers(
    config: ModelConfig, weights: NativeWeights, num_layers: int
) -> tuple[ModelConfig, NativeWeights]:
    """Return a model of some layers alone, the first of which one attends; it shares their weights."""
    attends = next(index for index in range(config.num_layers) if not config.is_linear(index))
    first = max(attends + 1 - num_layers, 0)
    end = first + num_layers
    return config.some_layers(first, end), replace(weights, layers=weights.layers[first:end])


class _FirstLayer:
    """Products of a model's first layer that attends, by an engine that has it alone and computes no logits.

    Rows are many short sequences, whose attention takes next to no time.
    """

    def __init__(
        self, library: NativeLibrary, config: ModelConfig, weights: NativeWeights, options: NativeOptions
    ) -> None:
        config, weights = first_layers(config, weights, 1)
        layer = weights.layers[0]
        self.flops_per_row = 2.0 * layer.numbers_per_token
        self.num_bytes = sum(matrix.num_bytes for matrix in layer.matrices)
        self._forward = NativeForward(
            library,
            config,
            weights,
            replace(options, num_blocks=_PRODUCT_SEQUENCES, block_size=_PRODUCT_TOKENS, num_tables=1),
        )

    def run(self, num_rows: int) -> float:
        tokens = np.arange(num_rows)
        lens_R = np.bincount(tokens // _PRODUCT_TOKENS).astype(np.int64)
        slots_R = np.arange(len(lens_R))
        inputs = StepInputs(
            token_ids_T=np.zeros(num_rows, np.int64),
            positions_T=tokens % _PRODUCT_TOKENS,
            attention=AttentionBatch(
                query_lens_R=lens_R,
                context_lens_R=lens_R,
                slots_R=slots_R,
                block_tables_SB=slots_R[:, None].astype(np.int32),
                slot_mapping_T=tokens,
            ),
        )
        seconds = self._forward.run(inputs, wants_logits=False).seconds
        assert seconds is not None, "the library measures every step"
        return seconds

    def close(self) -> None:
        """Let its threads and memory go; the weights are the model's."""
        self._forward.close()


_PRODUCT_TOKENS = 16
_PRODUCT_SEQUENCES = ROW_COUNTS[-1] // _PRODUCT_TOKENS


class _EngineStructures:
    """The library's view of a model, and everything that its pointers point to."""

    def __init__(self, config: ModelConfig, weights: NativeWeights, options: NativeOptions) -> None:
        ropes = list(dict.fromkeys(config.layer_rope(index) for index in range(config.num_layers)))
        self._frequencies: list[FloatArray] = [
            np.ascontiguousarray(inverse_frequencies(rope, config.head_dim)) for rope in ropes
        ]
        self._rope_scales = np.array([rope.attention_factor for rope in ropes], np.float32)
        self._frequency_pointers = _pointers(self._frequencies)
        self._expert_pointers: list[Any] = []
        self._layers = (LayerStructure * config.num_layers)(
            *(
                self._layer(
                    layer,
                    config.place(index, options.num_tables),
                    window=config.layer_window(index) or 0,
                    rope=ropes.index(config.layer_rope(index)),
                )
                for index, layer in enumerate(weights.layers)
            )
        )
        experts = config.experts
        query_growth, growth_context = config.query_growth or (0.0, 0)
        # The factor is rounded to the model's type first, as the reference does.
        embedding_scale = float(np.array(config.embedding_scale, options.dtype))
        self.model = ModelStructure(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=weights.intermediate_size,
            vocab_size=config.vocab_size,
            activation=ACTIVATIONS[config.hidden_activation],
            precision=PLAIN_LAYOUTS[options.dtype].store,
            block_size=options.block_size,
            num_blocks=options.num_blocks,
            num_threads=options.num_threads,
            activation_quantization=ACTIVATION_QUANTIZATIONS[options.activation_quantization],
            batch_invariant=options.batch_invariant,
            rotary_dim=config.rope.rotary_dim or config.head_dim,
            head_norms=HEAD_NORMS[config.qk_norm],
            norms_center=config.norms_center,
            norms_have_bias=config.norm_bias,
            is_ungated=not config.is_gated,
            is_parallel=config.norms == "parallel",
            growth_context=growth_context,
            num_experts=0 if experts is None else experts.num_experts,
            experts_per_token=0 if experts is None else experts.num_per_token,
            expert_size=weights.expert_size,
            shared_experts=experts is not None and experts.shared_size > 0,
            num_kv_layers=config.num_kv_layers,
            layers_of_block=config.layers_of_block(options.num_tables),
            num_tables=options.num_tables,
            gates_attention=config.gates_attention,
            **self._linear_sizes(config, options),
            normalizes_experts=experts is not None and experts.normalizes,
            rms_norm_eps=config.rms_norm_eps,
            query_growth=query_growth,
            attention_scale=config.attention_scale / (config.attention_softcap or 1.0),
            attention_softcap=config.attention_softcap or 0.0,
            logits_softcap=config.logits_softcap or 0.0,
            mixer_jitter=0.0 if experts is None else experts.mixer_jitter or 0.0,
            embedding_scale=embedding_scale,
            residual_scale=config.residual_scale,
            embedding=weights.embedding.handle,
            lm_head=weights.lm_head.handle,
            final_norm=address(weights.final_norm, np.float32),
            head_norm=address(weights.head_norm, np.float32),
            head_bias=address(weights.head_bias, np.float32),
            layers=ctypes.addressof(self._layers),
            rope_frequencies=ctypes.addressof(self._frequency_pointers),
            rope_scales=address(self._rope_scales, np.float32),
        )

    def _linear_sizes(self, config: ModelConfig, options: NativeOptions) -> dict[str, int]:
        linear = config.linear
        if linear is None or not any(linear.layers):
            return {}
        return {
            "num_slots": options.num_slots,
            "key_heads": linear.num_key_heads,
            "value_heads": linear.num_value_heads,
            "key_dim": linear.key_dim,
            "value_dim": linear.value_dim,
            "conv_width": linear.conv_width,
            "alternates_values": linear.alternates,
        }

    def _layer(
        self, layer: LayerWeights, where: tuple[int, int], *, window: int, rope: int
    ) -> LayerStructure:
        vectors = (
            *("qkv_bias", "o_bias", "attention_norm", "mlp_norm", "after_attention_norm", "after_mlp_norm"),
            *("query_norm", "key_norm", "sinks", "conv", "decay", "dt_bias", "delta_norm"),
        )
        return LayerStructure(
            qkv=_handles(layer.qkv, MOST_QKV),
            o=layer.o.handle,
            window=window,
            rope=rope,
            table=where[0],
            place=where[1],
            **self._feed_forward(layer.feed_forward),
            **{name: address(getattr(layer, name), np.float32) for name in vectors},
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


def _stacked(arrays: Sequence[FloatArray | None]) -> FloatArray | None:
    found = [array for array in arrays if array is not None]
    return np.stack(found) if found else None


def _pointers(arrays: Sequence[FloatArray]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(address(array, np.float32) for array in arrays))


def _handles(matrices: Sequence[PackedMatrix], length: int) -> Any:
    return (ctypes.c_void_p * length)(*(matrix.handle for matrix in matrices))
