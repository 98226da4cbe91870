"""The step loop: plan, run, take the results."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from onbeat.core.errors import EngineDead, Overloaded, SLOUnattainable
from onbeat.core.fleet import ReplicaLoad
from onbeat.core.protocols import EnginePulse, StepOutputs
from onbeat.core.request import Request, RequestOutput
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.core.step_stats import StepStats
from onbeat.engine.executor import ThreadExecutor
from onbeat.engine.grammar_port import GrammarPort
from onbeat.engine.kv_access import BlockMemory, KVLayout
from onbeat.engine.kv_handover import KVHandover, KVTransfers
from onbeat.engine.kv_transfer import TcpTransport
from onbeat.recording.writer import RecordWriter
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.replica.step_report import Planned, StepReporter

logger = logging.getLogger("onbeat.engine")


@dataclass(slots=True)
class _StepInFlight:
    scheduled: SchedulerOutput
    future: Future[ModelRunnerOutput]
    start: float
    predicted_seconds: float | None
    schedule_seconds: float
    planned: Planned


LONG_STEP_SECONDS = 0.02
"""Of a step whose end is worth a message of its own to whoever chooses between replicas."""


class EngineCore:
    """One replica: a scheduler, an executor and a clock.

    Parameters
    ----------
    scheduler, executor : who plans and who runs.
    max_in_flight_steps : steps launched before the oldest is waited for; 1 is synchronous, 2 hides the
        host's work behind the device. The loop is the same.
    clock : seconds; the same clock stamps `Request.arrival`.
    recorder : told of every call of the scheduler, in their order; closed at shutdown.
    idle_work : what there is to do while nothing runs: called over and over, returns whether it did anything.
    judge : looks at every step that ran, once the step-time model has been told; may set what it finds there.
    reports_load : whether messages say how the engine stands (`StepOutputs.load`), for a fleet.
    kv_memory : gives access to the KV, for `open_kv`; None where no other engine could copy it.
    grammars : compiles grammars; closed at shutdown.

    Attributes
    ----------
    kv : the hand-over of KV, once it is open.
    """

    def __init__(  # noqa: PLR0913 -- what it plans with and runs on, and who looks on
        self,
        scheduler: Scheduler,
        executor: ThreadExecutor,
        *,
        max_in_flight_steps: int = 1,
        clock: Callable[[], float] = time.monotonic,
        recorder: RecordWriter | None = None,
        idle_work: Callable[[], bool] = lambda: False,
        judge: Callable[[StepStats], None] | None = None,
        reports_load: bool = False,
        kv_memory: Callable[[], BlockMemory] | None = None,
        grammars: GrammarPort | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._max_in_flight_steps = max_in_flight_steps
        self._clock = clock
        self._recorder = recorder
        self._idle_work = idle_work
        self._reporter = StepReporter(scheduler)
        self._judge = judge
        self._reports_load = reports_load
        self._in_flight: deque[_StepInFlight] = deque()
        self._expired: list[RequestOutput] = []
        self._last_end = 0.0
        self._is_busy_for_long = False
        self._kv_memory = kv_memory
        self.grammars = grammars or GrammarPort()
        self.kv: KVHandover | None = None

    @property
    def kv_layout(self) -> KVLayout | None:
        """What the bytes of its KV depend on; None where no other engine could copy it."""
        return None if self._kv_memory is None else self._kv_memory().layout

    def open_kv(self, transport: TcpTransport) -> None:
        """Lend KV to other engines until the shutdown, and take theirs; without effect where that cannot be.

        Raises
        ------
        OSError : nobody can listen at the transport's address.
        """
        if self._kv_memory is None or self.kv is not None:
            return
        self.kv = KVHandover(
            self.scheduler,
            KVTransfers(self._kv_memory(), transport),
            clock=self._clock,
            recorder=self._recorder,
            newest_step=self._newest_step,
            is_serial=self._max_in_flight_steps == 1,
        )

    def _newest_step(self) -> Future[ModelRunnerOutput] | None:
        return self._in_flight[-1].future if self._in_flight else None

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.num_unfinished > 0

    @property
    def waits_for_others(self) -> bool:
        """Whether no step may run until others have done their part: KV or room is to come, or a fetch."""
        return not self._in_flight and (self.kv is not None or self.scheduler.waits_for_fetches)

    @property
    def has_room(self) -> bool:
        """Whether another step may be launched before the oldest has come back."""
        return len(self._in_flight) < self._max_in_flight_steps

    @property
    def oldest_step(self) -> Future[ModelRunnerOutput] | None:
        """What `collect` would wait for; None where no step is under way."""
        return self._in_flight[0].future if self._in_flight else None

    def pulse(self) -> EnginePulse:
        """Return a sign of life."""
        now = self._clock()
        if not self._in_flight:
            return EnginePulse(now)
        oldest = self._in_flight[0]
        return EnginePulse(now, self._begin(oldest), oldest.predicted_seconds)

    def _begin(self, step: _StepInFlight) -> float:
        """Return when the oldest step under way began to run: steps run one after another."""
        return max(step.start, self._last_end)

    def add(self, request: Request) -> None:
        """Queue a request; steps may be under way.

        Raises
        ------
        RequestRejected : as `Scheduler.add`; or the engine has not got its LoRA adapter.
        """
        adapter = request.adapter
        if adapter is not None and adapter.number not in self.executor.adapters:
            raise Overloaded(
                f"the LoRA adapter {adapter.name!r} is not loaded on this replica; see the server's log",
                code="adapter_not_loaded",
                reason="no_replica",
            )
        now = self._clock()
        try:
            self.scheduler.add(request, now)
        except (Overloaded, SLOUnattainable) as error:
            if self._recorder is not None:
                self._recorder.add(request, now, refusal=error)
            raise
        if self._recorder is not None:
            self._recorder.add(request, now, refusal=None)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Drop requests; their blocks are free for the next step. Steps may be under way."""
        request_ids = tuple(request_ids)
        if self.kv is not None:
            self.kv.on_abort(request_ids)
        outputs = self.scheduler.abort(request_ids)
        if self._recorder is not None:
            self._recorder.abort(request_ids, self._clock())
        return outputs

    def on_fetched(self, num_fetched: Mapping[str, int]) -> None:
        """Hear how much output of requests has been fetched; steps may be under way."""
        now = self._clock()
        self.scheduler.on_fetched(num_fetched, now)
        if self._recorder is not None:
            for request_id, num_tokens in num_fetched.items():
                self._recorder.handover("fetched", request_id, now, num_tokens=num_tokens)

    def step(self) -> StepOutputs | None:
        """Launch the next step; collect the oldest one once `max_in_flight_steps` run or no more can.

        The synchronous loop: who takes messages meanwhile calls `launch`, `take_news` and `collect`.
        """
        launched = self.launch()
        if (news := self.take_news()) is not None:
            return news
        if not self._in_flight or (launched and self.has_room):
            return None
        return self.collect()

    def take_news(self) -> StepOutputs | None:
        """Return what cannot wait for the end of the step just launched; None where there is nothing.

        That is the last outputs of requests that were ended in the queue, and how the engine stands with a
        step that is long: with the results of the step before it is not known how long the next one takes.
        """
        expired, self._expired = self._expired, []
        is_long, self._is_busy_for_long = self._is_busy_for_long, False
        return self.message(expired) if expired or is_long else None

    def message(self, outputs: list[RequestOutput]) -> StepOutputs:
        """Return what clients are told between steps."""
        now = self._clock()
        return StepOutputs(now, outputs, load=self._load(now))

    def take_load(self) -> StepOutputs | None:
        """Return a message that says how the engine stands, if any does and no step will soon."""
        return self.message([]) if self._reports_load and not self.has_work else None

    def _load(self, now: float) -> ReplicaLoad | None:
        if not self._reports_load:
            return None
        busy = 0.0
        if self._in_flight:
            seconds = [step.predicted_seconds or 0.0 for step in self._in_flight]
            busy = max(self._begin(self._in_flight[0]) + seconds[0] - now, 0.0) + sum(seconds[1:])
        return self.scheduler.load(now, busy=busy)

    def do_idle_work(self) -> bool:
        """Use a moment without work; return whether there was something to do. No step may be under way."""
        if self.kv is not None:
            self.kv.tend()
            if self.kv.is_pulling:
                return False  # it may write to the very memory that a copy goes to
        return self._idle_work()

    def shutdown(self) -> None:
        """Wait for steps in flight and let the executor go."""
        if self.kv is not None:
            self.kv.close()
        self.executor.shutdown()
        self.grammars.close()
        if self._recorder is not None:
            self._recorder.close()

    def launch(self) -> bool:
        """Plan the next step and start it; return whether there is one, and room for it."""
        if not self.has_room:
            return False
        if self.kv is not None:
            self.kv.tend()
        scheduler = self.scheduler
        start = self._clock()
        scheduled = scheduler.schedule(start)
        expired = scheduler.planner.take_expired()
        self._expired += expired
        planned = self._reporter.take_planned()
        predicted_seconds = None
        if self.kv is not None:
            self.kv.on_launch()
        if scheduled is not None:
            end = self._clock()
            future = self.executor.submit(scheduled)
            if scheduler.step_time_model is not None:
                predicted_seconds = scheduler.step_time_model.step_time(scheduled.shape)
                self._is_busy_for_long = self._reports_load and predicted_seconds >= LONG_STEP_SECONDS
            self._in_flight.append(
                _StepInFlight(scheduled, future, end, predicted_seconds, end - start, planned)
            )
        if self._recorder is not None:  # the step runs meanwhile
            self._recorder.schedule(
                scheduled,
                start,
                num_preempted=planned.num_preemptions,
                predicted_seconds=predicted_seconds,
                expired=expired,
            )
        return scheduled is not None

    def collect(self) -> StepOutputs:
        """Wait for the oldest step and take its results.

        Raises
        ------
        EngineDead : no step can run any more; this one's requests are gone.
        """
        step = self._in_flight.popleft()
        try:
            result = step.future.result()
        except EngineDead as error:
            self.scheduler.update(step.scheduled, _failed_step(step.scheduled, str(error)), self._clock())
            raise
        except Exception as error:
            # The outermost loop of the engine: the requests of this step fail, the server goes on.
            logger.exception("step %d failed", step.scheduled.step_id)
            message = f"the engine failed on this step: {type(error).__name__}: {error}"
            result = _failed_step(step.scheduled, message)
        now = self._clock()
        outputs = self.scheduler.update(step.scheduled, result, now)
        update_seconds = self._clock() - now
        stats = self._reporter.stats(step.scheduled, step.planned, start=self._begin(step), end=now)
        stats.schedule_seconds, stats.update_seconds = step.schedule_seconds, update_seconds
        stats.predicted_seconds = step.predicted_seconds
        if (guided := result.guided) is not None:
            stats.num_guided_tokens, stats.num_redrawn_tokens = guided.num_tokens, guided.num_redrawn
            stats.guide_seconds, stats.num_guide_faults = guided.seconds, len(guided.faults)
        stats.compile_seconds = self.grammars.take_seconds()
        if self._judge is not None:
            self._judge(stats)
        self._last_end = now
        if self._recorder is not None:
            seconds = stats.end - stats.start
            self._recorder.update(step.scheduled, result, outputs, now=now, seconds=seconds)
        return StepOutputs(now, outputs, stats, self._load(now))


def _failed_step(scheduled: SchedulerOutput, message: str) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        [[] for row in scheduled.rows if row.samples],
        failed={row.request_id: message for row in scheduled.rows},
    )
