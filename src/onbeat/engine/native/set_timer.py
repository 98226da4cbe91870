"""Times a packed model's steps in each way that it could run: on instruction sets, with copies of weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from onbeat.engine.input_batch import AttentionBatch, StepInputs
from onbeat.engine.native.forward import NativeForward, NativeModel, NativeOptions, first_layers
from onbeat.engine.native.instruction_sets import (
    SetChoice,
    SetTimes,
    SetTimesFile,
    StepKind,
    settle_set,
    time_sets,
    time_with_care,
)
from onbeat.engine.native.library import NativeLibrary
from onbeat.engine.native.packing import NativeWeights

DECODES = (1, 8, 32)
PROMPT_TOKENS = 512
_FEWEST_PROMPT_TOKENS = 128
_PROMPT_PRODUCTS = 2**32
"""Of weights and tokens, at most, that a prompt is timed with, unless it would be of fewer tokens."""
_DECODE_BYTES = 32 << 20
"""Of weights that decodes are timed with, where the model has as many: more than caches of the second level
keep, for in the model's own steps they come from further away."""
_LEAST_BYTES = 4 << 20
"""Of a model's weights; in steps of a smaller one other things take longer than products."""
_CONTEXT_TOKENS = 64


def choose_instruction_set(model: NativeModel, *, processor: str, directory: Path) -> SetChoice:
    """Return the quickest set for a model, as timed before on such a machine, or now.

    Parameters
    ----------
    model : what runs.
    processor : its name.
    directory : where times are kept.
    """
    names = model.library.instruction_sets
    if len(names) == 1:
        return SetChoice(names[0], "the only one here")
    if is_too_small(model.weights):
        return SetChoice(names[0], "the newest; the model is too small to time others")
    kinds = step_kinds(model.weights)
    variants = set_variants(model.library, model.options)
    key = times_key(model, processor=processor, variants=names, steps=kinds)

    def measure() -> SetTimes:
        with closing(StepTimer(model, variants, kinds)) as timer:
            return time_with_care(names, kinds, timer.run)

    return settle_set(names, SetTimesFile(directory, key), measure)


def is_too_small(weights: NativeWeights) -> bool:
    """Return whether other things take longer than products in a model's steps."""
    return weights.num_bytes < _LEAST_BYTES


def times_key(model: NativeModel, **what: Any) -> dict[str, Any]:
    """Return all that times depend on.

    Parameters
    ----------
    what : is timed where, by name.
    """
    library, config, weights, options = model
    return {
        "library": hashlib.sha256(library.path.read_bytes()).hexdigest(),
        "instruction_set": options.instruction_set,
        "threads": options.num_threads,
        "dtype": str(options.dtype),
        "activation_quantization": options.activation_quantization,
        "batch_invariant": options.batch_invariant,
        "copy_rows": options.copy_rows,
        "block_size": options.block_size,
        "model": asdict(config),
        "layouts": [str(matrix.layout) for matrix in weights.layers[0].matrices],
        **what,
    }


def set_variants(library: NativeLibrary, options: NativeOptions) -> dict[str, NativeOptions]:
    """Return how a model would run on each set. Copies were chosen for the first; others do without."""
    first, *others = library.instruction_sets
    return {first: replace(options, instruction_set=first)} | {
        name: replace(options, instruction_set=name, copy_rows=0) for name in others
    }


def time_all_sets(model: NativeModel) -> tuple[list[StepKind], SetTimes]:
    """Return steps, and what every set takes for each.

    Raises
    ------
    ConfigError, EngineError : memory or threads are short.
    """
    kinds, names = step_kinds(model.weights), model.library.instruction_sets
    variants = {name: replace(model.options, instruction_set=name) for name in names}
    with closing(StepTimer(model, variants, kinds)) as timer:
        return kinds, time_sets(names, kinds, timer.run, gives_up=False)


def step_kinds(weights: NativeWeights) -> list[StepKind]:
    """Return decodes of few to many requests in some layers, and a prompt in one."""
    first = weights.layers[0].matrices
    num_layers = num_decode_layers(weights)
    num_weights = sum(matrix.num_outputs * matrix.num_inputs for matrix in first)
    prompt = min(max(_PROMPT_PRODUCTS // num_weights, _FEWEST_PROMPT_TOKENS), PROMPT_TOKENS)
    return [*(StepKind(num_rows, 1, num_layers) for num_rows in DECODES), StepKind(1, prompt, 1)]


def num_decode_layers(weights: NativeWeights) -> int:
    """Return how many of the first layers decodes are timed in."""
    layer_bytes = sum(matrix.num_bytes for matrix in weights.layers[0].matrices)
    return min(max(-(-_DECODE_BYTES // layer_bytes), 1), len(weights.layers))


class StepTimer:
    """The first layers of a model in several variants, each with threads and a KV cache of its own.

    Parameters
    ----------
    model : what runs; `variants` says how.
    variants : how it may run, by name.
    kinds : the steps that will be timed.
    """

    def __init__(
        self, model: NativeModel, variants: Mapping[str, NativeOptions], kinds: Sequence[StepKind]
    ) -> None:
        self._model = model
        self._block_size = next(iter(variants.values())).block_size
        blocks = max(kind.num_rows * _row_blocks(kind, self._block_size) for kind in kinds)
        self._variants = {name: replace(options, num_blocks=blocks) for name, options in variants.items()}
        self._forwards: dict[tuple[str, int], NativeForward] = {}

    def run(self, variant: str, kind: StepKind) -> float:
        """Run a step; return its seconds."""
        key = variant, kind.num_layers
        if key not in self._forwards:
            self._forwards[key] = NativeForward(
                self._model.library,
                *first_layers(self._model.config, self._model.weights, kind.num_layers),
                self._variants[variant],
            )
        inputs = _step_inputs(kind, self._block_size, self._model.config.vocab_size)
        seconds = self._forwards[key].run(inputs, wants_logits=False).seconds
        assert seconds is not None
        return seconds

    def close(self) -> None:
        """Let threads and memory go."""
        for forward in self._forwards.values():
            forward.close()


def _row_blocks(kind: StepKind, block_size: int) -> int:
    return -(-max(kind.row_tokens, _CONTEXT_TOKENS) // block_size)


def _step_inputs(kind: StepKind, block_size: int, vocab_size: int) -> StepInputs:
    """Rows at the end of their contexts, each in blocks of its own."""
    num_rows, num_tokens = kind.num_rows, kind.num_rows * kind.row_tokens
    context = max(kind.row_tokens, _CONTEXT_TOKENS)
    num_blocks = _row_blocks(kind, block_size)
    positions_RT = np.tile(np.arange(context - kind.row_tokens, context), (num_rows, 1))
    first_slots_R = np.arange(num_rows) * num_blocks * block_size
    return StepInputs(
        token_ids_T=np.arange(num_tokens) % vocab_size,
        positions_T=positions_RT.ravel(),
        attention=AttentionBatch(
            query_lens_R=np.full(num_rows, kind.row_tokens),
            context_lens_R=np.full(num_rows, context),
            slots_R=np.arange(num_rows),
            block_tables_SB=np.arange(num_rows * num_blocks, dtype=np.int32).reshape(num_rows, num_blocks),
            slot_mapping_T=(first_slots_R[:, None] + positions_RT).ravel(),
        ),
    )
