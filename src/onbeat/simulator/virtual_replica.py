"""A replica under a virtual clock: the real scheduler, what samples for its device, and what is counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from onbeat.core.fleet import ReplicaLoad
from onbeat.core.handover import Detached
from onbeat.core.step import BatchShape, SchedulerOutput
from onbeat.perfmodel.shapes import LargestStep, ShapeRange
from onbeat.scheduler.replica.lockstep import Lockstep
from onbeat.scheduler.replica.policies import composition
from onbeat.scheduler.replica.steady import SteadyRun, begin_lockstep, begin_run
from onbeat.scheduler.replica.step_report import Planned, StepReporter
from onbeat.simulator.deliveries import ORDINARY, Deliveries, VerifyingSampler, make_sampler
from onbeat.simulator.result import ReplicaCounters, SimulationObserver
from onbeat.simulator.simulation_config import ReplicaKind, SimulationConfig, StepNoise, make_scheduler
from onbeat.simulator.virtual_clients import OfferedRequest


@dataclass(slots=True)
class StepUnderWay:
    """A step that was planned, or the first of a run of steps that differ in token counts alone."""

    scheduled: SchedulerOutput
    shape: BatchShape
    """What the device computes."""
    run: SteadyRun | Lockstep | None
    """What the step may go on as."""
    start: float
    planned: Planned | None
    """What its planning did, if anybody hears of it."""
    predicted: float | None
    """What the scheduler's own model expects, seconds; likewise."""


class Around(NamedTuple):
    """Who is around a replica."""

    observer: SimulationObserver | None = None
    """Hears of steps, if it wants to."""
    is_alone: bool = False
    """Whether every arrival comes to this replica, so that no router asks about it."""
    is_watched: bool = False
    """Whether somebody asks for its load after each step."""
    looks_at_streams: bool = False
    """Whether somebody takes requests from it that run, or wants to know of single ones."""


