"""Requests that no policy can serve in time, since an idle machine could not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.workload.offered import OfferedLoad


def hopeless_rows(load: OfferedLoad, model: StepTimeModel) -> NDArray[np.bool_]:
    """Return which requests of a load with objectives miss them even alone, with an empty prefix cache.

    The whole prompt in one step takes longer than ttft, or its first decode longer than tbt.
    """
    rows = zip(load.num_prompt_tokens.tolist(), load.num_output_tokens.tolist(), strict=True)
    return np.array(
        [_is_hopeless(load, model, index, prompt, output) for index, (prompt, output) in enumerate(rows)],
        dtype=np.bool_,
    )


def _is_hopeless(load: OfferedLoad, model: StepTimeModel, index: int, prompt: int, output: int) -> bool:
    slo = load.slo(index)
    if slo is None:
        return False
    if slo.ttft is not None and row_seconds(model, 0, prompt) > slo.ttft:
        return True
    return slo.tbt is not None and output > 1 and row_seconds(model, prompt, 1) > slo.tbt


def row_seconds(model: StepTimeModel, num_computed_tokens: int, num_new_tokens: int) -> float:
    """Return what a step with one row takes, seconds."""
    shape = BatchShape()
    shape.add(num_computed_tokens, num_new_tokens, samples=True)
    return model.step_time(shape)
