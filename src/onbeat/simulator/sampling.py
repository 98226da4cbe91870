"""The tokens that a virtual device samples: all alike, but for the one with which a request stops."""

from __future__ import annotations

from typing import Protocol

from onbeat.core.step import BatchShape, ModelRunnerOutput, SchedulerOutput
from onbeat.simulator.client import STOP
from onbeat.simulator.config import SimulationConfig
from onbeat.simulator.deliveries import Deliveries
from onbeat.simulator.result import DraftCounts
from onbeat.simulator.verifying import VerifyingSampler

ORDINARY = STOP + 1
"""A token that ends no request."""
_ORDINARY_ROW, _LAST_ROW = [ORDINARY], [STOP]


class Sampler(Protocol):
    """What a virtual device computes in a step, and which tokens come of it."""

    @property
    def counts(self) -> DraftCounts | None:
        """What became of drafts so far; None where nothing is speculated."""
        ...

    def begin(self, scheduled: SchedulerOutput) -> BatchShape:
        """Take note of a step that begins; return what the device computes."""
        ...

    def sample(self, scheduled: SchedulerOutput, num_steps: int) -> ModelRunnerOutput:
        """Return the tokens of a step: of the last of `num_steps` that are taken at once."""
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

    def sample(self, scheduled: SchedulerOutput, num_steps: int) -> ModelRunnerOutput:
        """Return the tokens of a step: of the last of `num_steps` that are taken at once."""
        if not self._may_stop:
            return ModelRunnerOutput([_ORDINARY_ROW] * scheduled.shape.num_lm_head_rows)
        num_left = self._deliveries.num_left
        return ModelRunnerOutput(
            [
                _LAST_ROW if num_left(row.request_id) == num_steps else _ORDINARY_ROW
                for row in scheduled.rows
                if row.samples
            ]
        )


def make_sampler(config: SimulationConfig, deliveries: Deliveries) -> Sampler:
    """Return what samples on one replica."""
    if config.scheduler.speculation is None:
        return VirtualSampler(deliveries, may_stop=config.declared_max_tokens is not None)
    return VerifyingSampler(deliveries, config)
