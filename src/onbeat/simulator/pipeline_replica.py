"""A replica with pipeline stages under a virtual clock."""

from __future__ import annotations

from array import array
from collections import deque
from math import inf

from onbeat.core.fleet import ReplicaLoad
from onbeat.core.step_time import predict_step
from onbeat.simulator.result import ReplicaCounters
from onbeat.simulator.simulation_config import ReplicaKind, SimulationConfig
from onbeat.simulator.virtual_clients import OfferedRequest
from onbeat.simulator.virtual_replica import Around, StepUnderWay, VirtualReplica


class PipelineReplica(VirtualReplica):
    """A replica whose steps pass through stages, one micro-batch in each.

    A micro-batch ends a stage at `max(end of its stage before, end of the micro-batch ahead in this stage)`
    plus its equal share of the step time; the next one is planned when the first stage is free and fewer are
    under way than there are stages. Micro-batches of unequal time leave stages idle: pipeline bubbles
    (Sarathi-Serve, OSDI 2024, section 3.3). The host's time for a step holds up the first stage.
    """

    def __init__(self, name: str, config: SimulationConfig, kind: ReplicaKind, around: Around) -> None:
        super().__init__(name, config, kind, around)
        self._num_stages = kind.scheduler.num_micro_batches
        self._under_way: deque[tuple[StepUnderWay, float]] = deque()
        """Micro-batches, and when they leave the last stage."""
        self._free_at = [0.0] * self._num_stages
        """When each stage ends its last micro-batch."""
        self._stage_seconds = 0.0

    def add(self, offered: OfferedRequest, now: float) -> None:
        """Take a request; micro-batches under way go on as they are."""
        self._take(offered, now)

    def interrupt(self, now: float) -> None:
        """Do nothing: each micro-batch is planned anew."""

    def end(self, now: float) -> list[OfferedRequest]:
        """Take the results of the micro-batches that leave the last stage now."""
        finished: list[OfferedRequest] = []
        self.started = []
        while self._under_way and self._under_way[0][1] <= now:
            step, end = self._under_way.popleft()
            finished += self._end_step(step, array("d", [end]), self.started)
        if not self._under_way:
            self._end_work(now)
        return finished

    def start(self, now: float, next_arrival: float) -> list[OfferedRequest]:  # noqa: ARG002
        """Plan the next micro-batch, if the first stage is free."""
        if len(self._under_way) < self._num_stages and self._free_at[0] <= now:
            step = self._plan(now)
            if step is not None:
                self._under_way.append((step, self._run(step, now)))
                self._busy_since = min(self._busy_since, now)
        self.next_time = self._find_next(now)
        return self._expire(now)

    def load(self, now: float) -> ReplicaLoad:
        """Return how it stands; it is busy while its first stage is taken."""
        busy = max(0.0, self._free_at[0] - now) if self._under_way else 0.0
        return self.scheduler.load(now, busy=busy)

    def settle(self, now: float) -> None:
        """Do nothing: the scheduler sees each micro-batch as it ends."""

    def counters(self) -> ReplicaCounters:
        """Return what the replica has done so far."""
        counters = super().counters()
        if not self._under_way:
            counters.bubble_seconds = self._num_stages * counters.busy_seconds - self._stage_seconds
        return counters

    def _run(self, step: StepUnderWay, now: float) -> float:
        """Send a micro-batch through the stages; return when it leaves the last."""
        seconds = predict_step(self._model, step.shape) / self._num_stages
        if self._noise is not None:
            seconds *= self._noise.factor(self._counted.num_steps + len(self._under_way))
        end = now + self._overhead + self._charged
        self._charged = 0.0
        for stage, free_at in enumerate(self._free_at):
            end = max(end, free_at) + seconds
            self._free_at[stage] = end
        self._stage_seconds += seconds * self._num_stages
        return end

    def _find_next(self, now: float) -> float:
        """Return when the oldest micro-batch ends, or the first stage is free for another."""
        if not self._under_way:
            return inf
        oldest, free_at = self._under_way[0][1], self._free_at[0]
        if len(self._under_way) < self._num_stages and now < free_at:
            return min(oldest, free_at)
        return oldest
