"""One replica under a virtual clock: the real scheduler, and a prediction in place of the device."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from math import inf
from typing import Protocol

from onbeat.core.step import BatchShape, SchedulerOutput
from onbeat.core.step_time import StepTimeModel, refuse_prediction
from onbeat.scheduler.replica.scheduler import Scheduler
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

_STEPS_AT_ONCE = 8
"""Steps predicted at a time where an arrival may, but need not, come to this replica."""


class VirtualReplica(Protocol):
    """A replica as the event loop sees it. At an instant the loop calls `end`, then `add`, then `start`."""

    name: str
    """As records carry it."""
    scheduler: Scheduler
    next_time: float
    """When it wants to be called next; infinite while nothing runs."""
    started: list[OfferedRequest]
    """Requests that got their first token in the last `end`, if there is a router to be told."""

    def add(self, offered: OfferedRequest, now: float) -> None:
        """Take a request.

        Raises
        ------
        RequestRejected : as `Scheduler.add`; the replica goes on as if it had not been asked.
        """
        ...

    def interrupt(self, now: float) -> None:
        """Plan anew after the step under way: the scheduler has been told of something."""
        ...

    def end(self, now: float, next_arrival: float) -> list[OfferedRequest]:
        """End what is due; return the requests that ended."""
        ...

    def start(self, now: float, next_arrival: float) -> list[OfferedRequest]:
        """Begin a step, if the replica is free and has work; return requests that have waited in vain."""
        ...

    def counters(self) -> ReplicaCounters:
        """Return what it has done so far."""
        ...


class SerialReplica:
    """A replica that runs one step after the other.

    A run of decode steps in which nothing but token counts changes is taken at once: each step's time is
    predicted, but the scheduler plans and updates only once. A request that arrives meanwhile ends the run
    with the step under way, just as if the steps had been planned one by one.

    Parameters
    ----------
    name : as records carry it.
    observer : hears of steps.
    is_alone : whether every arrival comes to this replica, so that no router asks about it.
    """

    def __init__(
        self,
        name: str,
        config: SimulationConfig,
        step_time: StepTimeModel,
        *,
        observer: SimulationObserver | None = None,
        is_alone: bool = False,
    ) -> None:
        self.name = name
        self.scheduler = make_scheduler(config.replica_scheduler, step_time)
        self.next_time = inf
        self.started: list[OfferedRequest] = []
        self._index = int(name)
        self._model = step_time
        self._overhead = config.host_overhead
        self._noise = make_noise(config.step_noise, seed=config.seed, replica=int(name))
        self._observer = observer
        self._repeats = observer is None or not observer.wants_every_step
        self._tells_first_tokens = not is_alone
        self._lookahead = 1 if is_alone else _STEPS_AT_ONCE
        self._deliveries = Deliveries(name, has_drafts=config.scheduler.speculation is not None)
        self._sampler = make_sampler(config, self._deliveries)
        self._scheduled: SchedulerOutput | None = None
        """The step under way, or the first of the run under way."""
        self._start = 0.0
        self._ends: array[float] = array("d")
        """Ends of the steps of the run, as far as they are predicted."""
        self._num_left = 0
        """Steps that the run may still have beyond those predicted."""
        self._shape = BatchShape()
        """What the device computes in the step under way."""
        self._first_context = 0
        """`decode_context_tokens` of the first step; the shape itself moves on with each prediction."""
        self._num_steps = 0
        self._work = BatchShape()
        self._busy_since = inf
        self._busy_seconds = 0.0
        self._counts = (PlanningCounts(0, 0, 0), PlanningCounts(0, 0, 0))
        """Before and after the step under way was planned."""
        self._predicted: float | None = None
        """What the scheduler's own model expects of the step under way, seconds."""

    def add(self, offered: OfferedRequest, now: float) -> None:
        """Take a request."""
        self.interrupt(now)  # even a refusal changes what a policy expects
        self.scheduler.add(offered.request, now)
        self._deliveries.open(offered)

    def interrupt(self, now: float) -> None:
        """Stop a run under way at the end of its current step."""
        if self._scheduled is not None and (self._num_left or len(self._ends) > 1):
            del self._ends[bisect_left(self._ends, now) + 1 :]
            self._num_left = 0
            self.next_time = self._ends[-1]

    def end(self, now: float, next_arrival: float) -> list[OfferedRequest]:
        """Take the results of the step or run that ends now, or look further ahead in a run that goes on."""
        scheduled = self._scheduled
        if self.started:
            self.started = []
        if scheduled is None or now < self.next_time:
            return []
        if self._num_left:
            self._look_ahead(now, next_arrival)
            return []
        ends, self._scheduled, self.next_time = self._ends, None, inf
        num_steps = len(ends)
        self._num_steps += num_steps
        add_work(self._work, self._shape, first_context=self._first_context, num_steps=num_steps)
        sampled = self._sampler.sample(scheduled, num_steps)
        outputs = self.scheduler.update(scheduled, sampled, now)
        if self._tells_first_tokens and (scheduled.admitted or scheduled.shape.num_chunks):
            self.started = self._deliveries.first(outputs)
        finished = self._deliveries.take(outputs, ends)
        if self._observer is not None:
            self._shape.decode_context_tokens = self._first_context
            stats = step_stats(self.scheduler, scheduled, self._counts, self._start, now)
            if self._predicted is not None:
                stats.predicted_seconds = self._predicted if num_steps == 1 else None
            stats.drafts = draft_stats(scheduled, sampled, outputs)
            if self._observer.wants_every_step:
                stats.scheduler = self.scheduler.state()
            self._observer.on_step(self._index, stats)
        return finished

    def start(self, now: float, next_arrival: float) -> list[OfferedRequest]:
        """Plan the next step and predict when it ends."""
        if self._scheduled is not None:
            return []
        if self._busy_since == inf:
            self._busy_since = now
        if self._observer is None:
            scheduled = plan_step(self.scheduler, now, repeats=self._repeats)
        else:
            before = planning_counts(self.scheduler)
            scheduled = plan_step(self.scheduler, now, repeats=self._repeats)
            self._counts = (before, planning_counts(self.scheduler))
        expired = self._deliveries.expire(self.scheduler.take_expired(), now)
        if scheduled is None:
            self._busy_seconds += now - self._busy_since
            self._busy_since = inf
            return expired
        self._scheduled, self._start = scheduled, now
        self._shape = self._sampler.begin(scheduled)
        self._first_context = self._shape.decode_context_tokens
        self._num_left = self._sampler.max_steps(scheduled)
        self._ends = array("d")
        if self._observer is not None and self.scheduler.step_time_model is not None:
            self._predicted = self.scheduler.step_time_model.step_time(scheduled.shape)
        self._look_ahead(now, next_arrival)
        return expired

    def counters(self) -> ReplicaCounters:
        """Return what the replica has done so far."""
        return count(
            self.scheduler,
            num_steps=self._num_steps,
            busy_seconds=self._busy_seconds,
            work=self._work,
            drafts=self._sampler.counts,
        )

    def _look_ahead(self, end: float, next_arrival: float) -> None:
        """Predict further steps of the run, the first of which starts at `end`.

        It stops at the end of the run, or with the step during which the next request arrives (anywhere).
        """
        shape, step_time = self._shape, self._model.step_time
        overhead, noise = self._overhead, self._noise
        ends, num_left = self._ends, self._num_left
        num_rows = shape.num_lm_head_rows
        num_free = num_left - self._lookahead
        while num_left:
            seconds = step_time(shape)
            if not 0.0 < seconds < inf:
                refuse_prediction(seconds, shape)
            if noise is not None:
                seconds *= noise.factor(self._num_steps + len(ends))
            end = end + (seconds + overhead)
            ends.append(end)
            num_left -= 1
            if num_left:  # else the scheduler, which learns from this step, finds it as it planned it
                shape.decode_context_tokens += num_rows  # of the step after this one
            if end >= next_arrival and num_left <= num_free:
                break
        self._num_left = num_left
        self.next_time = end
