"""The forward pass of a step in the native engine: one call of the library, no Python between layers.

Legend: R sampling rows, V vocabulary, H head width, P tokens whose hidden states are wanted, D model width.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError, EngineError
from onbeat.engine.device import CPU
from onbeat.engine.forward import ForwardPass, StepLogits
from onbeat.engine.input_batch import AttentionBatch, IntArray, StepInputs
from onbeat.engine.kv_access import KVRegion
from onbeat.engine.model_config.architecture import ModelConfig
from onbeat.engine.native.library import ERROR_BYTES, CallStatus, NativeLibrary, StepStructure, address
from onbeat.engine.native.packing import NativeWeights
from onbeat.engine.native.structures import EngineStructures, NativeOptions
from onbeat.engine.profiling.products import RowProducts
from onbeat.engine.sampled import BestTokens
from onbeat.perfmodel.device_spec import ROW_COUNTS

_BYTES_AHEAD = 256 << 20
"""Of the KV cache, that an idle engine has provided beyond what it has used."""
_STEP_PROBLEMS = {
    CallStatus.MALFORMED: "the native engine refused",
    CallStatus.NO_MEMORY: "there is not enough memory for the native engine to run",
    CallStatus.FAILED: "the native engine failed in",
}


class NativeModel(NamedTuple):
    """What `NativeForward` runs."""

    library: NativeLibrary
    config: ModelConfig
    weights: NativeWeights
    options: NativeOptions

    def first_layers(self, num_layers: int) -> NativeModel:
        """Return a model of some layers alone, the first of which one attends; it shares their weights."""
        config = self.config
        attends = next(index for index in range(config.num_layers) if not config.is_linear(index))
        first = max(attends + 1 - num_layers, 0)
        end = first + num_layers
        layers = [replace(layer, own_input=()) for layer in self.weights.layers[first:end]]
        weights = replace(self.weights, layers=layers, inputs=None)
        return self._replace(config=config.some_layers(first, end), weights=weights)


class NativeForward(ForwardPass):
    """Runs steps in the library, with a KV cache of its own.

    Raises
    ------
    ConfigError : the library refuses: memory, sizes or the instruction set.
    """

    def __init__(self, model: NativeModel) -> None:
        self._model = model  # of which the library only borrows the weights
        self.library, self.config, self.weights, self.options = model
        library, config, weights, options = model
        self.device = CPU
        self.instruction_set = options.instruction_set or library.instruction_sets[0]
        self.settings = {
            "backend": "native",
            "instruction_set": self.instruction_set,
            "weights": weights.stores,
        }
        if options.batch_invariant:
            self.settings["batch_invariant"] = "yes"
        self._functions = library.functions
        self._structures = EngineStructures(config, weights, options)
        error = ctypes.create_string_buffer(ERROR_BYTES)
        self._engine: int | None = self._functions.ob_engine_create(
            self._structures.model, self.instruction_set.encode(), error, len(error)
        )
        if self._engine is None:
            raise ConfigError(f"the native engine cannot run: {error.value.decode(errors='replace')}")
        self._free = weakref.finalize(self, self._functions.ob_engine_free, self._engine)
        self._free.atexit = False  # the process's end frees it too
        self._num_blocks_ahead = max(1, _BYTES_AHEAD // self.kv_regions()[0].block_bytes)
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
            pending=address(batch.pending_R, np.int64),
            untaken=address(batch.untaken_R, np.int64),
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
        return _FirstLayer(self._model)

    def time(self, inputs: StepInputs) -> float:
        """Return the seconds of a step whose last layer, as those before it, computes all tokens."""
        inputs = replace(inputs, pooled_tokens=np.arange(len(inputs.token_ids_T)))
        seconds = self.run(inputs, wants_logits=False).seconds
        assert seconds is not None, "the library measures every step"
        return seconds

    def close(self) -> None:
        """Let threads and KV cache go; no step may run any more. Being forgotten does the same."""
        self._free()

    def _logits(self, num_rows: int) -> NDArray[np.float32]:
        """Return room for logits: used again, for fresh memory would be cleared page by page in each step."""
        if len(self._logits_RV) < num_rows:
            self._logits_RV = np.empty((num_rows, self.config.vocab_size), np.float32)
        return self._logits_RV[:num_rows]


class _FirstLayer:
    """Products of a model's first layer that attends, by an engine that has it alone and computes no logits.

    Rows are many short sequences, whose attention takes next to no time.
    """

    def __init__(self, model: NativeModel) -> None:
        first = model.first_layers(1)
        layer = first.weights.layers[0]
        self.flops_per_row = 2.0 * layer.numbers_per_token
        self.num_bytes = sum(matrix.num_bytes for matrix in layer.matrices)
        sizes = {"num_blocks": _PRODUCT_SEQUENCES, "block_size": _PRODUCT_TOKENS, "num_tables": 1}
        self._forward = NativeForward(first._replace(options=replace(first.options, **sizes)))

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
        return self._forward.time(inputs)

    def close(self) -> None:
        """Let its threads and memory go; the weights are the model's."""
        self._forward.close()


_PRODUCT_TOKENS = 16
_PRODUCT_SEQUENCES = ROW_COUNTS[-1] // _PRODUCT_TOKENS