class VirtualReplica(ABC):
    """A replica as the event loop sees it. At an instant the loop calls `end`, then `add`, then `start`.

    It has a scheduler, what samples tokens in place of its device, and what is written and counted of both.
    Kinds of replicas ask it for steps and say when they end.

    Parameters
    ----------
    name : as records carry it, and the replica's number.
    kind : what it is.
    """

    def __init__(self, name: str, config: SimulationConfig, kind: ReplicaKind, around: Around) -> None:
        self.name = name
        limits, step_time = kind.scheduler, kind.step_time
        self.scheduler = make_scheduler(limits, step_time, predicts=config.reads_predictions)
        self.next_time = inf
        """When it wants to be called next; infinite while nothing runs."""
        self.started: list[OfferedRequest] = []
        """Requests that got their first token in the last `end`, if there is a router to be told."""
        self.has_news = True
        """Whether it has changed in more than token counts since somebody took note of that."""
        self._num_waiting = 0
        """When it planned last."""
        self._model = step_time
        self._overhead = config.host_overhead
        self._charged = 0.0
        """Seconds by which the next step takes longer."""
        self._index = number = int(name)
        sigma = config.step_noise
        self._noise = StepNoise(sigma, seed=config.seed, replica=number) if sigma else None
        self._deliveries = Deliveries(name, has_drafts=limits.speculation is not None)
        self._sampler = make_sampler(config, limits, self._deliveries)
        self._counted = ReplicaCounters()
        """Of the steps that have ended."""
        observer, self._is_alone, self._is_watched, looks_at_streams = around
        self._observer = observer if observer is not None and observer.wants_steps else None
        self._reporter = None if self._observer is None else StepReporter(self.scheduler)
        self._writes_times = limits.speculation is None
        self._may_stop = config.declared_max_tokens is not None
        known = composition(limits.policy)
        self.scheduler.table.makes_rows = (
            not self._writes_times or self._may_stop or known.holds_finished or bool(limits.num_snapshots)
        )
        if not looks_at_streams and self._observer is None:
            begin_lockstep(self.scheduler, ORDINARY)
        self._measured: ShapeRange | None = getattr(step_time, "shape_range", None)
        self._largest = None if self._measured is None else LargestStep()
        self._busy_since = inf
        """Since when it runs steps; infinite while it is idle."""

    @abstractmethod
    def add(self, offered: OfferedRequest, now: float) -> None:
        """Take a request.

        Raises
        ------
        RequestRejected : as `Scheduler.add`; the replica goes on as if it had not been asked.
        """

    @abstractmethod
    def interrupt(self, now: float) -> None:
        """Plan anew after the step under way: the scheduler has been told of something."""

    @abstractmethod
    def end(self, now: float) -> list[OfferedRequest]:
        """End what is due; return the requests that ended."""

    @abstractmethod
    def start(self, now: float, next_arrival: float) -> list[OfferedRequest]:
        """Begin a step, if the replica is free and has work; return requests that have waited in vain."""

    @abstractmethod
    def load(self, now: float) -> ReplicaLoad:
        """Return how it stands after `start`, for whoever shares requests out."""

    @abstractmethod
    def settle(self, now: float) -> None:
        """Let the scheduler see all that has been computed by now, and plan anew after the step under way."""

    def withdraw(self, request_id: str, now: float) -> None:
        """Let go of a request with the tokens that it has got by now."""
        self.settle(now)
        self._deliveries.drop(request_id)
        self.scheduler.abort((request_id,))
        self.has_news = True

    def adopt(self, handover_id: str, offered: OfferedRequest, detached: Detached, now: float) -> None:
        """Go on with a request that has come with its KV, after `settle`.

        Raises
        ------
        RequestRejected : as `Handovers.adopt`; then nothing has changed.
        """
        record = offered.record
        request = detached.moved(offered.request)
        if record.delivery_times:
            request = replace(request, first_token_time=record.delivery_times[0])
        self.scheduler.handover.adopt(handover_id, request, detached, now)
        self._open(offered, is_moved=True)

    def let_go(self, request_id: str) -> None:
        """Forget a request that another replica has adopted."""
        self._deliveries.drop(request_id)
        self.scheduler.handover.free(request_id)

    def charge(self, seconds: float) -> None:
        """Let the next step take longer."""
        self._charged += seconds

    def abandon(self, now: float) -> list[OfferedRequest]:
        """Die; return the requests that had not ended, with the tokens that they had got by now."""
        self.settle(now)
        self._end_work(now)
        self.next_time = inf
        return self._deliveries.open_requests

    def counters(self) -> ReplicaCounters:
        """Return what the replica has done so far."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        largest, measured = self._largest, self._measured
        return replace(
            self._counted,
            num_preemptions=scheduler.table.num_preemptions,
            num_prefix_queries=scheduler.table.num_prefix_queries,
            num_prefix_hits=scheduler.table.num_prefix_hits,
            num_blocks=pool.num_blocks,
            peak_used_blocks=pool.peak_used_blocks,
            num_leaked_blocks=pool.num_used_blocks if scheduler.num_unfinished == 0 else 0,
            drafts=self._sampler.counts,
            beyond={} if largest is None or measured is None else largest.beyond(measured),
        )

    # --- for the kinds of replicas --------------------------------------------------------------------

    def _take(self, offered: OfferedRequest, now: float) -> None:
        """Let the scheduler have a request; raises `RequestRejected` as `Scheduler.add`."""
        self.scheduler.add(offered.request, now)
        self._open(offered)

    def _open(self, offered: OfferedRequest, *, is_moved: bool = False) -> None:
        """Write for a request from now on."""
        self._deliveries.open(offered, is_moved=is_moved)
        if self._writes_times:
            self.scheduler.table.states[offered.request.request_id].times = offered.record.delivery_times

    def _plan(self, now: float, *, may_run_on: bool = False) -> StepUnderWay | None:
        """Plan a step; None where nothing can run before something else happens.

        Parameters
        ----------
        may_run_on : look whether it is the first of a steady run.
        """
        table = self.scheduler.table
        scheduled = None if table.lockstep is None else table.lockstep.plan(now)
        while table.states and scheduled is None:
            before = table.num_preemptions, len(table.states)
            scheduled = self.scheduler.schedule(now)
            # It plans nothing too where it only preempted requests or ended some: the next plan is another.
            if scheduled is None and before == (table.num_preemptions, len(table.states)):
                break
        if scheduled is None:
            return None
        shape = scheduled.shape
        if isinstance(self._sampler, VerifyingSampler):
            shape = self._sampler.begin(scheduled)
        num_before, self._num_waiting = self._num_waiting, table.waiting.length
        self.has_news = self.has_news or bool(
            shape.num_chunks
            or scheduled.admitted
            or scheduled.released_ids
            or num_before != self._num_waiting
            or not self.scheduler.policy.composer.steady_limit(table.running, table.waiting)
        )
        planned = predicted = None
        if self._reporter is not None:
            planned, model = self._reporter.take_planned(), self.scheduler.step_time_model
            predicted = None if model is None else model.step_time(scheduled.shape)
        run = begin_run(self.scheduler, scheduled, ORDINARY) if may_run_on and not shape.num_chunks else None
        if run is not None and self._may_stop:
            num_left = self._deliveries.num_left
            left = [num_left(row.request_id) for row in scheduled.rows if row.samples]
            run.max_steps = min(run.max_steps, *left)
        return StepUnderWay(scheduled, shape, run, now, planned, predicted)

    def _expire(self, now: float) -> list[OfferedRequest]:
        """Return the requests that the last plan has ended."""
        expired = self._deliveries.expire(self.scheduler.planner.take_expired(), now)
        self.has_news = self.has_news or bool(expired)
        return expired

    def _end_step(
        self, step: StepUnderWay, ends: array[float], started: list[OfferedRequest] | None
    ) -> list[OfferedRequest]:
        """Take the results of a step, or of a run of them; return the requests that ended.

        Parameters
        ----------
        ends : when each step of the run ended, seconds.
        started : gets the requests that have their first token now; None where nobody is told.
        """
        scheduled, run = step.scheduled, step.run
        self._counted.count(step.shape, len(ends), self._largest)
        if run is not None and len(ends) > 1:
            run.advance(ends[:-1])
        now = ends[-1]
        outputs = self.scheduler.update(scheduled, self._sampler.sample(scheduled), now)
        # The last token of a prompt, alone in its chunk, looks like a decode; it is in no run.
        if started is not None and step.run is None:
            started += self._deliveries.first(outputs)
        finished = self._deliveries.take(outputs, now) if outputs else []
        self.has_news = self.has_news or bool(outputs or step.shape.num_chunks)
        if self._observer is not None and self._reporter is not None and step.planned is not None:
            stats = self._reporter.stats(scheduled, step.planned, start=step.start, end=now)
            # Where nothing learns, the device takes what is predicted.
            stats.predicted_seconds = now - step.start if step.predicted is None else step.predicted
            self._observer.on_step(self._index, stats)
        return finished

    def _end_work(self, now: float) -> None:
        """Count as idle from now on."""
        if self._busy_since != inf:
            self._counted.busy_seconds += now - self._busy_since
            self._busy_since = inf
