"""One replica under a virtual clock: the real scheduler, and a prediction in place of the device."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from onbeat.core.errors import RequestRejected
from onbeat.core.fleet import ReplicaLoad
from onbeat.core.step import BatchShape
from onbeat.core.step_time import refuse_prediction
from onbeat.scheduler.replica.steady import SteadyRun
from onbeat.simulator.deliveries import refuse
from onbeat.simulator.pipeline_replica import PipelineReplica
from onbeat.simulator.simulation_config import ReplicaKind, SimulationConfig
from onbeat.simulator.virtual_clients import OfferedRequest
from onbeat.simulator.virtual_replica import Around, StepUnderWay, VirtualReplica

_LOOKAHEAD = 31
"""Steps predicted beyond the next arrival where that may, but need not, come to this replica."""
_STEPS_AT_ONCE = 32
"""Steps predicted at a time: to predict some in vain costs less than to ask again."""


class SerialReplica(VirtualReplica):
    """A replica that runs one step after the other.

    A run of decode steps in which nothing but token counts changes is taken at once: each step's time is
    predicted, but the scheduler plans and updates only once. A request that arrives meanwhile ends the run
    with the step under way, just as if the steps had been planned one by one.

    An engine that plans a step ahead has planned the next one when the step under way began, and so does not
    see what came since: such requests are held until the step after the next is planned, or nothing else is
    there to run. One that comes as a step ends has missed the plan of that instant, too.

    """

    def __init__(self, name: str, config: SimulationConfig, kind: ReplicaKind, around: Around) -> None:
        super().__init__(name, config, kind, around)
        self._step_times = kind.step_time.step_times
        self._learns = self.scheduler.step_time_model is not None
        self._step: StepUnderWay | None = None
        """The step under way, or the first of the run under way."""
        self._shape = BatchShape()
        """Of the step of the run that is to be predicted next."""
        self._ends: array[float] = array("d")
        """Ends of the steps of the run, as far as they are predicted."""
        self._num_left = 0
        """Steps that the run may still have beyond those predicted."""
        self._plans_ahead = config.steps_ahead > 0
        self._held: list[tuple[float, OfferedRequest]] = []
        """Requests that no plan has seen, and when they came."""
        self._last_step = (-inf, -inf)
        """Start and end of the last step that has ended."""

    def add(self, offered: OfferedRequest, now: float) -> None:
        """Take a request."""
        self.interrupt(now)  # even a refusal changes what a policy expects
        if self._plans_ahead and (self._step is not None or self._last_step[1] == now):
            self._held.append((now, offered))
        else:
            self._take(offered, now)

    def interrupt(self, now: float) -> None:
        """Stop a run under way at the end of its current step."""
        step, ends = self._step, self._ends
        if step is None or not (self._num_left or len(ends) > 1):
            return
        del ends[bisect_left(ends, now) + 1 :]
        self._num_left = 0
        self.next_time = ends[-1] if ends else now
        if self._learns:
            self._catch_up(step, now)

    def _catch_up(self, step: StepUnderWay, now: float) -> None:
        """Let the scheduler see what the steps of a run have brought by now."""
        # One that was cut at this very instant has ended; nobody ends before the end of a run.
        if self._ends[-1] <= now:
            self._finish(step, None)
        elif num_ended := bisect_right(self._ends, now):
            self._advance(step, num_ended)

    def end(self, now: float) -> list[OfferedRequest]:
        """Take the results of the step or run that ends now."""
        step = self._step
        self.started = []
        if step is None or now < self.next_time or self._num_left:
            return []
        return self._finish(step, None if self._is_alone else self.started)

    def _finish(self, step: StepUnderWay, started: list[OfferedRequest] | None) -> list[OfferedRequest]:
        """Take the results of a step or run that has ended; see `_end_step`."""
        ends = self._ends
        self._step, self.next_time = None, inf
        if self._plans_ahead:
            self._last_step = (ends[-2] if len(ends) > 1 else step.start, ends[-1])
        return self._end_step(step, ends, started)

    def start(self, now: float, next_arrival: float) -> list[OfferedRequest]:
        """Plan the next step and predict when it ends, or look further ahead in a run that goes on."""
        if self._step is not None:
            if self._num_left and self.next_time <= now:
                self._look_ahead(self._step, now, next_arrival)
            return []
        self._busy_since = min(self._busy_since, now)
        refused = self._admit(now, came_before=self._last_step[0]) if self._held else []
        step = self._step = self._plan(now, may_run_on=self._observer is None and not self._held)
        if step is None and self._held:
            refused += self._admit(now, came_before=inf)
            step = self._step = self._plan(now, may_run_on=self._observer is None)
        if self.scheduler.planner.expired:
            refused = self._expire(now) + refused
        if step is None:
            self._end_work(now)
        else:
            self._num_left, self._shape = 1, step.shape
            if step.run is not None:
                self._num_left, self._shape = step.run.max_steps, step.shape.copy()
            self._ends = array("d")
            # Another may come at once in place of those who have ended.
            self._look_ahead(step, now + self._charged, now if refused else next_arrival)
            self._charged = 0.0
        return refused

    def _admit(self, now: float, *, came_before: float) -> list[OfferedRequest]:
        """Let the scheduler see held requests that came before a time; return those that it refuses."""
        refused = []
        for when, offered in self._held:
            if when < came_before:
                try:
                    self._take(offered, now)
                except RequestRejected as error:
                    refuse(offered, error, self.name, now)
                    refused.append(offered)
        self._held = [(when, offered) for when, offered in self._held if when >= came_before]
        return refused

    def load(self, now: float) -> ReplicaLoad:
        """Return how it stands, as if the steps of a run had been planned one by one."""
        if self._step is None:
            return self.scheduler.load(now)
        self._catch_up(self._step, now)
        return self.scheduler.load(now, busy=self._ends[0] - now)

    def withdraw(self, request_id: str, now: float) -> None:
        """Let go of a request, which no plan may have seen."""
        held = [each for each in self._held if each[1].request.request_id != request_id]
        if len(held) == len(self._held):
            super().withdraw(request_id, now)
        self._held = held

    def _advance(self, step: StepUnderWay, num_steps: int) -> None:
        """Take the results of the first steps of a run, which goes on."""
        assert step.run is not None
        ends = self._ends[:num_steps]
        del self._ends[:num_steps]
        self._counted.count(step.shape, len(ends), self._largest)
        step.run.advance(ends)
        step.start = ends[-1]

    def settle(self, now: float) -> None:
        """Deliver what the steps of a run have brought by now."""
        self.interrupt(now)
        if self._step is not None and not self._learns:
            self._catch_up(self._step, now)

    def _look_ahead(self, step: StepUnderWay, end: float, next_arrival: float) -> None:
        """Predict further steps of the run, the first of which starts at `end`.

        It stops at the end of the run, or with the step during which the next request arrives (anywhere).
        """
        run, shape, noise, overhead = step.run, self._shape, self._noise, self._overhead
        ends, num_left, num_rows = self._ends, self._num_left, shape.num_lm_head_rows
        bound = run if isinstance(run, SteadyRun) and run.limit < inf else None
        is_watched = self._is_watched
        num_at_once = 1 if is_watched else _STEPS_AT_ONCE
        least = 1 if is_watched or self._is_alone else _LOOKAHEAD
        times: Sequence[float]
        is_over = False
        while not is_over:
            first, num = shape.decode_context_tokens, min(num_left, num_at_once)
            if num == 1:
                times = (self._model.step_time(shape),)
            else:  # every row reads a token more in each
                times = self._step_times(shape, range(first, first + num * num_rows, num_rows))
            if not (min(times) > 0.0 and sum(times) < inf):
                refuse_prediction(next(each for each in times if not 0.0 < each < inf), shape)
            if noise is not None:
                num_before = self._counted.num_steps + len(ends)
                times = [each * noise.factor(number) for number, each in enumerate(times, num_before)]
            if overhead:
                times = [each + overhead for each in times]
            found = list(accumulate(times, initial=end))
            last = max(least, 1 if is_watched else bisect_left(found, next_arrival, 1))
            is_over = num == num_left or last <= num
            num = min(num, last)
            ends.extend(found[1 : num + 1])
            end, num_left, least = found[num], num_left - num, least - num
            shape.decode_context_tokens = first + (num if num_left else num - 1) * num_rows
            if bound is not None:
                num_asked = len(ends) - is_over
                # Nobody cuts short what goes up to the next arrival anywhere.
                num_followed = (
                    bound.learn(ends[:num_asked], bound.limit)
                    if self._is_alone
                    else bound.num_followed(ends[:num_asked])
                )
                if num_followed < num_asked:
                    del ends[num_followed + 1 :]
                    num_left, end, is_over = 0, ends[-1], True
        self._num_left = num_left
        self.next_time = end


def make_replica(index: int, config: SimulationConfig, kind: ReplicaKind, around: Around) -> VirtualReplica:
    """Return replica `index`, with or without pipeline stages."""
    replica = PipelineReplica if kind.scheduler.num_micro_batches > 1 else SerialReplica
    return replica(str(index), config, kind, around)
