"""A decode and a prompt, timed when an engine starts without a profile: estimates are several times off."""

from __future__ import annotations

import time
from statistics import median_low

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.engine.loaded_model import LoadedModel
from onbeat.engine.profiling.batches import TIMES_AT_ONCE, BatchRow, MeasuredBatch
from onbeat.engine.profiling.measure import StepTimer
from onbeat.perfmodel.shapes import MeasuredStep

_MOST_TOKENS = 2048
"""Of the prompt; a decode reads half as many."""
_LONG_DECODE = 0.25
"""Seconds of a decode from which on a prompt, which takes a multiple, would hold up the start."""
_SHORTEST_PROMPT, _DECODES = 0.03, 2
"""Seconds, and decodes: a prompt that is to take as long does not only read weights."""
_RUNS, _SECONDS = 3, 0.4
"""Of a batch at most, where one run is not longer."""


def time_both(loaded: LoadedModel, model: StepTimeModel) -> list[MeasuredStep]:
    """Time a decode, and a prompt unless a decode alone takes long; about a second in all.

    Parameters
    ----------
    loaded : the model, not yet in use.
    model : the estimate, which says how long a prompt may be.
    """
    limits, samples = loaded.limits, loaded.backend.model.has_head
    in_model, in_cache = limits.max_model_len - TIMES_AT_ONCE, limits.num_blocks * limits.block_size
    longest = max(min(in_model, in_cache, limits.max_num_batched_tokens, _MOST_TOKENS), 2)
    decode = MeasuredBatch((BatchRow(longest // 2, 1, samples),))
    timer = StepTimer(loaded.runner, num_blocks=-(-longest // limits.block_size))
    try:
        steps = [_time(timer, decode)]
        if (seconds := steps[0].seconds) < _LONG_DECODE:
            estimate = max(_SHORTEST_PROMPT, _DECODES * seconds) * model.step_time(decode.shape) / seconds
            tokens = min(max(model.max_chunk_tokens(BatchShape(), 0, estimate), 2), longest)
            steps.append(_time(timer, MeasuredBatch((BatchRow(0, tokens, samples),))))
    finally:
        timer.close()
    return steps


def _time(timer: StepTimer, batch: MeasuredBatch) -> MeasuredStep:
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while not times or (len(times) < _RUNS and time.perf_counter() < end):
        times.append(timer.time(batch))
    return MeasuredStep(batch.shape, median_low(times))
