"""Who may watch a simulation, who collects what has ended, and who says how far the run is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol

from onbeat.core.step import StepStats
from onbeat.metrics.record import RequestRecord
from onbeat.simulator.client import OfferedRequest

_REPORT_SECONDS = 0.1
_REQUESTS_BETWEEN_LOOKS = 16
"""Finished requests between two looks at the clock."""


StepsWanted = Literal["none", "runs", "all"]
Keep = Callable[[int, RequestRecord], None]
"""Takes (row of the load, record of a request that ended)."""


class SimulationObserver(Protocol):
    """Hears of steps and requests in the order of virtual time.

    Runs with an observer stay in one process.
    """

    wanted_steps: StepsWanted
    """Of which steps it hears: of none, of all, or of all but with a run of decode steps that differ in token
    counts alone told as one: from the start of its first to the end of its last, with the shape of the first.
    The scheduler's state (`StepStats.scheduler`) is told only to those who want all."""

    def on_request(self, record: RequestRecord, /) -> None:
        """Hear of a request that was sent to a replica; the record fills up while it runs."""
        ...

    def on_step(self, replica: int, stats: StepStats, /) -> None:
        """Hear of a step, after the deliveries it made and before the requests that it ended."""
        ...

    def on_finish(self, record: RequestRecord, /) -> None:
        """Hear that a request ended; its record is complete."""
        ...


class Progress(Protocol):
    """Hears how far a run is, at most ten times a second, and at its end."""

    def __call__(self, num_finished: int, num_requests: int, virtual_time: float, /) -> None: ...


class ProgressMeter:
    """Calls back at most ten times a second, and once at the end."""

    def __init__(
        self, callback: Progress | None, num_requests: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._callback = callback
        self._num_requests = num_requests
        self._clock = clock
        self._next_report = clock() + _REPORT_SECONDS
        self.num_finished = 0
        self.virtual_time = 0.0

    def advance(self, num_finished: int, virtual_time: float) -> None:
        """Count finished requests, the last of which ended at `virtual_time`."""
        self.num_finished += num_finished
        self.virtual_time = max(self.virtual_time, virtual_time)
        if self._callback is not None and self._clock() >= self._next_report:
            self._next_report = self._clock() + _REPORT_SECONDS
            self._callback(self.num_finished, self._num_requests, self.virtual_time)

    def finish(self) -> None:
        """Report the end."""
        if self._callback is not None:
            self._callback(self.num_finished, self._num_requests, self.virtual_time)


class Collector:
    """Passes on the records of requests that ended.

    Parameters
    ----------
    keep : takes (row of the load, record).
    on_progress : told how many more requests have ended, and when the last did (virtual seconds).
    """

    def __init__(
        self,
        keep: Keep,
        *,
        on_progress: Callable[[int, float], None],
        observer: SimulationObserver | None = None,
    ) -> None:
        self._keep = keep
        self._on_progress = on_progress
        self._observer = observer
        self._num_unreported = 0
        self._last_end = 0.0

    def on_request(self, offered: OfferedRequest) -> None:
        """Hear of a request that a replica took."""
        if self._observer is not None:
            self._observer.on_request(offered.record)

    def on_finish(self, offered: OfferedRequest, now: float) -> None:
        """Keep the record of a request that ended."""
        self._keep(offered.index, offered.record)
        self._last_end = now
        if self._observer is not None:
            self._observer.on_finish(offered.record)
        self._num_unreported += 1
        if self._num_unreported >= _REQUESTS_BETWEEN_LOOKS:
            self.report()

    def report(self) -> None:
        """Say how many requests have ended since the last time."""
        num_finished, self._num_unreported = self._num_unreported, 0
        self._on_progress(num_finished, self._last_end)
