"""What became of jobs, counted for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from onbeat.jobs.call import JobEnd


@dataclass(slots=True)
class JobCounts:
    """Jobs that ended, and how long they took."""

    ended: Counter[JobEnd] = field(default_factory=Counter)
    in_calls: float = 0.0
    """Seconds of all ended jobs in which calls were open."""
    between: float = 0.0
    """Seconds of all ended jobs between their calls."""

    def end(self, end: JobEnd, in_calls: float, between: float) -> None:
        """Count a job that ended."""
        self.ended[end] += 1
        self.in_calls += in_calls
        self.between += between
