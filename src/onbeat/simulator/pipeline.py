"""A replica with pipeline stages under a virtual clock."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from math import inf

from onbeat.core.step import BatchShape, SchedulerOutput
from onbeat.core.step_time import StepTimeModel, predict_step
from onbeat.scheduler.replica.speculation.stats import draft_stats
from onbeat.simulator.client import OfferedRequest
from onbeat.simulator.config import SimulationConfig
from onbeat.simulator.deliveries import Deliveries
from onbeat.simulator.observer import SimulationObserver
from onbeat.simulator.planning import make_scheduler, plan_step
from onbeat.simulator.result import ReplicaCounters
from onbeat.simulator.sampling import make_sampler
from onbeat.simulator.stats import PlanningCounts, add_work, count, planning_counts, step_stats
from onbeat.simulator.step_noise import make_noise


@dataclass(slots=True)
class _MicroBatch:
    scheduled: SchedulerOutput
    shape: BatchShape
    """What the device computes."""
    counts: tuple[PlanningCounts, PlanningCounts]
    start: float
    end: float
    predicted: float | None
    """What the scheduler's own model expects, seconds."""


class PipelineReplica:
    """A replica whose steps pass through stages, one micro-batch in each.

    A micro-batch ends a stage at `max(end of its stage before, end of the micro-batch ahead in this stage)`
    plus its equal share of the step time; the next one is planned when the first stage is free and fewer are
    under way than there are stages. Micro-batches of unequal time leave stages idle: pipeline bubbles
    (Sarathi-Serve, OSDI 2024, section 3.3). The host's time for a step holds up the first stage.
    """

    def __init__(
        self,
        name: str,
        config: SimulationConfig,
        step_time: StepTimeModel,
        *,
        observer: SimulationObserver | None = None,
    ) -> None:
        self.name = name
        self.scheduler = make_scheduler(config.replica_scheduler, step_time)
        self.next_time = inf
        self.started: list[OfferedRequest] = []
        self._index = int(name)
        self._num_stages = config.pipeline
        self._model = step_time
        self._overhead = config.host_overhead
        self._noise = make_noise(config.step_noise, seed=config.seed, replica=int(name))
        self._observer = observer
        self._deliveries = Deliveries(name, has_drafts=config.scheduler.speculation is not None)
        self._sampler = make_sampler(config, self._deliveries)
        self._under_way: deque[_MicroBatch] = deque()
        self._free_at = [0.0] * config.pipeline
        """When each stage ends its last micro-batch."""
        self._num_steps = 0
        self._work = BatchShape()
        self._busy_since = inf
        self._busy_seconds = 0.0
        self._stage_seconds = 0.0

    def add(self, offered: OfferedRequest, now: float) -> None:
        """Take a request; micro-batches under way go on as they are."""
        self.scheduler.add(offered.request, now)
        self._deliveries.open(offered)

    def interrupt(self, now: float) -> None:
        """Do nothing: each micro-batch is planned anew."""

    def end(self, now: float, next_arrival: float) -> list[OfferedRequest]:  # noqa: ARG002 (nothing is ahead)
        """Take the results of the micro-batches that leave the last stage now."""
        finished: list[OfferedRequest] = []
        self.started = []
        while self._under_way and self._under_way[0].end <= now:
            finished += self._end_oldest()
        if not self._under_way and self._busy_since != inf:
            self._busy_seconds += now - self._busy_since
            self._busy_since = inf
        return finished

    def start(self, now: float, next_arrival: float) -> list[OfferedRequest]:  # noqa: ARG002
        """Plan the next micro-batch, if the first stage is free."""
        if len(self._under_way) < self._num_stages and self._free_at[0] <= now:
            before = planning_counts(self.scheduler)
            scheduled = plan_step(self.scheduler, now)
            if scheduled is not None:
                counts = (before, planning_counts(self.scheduler))
                self._under_way.append(self._run(scheduled, counts, now))
                if self._busy_since == inf:
                    self._busy_since = now
        self.next_time = self._find_next(now)
        return self._deliveries.expire(self.scheduler.take_expired(), now)

    def counters(self) -> ReplicaCounters:
        """Return what the replica has done so far."""
        counters = count(
            self.scheduler,
            num_steps=self._num_steps,
            busy_seconds=self._busy_seconds,
            work=self._work,
            drafts=self._sampler.counts,
        )
        if not self._under_way:
            counters.bubble_seconds = self._num_stages * self._busy_seconds - self._stage_seconds
        return counters

    def _run(
        self, scheduled: SchedulerOutput, counts: tuple[PlanningCounts, PlanningCounts], now: float
    ) -> _MicroBatch:
        """Send a micro-batch through the stages, and find out when it leaves the last."""
        shape = self._sampler.begin(scheduled)
        seconds = predict_step(self._model, shape) / self._num_stages
        if self._noise is not None:
            seconds *= self._noise.factor(self._num_steps + len(self._under_way))
        end = now + self._overhead
        for stage, free_at in enumerate(self._free_at):
            end = max(end, free_at) + seconds
            self._free_at[stage] = end
        self._stage_seconds += seconds * self._num_stages
        predicted = None
        if self.scheduler.step_time_model is not None:
            predicted = self.scheduler.step_time_model.step_time(scheduled.shape)
        return _MicroBatch(scheduled, shape, counts, now, end, predicted)

    def _end_oldest(self) -> list[OfferedRequest]:
        batch = self._under_way.popleft()
        scheduled = batch.scheduled
        self._num_steps += 1
        context = batch.shape.decode_context_tokens
        add_work(self._work, batch.shape, first_context=context, num_steps=1)
        sampled = self._sampler.sample(scheduled, 1)
        outputs = self.scheduler.update(scheduled, sampled, batch.end)
        self.started += self._deliveries.first(outputs)
        finished = self._deliveries.take(outputs, array("d", [batch.end]))
        if self._observer is not None:
            stats = step_stats(self.scheduler, scheduled, batch.counts, batch.start, batch.end)
            if batch.predicted is not None:
                stats.predicted_seconds = batch.predicted
            stats.drafts = draft_stats(scheduled, sampled, outputs)
            if self._observer.wants_every_step:
                stats.scheduler = self.scheduler.state()
            self._observer.on_step(self._index, stats)
        return finished

    def _find_next(self, now: float) -> float:
        """Return when the oldest micro-batch ends, or the first stage is free for another."""
        if not self._under_way:
            return inf
        oldest, free_at = self._under_way[0].end, self._free_at[0]
        if len(self._under_way) < self._num_stages and now < free_at:
            return min(oldest, free_at)
        return oldest
