"""The tokens that a virtual device samples: all alike, but for the one with which a request stops."""

from __future__ import annotations

from typing import Protocol

from onbeat.core.step import BatchShape, ModelRunnerOutput, SchedulerOutput
from onbeat.simulator.client import STOP
from onbeat.simulator.config import SimulationConfig
from onbeat.simulator.deliveries import Deliveries
from onbeat.simulator.result import DraftCounts
from onbeat.simulator.verifying import VerifyingSampler

_ORDINARY = STOP + 1


class Sampler(Protocol):
    """What a virtual device computes in a step, and which tokens come of it."""

    @property
    def counts(self) -> DraftCounts | None:
        """What became of drafts so far; None where nothing is speculated."""
        ...

    def max_steps(self, scheduled: SchedulerOutput) -> int:
        """Return how often the step may be run before one of its requests ends."""
        ...

    def begin(self, scheduled: SchedulerOutput) -> BatchShape:
        """Take note of a step that begins; return what the device computes."""
        ...

    def sample(self, scheduled: SchedulerOutput, num_steps: int) -> ModelRunnerOutput:
        """Return the tokens of a step that was run `num_steps` times."""
        ...


class VirtualSampler:
    """Ends each request at the output length that the load says, whatever limit was declared.

    Parameters
    ----------
    deliveries : knows how many tokens each request still gets.
    may_stop : whether requests end before their `max_tokens`.
    """

    def __init__(self, deliveries: Deliveries, *, may_stop: bool) -> None:
        self._deliveries = deliveries
        self._may_stop = may_stop

    @property
    def counts(self) -> None:
        return None

    def begin(self, scheduled: SchedulerOutput) -> BatchShape:
        """Return the shape of the step, as it was planned."""
        return scheduled.shape

    def max_steps(self, scheduled: SchedulerOutput) -> int:
        """Return how often the step may be run before one of its requests ends.

        The scheduler's own answer (`max_repeats`) looks at `max_tokens` alone.
        """
        if not self._may_stop or scheduled.max_repeats == 1:
            return scheduled.max_repeats
        num_left = self._deliveries.num_left
        return min(
            scheduled.max_repeats, *(num_left(row.request_id) for row in scheduled.rows if row.samples)
        )

    def sample(self, scheduled: SchedulerOutput, num_steps: int) -> ModelRunnerOutput:
        """Return the tokens of a step that was run `num_steps` times."""
        token_ids = [_ORDINARY] * num_steps
        if not self._may_stop:
            return ModelRunnerOutput([token_ids] * scheduled.shape.num_lm_head_rows)
        last_token_ids = [*token_ids[1:], STOP]
        num_left = self._deliveries.num_left
        return ModelRunnerOutput(
            [
                last_token_ids if num_left(row.request_id) == num_steps else token_ids
                for row in scheduled.rows
                if row.samples
            ]
        )


def make_sampler(config: SimulationConfig, deliveries: Deliveries) -> Sampler:
    """Return what samples on one replica."""
    if config.scheduler.speculation is None:
        return VirtualSampler(deliveries, may_stop=config.declared_max_tokens is not None)
    return VerifyingSampler(deliveries, config)
