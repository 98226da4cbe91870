"""Times of steps that follow one another and differ in what their decodes read alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onbeat.core.step import BatchShape

RunSeconds = Callable[[BatchShape, Sequence[int]], Sequence[float]]
"""(any of the steps, `decode_context_tokens` of each) -> seconds of each."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """A function from a batch's sums to seconds that also knows the times of a run of steps, in less time."""

    of_one: Callable[[BatchShape], float]
    of_run: RunSeconds
    """Comes to what `seconds_of_each` does with `of_one`, to the last digit."""

    def __call__(self, shape: BatchShape) -> float:
        return self.of_one(shape)
