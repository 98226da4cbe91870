"""Times of steps that follow one another and differ in what their decodes read alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from onbeat.core.step import BatchShape

RunSeconds = Callable[[BatchShape, Sequence[int]], Sequence[float]]
"""(any of the steps, `decode_context_tokens` of each) -> seconds of each."""


@runtime_checkable
class RunTimer(Protocol):
    """A step-time model that predicts several steps at once in less time."""

    def step_times(self, shape: BatchShape, contexts: Sequence[int]) -> Sequence[float]:
        """Return what `seconds_of_each` does with `step_time`: expected times, seconds."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """A function from a batch's sums to seconds that also knows the times of a run of steps, in less time."""

    of_one: Callable[[BatchShape], float]
    of_run: RunSeconds
    """Comes to what `seconds_of_each` does with `of_one`, to the last digit."""

    def __call__(self, shape: BatchShape) -> float:
        return self.of_one(shape)


def seconds_of_each(
    seconds: Callable[[BatchShape], float], shape: BatchShape, contexts: Sequence[int]
) -> list[float]:
    """Return the times of steps by asking for one after another: what a quicker way must come to.

    Parameters
    ----------
    shape : of any of the steps; it is left as it is.
    contexts : `decode_context_tokens` of each.
    """
    before, times = shape.decode_context_tokens, []
    for context in contexts:
        shape.decode_context_tokens = context
        times.append(seconds(shape))
    shape.decode_context_tokens = before
    return times
