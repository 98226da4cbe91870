"""A driver that knows when each step was planned, and which requests met their objectives."""

from __future__ import annotations

from itertools import pairwise
from math import inf

from onbeat.core.step import SchedulerOutput
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config

ROOMY = {"num_blocks": 8192, "max_num_seqs": 64}


class Watch(TimedDriver):
    """Remembers when each step was planned."""

    def __init__(
        self, model: FakeStepTime | None = None, policy: str = "slo", *, depth: int = 1, **changes
    ) -> None:
        super().__init__(make_config(policy, **(ROOMY | changes)), model or FakeStepTime(), depth=depth)
        self.planned_at: list[float] = []

    def check_step(self, scheduled: SchedulerOutput) -> None:
        super().check_step(scheduled)
        self.planned_at.append(self.now)

    def has_kept_gaps(self, request_id: str) -> bool:
        """Whether the first token and 99 % of the gaps were in time."""
        slo = self.requests[request_id].slo
        assert slo is not None
        late = [gap > (slo.tbt or inf) + 1e-9 for gap in self.gaps(request_id)]
        return self.ttft(request_id) <= (slo.ttft or inf) + 1e-9 and sum(late) <= 0.01 * len(late)

    def next_due(self, request_id: str) -> float:
        """Deadline of the next token in `stream` mode."""
        request, times = self.requests[request_id], self.times[request_id]
        slo = request.slo
        assert slo is not None
        due = request.arrival + (slo.ttft or 0.0)
        return max(due, times[0]) + len(times) * (slo.tbt or inf)

    def gaps(self, request_id: str) -> list[float]:
        times = self.times[request_id]
        return [after - before for before, after in pairwise(times)]

    def ttft(self, request_id: str) -> float:
        return self.times[request_id][0] - self.requests[request_id].arrival

    def is_good(self, request_id: str) -> bool:
        """Whether the first token and 99 % of all were in time."""
        if request_id not in self.finished or not self.times[request_id]:
            return False
        late = [lateness > 1e-9 for lateness in self.lateness(request_id)]
        return not late[0] and sum(late) <= 0.01 * len(late)
