"""Step times that were measured, played in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.simulator.replay.history import RecordedStep

_WINDOW = 32
"""Steps to look ahead for the one that is asked for."""


@dataclass(frozen=True, slots=True)
class StepCycle:
    """A step and its share of the host's time."""

    shape: BatchShape
    seconds: float


def step_cycles(steps: Sequence[RecordedStep]) -> list[StepCycle]:
    """Return the time of each step, the host's before it included: from end to end, or from an idle plan."""
    cycles = []
    last_end = 0.0
    for step in steps:
        start = step.planned if step.follows_idleness else last_end
        cycles.append(StepCycle(step.shape, step.end - start))
        last_end = step.end
    return cycles


class RecordedStepTimes:
    """A `core.StepTimeModel` that answers with recorded times, one after the other.

    It expects to be asked for the recorded steps in their order. Where the batch is another one (a request
    was aborted in the recorded run, and here it was not), it goes on with the nearest later step of the very
    shape, and otherwise takes the next one as it is.

    Parameters
    ----------
    cycles : at least one.
    planner : returns the model that the recorded scheduler planned with, as it was before the first step, or
        None where it had none. Asked only if the policy plans by predicted times.

    Attributes
    ----------
    num_asked : steps that were asked for.
    num_matched : of these, steps whose batch was exactly a recorded one.
    """

    def __init__(
        self, cycles: Sequence[StepCycle], planner: Callable[[], StepTimeModel | None] = lambda: None
    ) -> None:
        if not cycles:
            raise ConfigError("the record has no steps; record a run that served a request")
        self._cycles = cycles
        self._planner = planner
        self._next = 0
        self.num_asked = 0
        self.num_matched = 0

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        """Return the time of the next recorded step; a recorded time has no quantiles."""
        if q is not None:
            raise ConfigError(f"recorded step times have no quantiles (asked for {q}); ask for the mean")
        self.num_asked += 1
        cycles, start = self._cycles, min(self._next, len(self._cycles) - 1)
        for index in range(start, min(start + _WINDOW, len(cycles))):
            if cycles[index].shape == shape:
                self.num_matched += 1
                self._next = index + 1
                return cycles[index].seconds
        self._next = start + 1
        return cycles[start].seconds

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        """Raise ConfigError: what was not run was not measured."""
        raise ConfigError(
            f"recorded step times cannot say how many tokens fit into {budget:g} s beside {shape} with "
            f"{cached_tokens} cached (quantile {q}); simulate this policy with --profile FILE"
        )

    def with_learning(self) -> StepTimeModel:
        """Return what the scheduler plans with: not these times, which it could not know beforehand."""
        planner = self._planner()
        if planner is None:
            raise ConfigError(
                "the recorded policy plans by predicted step times, but the record has no step-time model"
            )
        return planner

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learn nothing: the times are given."""
