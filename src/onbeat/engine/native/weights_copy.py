"""Whether products of many rows read a plain copy of quantized weights: where that is quicker, as timed here.

A processor may multiply plain numbers so fast (AMX: bfloat16) that products of many rows take longer for
weights in 4 or 8 bits, which become plain numbers, or are multiplied in bytes, anew in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from onbeat.core.errors import ModelLoadError
from onbeat.engine.native.forward import NativeModel, NativeOptions
from onbeat.engine.native.instruction_sets import (
    CONFIRMATIONS,
    LEAST_GAIN,
    SetTimes,
    SetTimesFile,
    StepKind,
    settle_times,
    time_sets,
)
from onbeat.engine.native.layouts import PLAIN_LAYOUTS
from onbeat.engine.native.matrix import PackedMatrix
from onbeat.engine.native.packing import NativeWeights
from onbeat.engine.native.set_timer import StepTimer, is_too_small, num_decode_layers, times_key

ROWS = (8, 16, 32, 64)
"""Decodes that are timed."""
PROMPT_ROWS = 256
MEMORY_SHARE = 0.5
"""Of the memory that nothing else of the engine takes: what a copy may take, which is a choice, no need."""
_BOTH = _WITHOUT, _WITH = "without", "with"


class CopyChoice(NamedTuple):
    """From how many tokens of a step its products read a copy, and why."""

    rows: int
    """0: never, so there is no copy."""
    reason: str
    """One sentence, for people."""


NONE = "the engine keeps no copy of the weights"


def why_no_copy(weights: NativeWeights, options: NativeOptions, spare_bytes: int) -> str | None:
    """Return a sentence on why there can be no copy, whatever its worth; None if there can.

    Parameters
    ----------
    weights, options : what runs.
    spare_bytes : memory that neither weights nor KV cache nor steps take.
    """
    if options.batch_invariant:
        return f"{NONE}: batch-invariant products multiply all rows alike"
    if is_too_small(weights):
        return f"{NONE}: the model is too small to time it"
    num_bytes, allowed = copy_bytes(weights, options), max(int(MEMORY_SHARE * spare_bytes), 0)
    if num_bytes <= allowed:
        return None
    return (
        f"{NONE}: it would take {num_bytes >> 20} MiB, and may take {allowed >> 20} MiB, half of what "
        "weights and KV cache leave"
    )


def choose_copy(model: NativeModel, *, processor: str, directory: Path) -> CopyChoice:
    """Decide on a copy of the weights by its worth, as timed before on such a machine, or now.

    Parameters
    ----------
    model : what runs. The instruction set must be given.
    processor : its name.
    directory : where times are kept.
    """
    weights, options = model.weights, model.options
    name = PLAIN_LAYOUTS[options.dtype].store.name.lower()
    kinds = copy_kinds(weights)
    key = times_key(model, processor=processor, copy=name, steps=kinds)

    def measure() -> SetTimes:
        return time_copy(model, kinds)

    times, source, caveat = settle_times(_BOTH, SetTimesFile(directory, key), measure)
    if times is None:
        return CopyChoice(0, f"{NONE}: it {source}")
    rows = fewest_rows(kinds, times)
    gain = times[_WITH][-1] / times[_WITHOUT][-1]
    told = f"a prompt takes {gain:.2f} times as long with it, {source}{caveat}"
    if rows == 0:
        return CopyChoice(0, f"{NONE}: {told}")
    return CopyChoice(
        rows,
        f"steps of {rows} tokens or more read a copy of the weights in {name}, which takes "
        f"{copy_bytes(weights, options) >> 20} MiB: {told}",
    )


def copy_bytes(weights: NativeWeights, options: NativeOptions) -> int:
    """Return the bytes of a copy of all quantized weights that products read."""
    number = PLAIN_LAYOUTS[options.dtype].bytes_per_number
    return sum(int(m.num_outputs * m.num_inputs * number) for m in weights.quantized_products)


def copy_kinds(weights: NativeWeights) -> list[StepKind]:
    """Return the steps that are timed with and without a copy: many decodes, and a prompt."""
    num_layers = num_decode_layers(weights)
    return [*(StepKind(rows, 1, num_layers) for rows in ROWS), StepKind(1, PROMPT_ROWS, 1)]


def time_copy(model: NativeModel, kinds: Sequence[StepKind]) -> dict[str, list[float]]:
    """Time steps without and with a copy, of the layers that they need, which is gone afterwards.

    Raises
    ------
    ModelLoadError, ConfigError, EngineError : memory or threads are short.
    """
    weights, options = model.weights, model.options
    num_layers = max(kind.num_layers for kind in kinds)
    matrices = [m for layer in weights.layers[:num_layers] for m in layer.matrices if m.layout.group]
    variants = {_WITHOUT: replace(options, copy_rows=0), _WITH: replace(options, copy_rows=1)}
    try:
        _copy(matrices, options)
        with closing(StepTimer(model, variants, kinds)) as timer:
            times = time_sets(_BOTH, kinds, timer.run, gives_up=False)
            if fewest_rows(kinds, times):
                again = time_sets(_BOTH, kinds, timer.run, gives_up=False, repeats=CONFIRMATIONS)
                times = {name: list(map(min, times[name], again[name])) for name in _BOTH}
            return times
    finally:
        _drop(matrices)


def fewest_rows(kinds: Sequence[StepKind], times: SetTimes) -> int:
    """Return from how many rows on a copy is quicker by `LEAST_GAIN` in all steps timed; 0: never."""
    rows = 0
    for kind, without, own in zip(*map(reversed, (kinds, times[_WITHOUT], times[_WITH])), strict=True):
        if own > (1 - LEAST_GAIN) * without:
            break
        rows = kind.num_tokens
    return rows


def make_copy(weights: NativeWeights, options: NativeOptions) -> None:
    """Copy all quantized weights that products read; if memory runs out, none.

    Raises
    ------
    ModelLoadError : memory ran out.
    """
    matrices = weights.quantized_products
    try:
        _copy(matrices, options)
    except ModelLoadError:
        _drop(matrices)
        raise


def _copy(matrices: Sequence[PackedMatrix], options: NativeOptions) -> None:
    for matrix in matrices:
        matrix.copy(PLAIN_LAYOUTS[options.dtype], num_threads=options.num_threads)


def _drop(matrices: Sequence[PackedMatrix]) -> None:
    for matrix in matrices:
        matrix.drop_copy()
