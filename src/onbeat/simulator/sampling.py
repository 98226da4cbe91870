"""The tokens that a virtual device samples: all alike, but for the one with which a request stops."""

from __future__ import annotations

from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.simulator.client import STOP
from onbeat.simulator.deliveries import Deliveries

_ORDINARY = STOP + 1


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
