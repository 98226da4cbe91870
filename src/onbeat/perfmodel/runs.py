"""Times of steps that follow one another and differ in what their decodes read alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel

RunSeconds = Callable[[BatchShape, Sequence[int]], Sequence[float]]
"""(any of the steps, `decode_context_tokens` of each) -> seconds of each."""


@runtime_checkable
class RunTimer(Protocol):
    """A step-time model that predicts several steps at once in less time."""

    def step_times(self, shape: BatchShape, contexts: Sequence[int]) -> Sequence[float]:
        """Return what `seconds_of_each` does with `step_time`: expected times, seconds."""
        ...


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


def observe_each(model: StepTimeModel, shape: BatchShape, begun: float, ends: Sequence[float]) -> None:
    """Let a model learn from steps that followed one another, in each of which every row read a token more.

    Parameters
    ----------
    shape : of the step before the first of them; afterwards that of the last.
    begun : when the first began, seconds.
    ends : when each of them ended, which is when the next began.
    """
    for end in ends:
        shape.decode_context_tokens += shape.num_lm_head_rows
        model.observe(shape, end - begun)
        begun = end
