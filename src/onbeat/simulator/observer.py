"""Who may watch a simulation."""

from __future__ import annotations

from typing import Protocol

from onbeat.core.step_stats import StepStats
from onbeat.metrics.record import RequestRecord


class SimulationObserver:
    """Hears of steps and requests in the order of virtual time; by itself it does nothing."""

    wants_steps = True
    """Whether it hears of steps. Each is planned by itself then, else runs of decode steps at once."""

    def on_request(self, record: RequestRecord, /) -> None:
        """Hear of a request that was sent to a replica; the record fills up while it runs."""

    def on_step(self, replica: int, stats: StepStats, /) -> None:
        """Hear of a step, after the deliveries it made and before the requests that it ended."""

    def on_finish(self, record: RequestRecord, /) -> None:
        """Hear that a request ended; its record is complete."""


class OnRequests(Protocol):
    """Hears how far a run is, at most ten times a second, and at its end."""

    def __call__(self, num_finished: int, num_requests: int, virtual_time: float, /) -> None: ...
