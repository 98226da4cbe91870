"""What plans the steps of one batch, whoever has the requests and the KV: onbeat's engine, or another.

Requests whose first token can no longer be in time become best effort, or end.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

from onbeat.core.errors import Overloaded
from onbeat.core.request import FinishReason, Request, RequestOutput
from onbeat.core.slo import Fate, ShedMode
from onbeat.core.step import BatchShape, ScheduledRequest, SchedulerState
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.admission import Admission
from onbeat.scheduler.replica.policies import Policy
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.slo.composer import StepRules
from onbeat.scheduler.replica.slo.deadlines import SLOState
from onbeat.scheduler.replica.step_plan import StepPlan, Table
from onbeat.scheduler.scheduler_config import SchedulerConfig


class StepInFlight(NamedTuple):
    """A step that was planned and has not come back."""

    step_id: int
    states: list[RequestState]
    """Of each row."""
    rows: tuple[ScheduledRequest, ...]
    planned_at: float
    """Seconds."""
    seconds: float
    """That it was predicted to take; 0 where nobody asks."""
    expected_tokens: float
    """Output tokens that its decode rows should deliver; kept where drafts are planned."""


class StepsInFlight(deque[StepInFlight]):
    """Steps that have not come back, the oldest first; they come back in this order.

    Attributes
    ----------
    num_planned : steps so far.
    last_plan : when the last of them starts, seconds.
    busy_until : when it is expected to end, seconds; kept for policies that ask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_planned = 0
        self.last_plan = 0.0
        self.busy_until = float("-inf")

    def end_oldest(self, now: float) -> StepInFlight:
        """Take out the oldest step, which has ended; errors of predictions must not add up in the others."""
        ended = self.popleft()
        if self:
            self.busy_until = now + sum([step.seconds for step in self])
        return ended

    def num_new_tokens(self, state: RequestState) -> int:
        """Return how many tokens of a request they compute that it was given since it was last admitted."""
        num_tokens = 0
        for step_id, states, rows, *_ in self:
            if step_id >= state.admitted_step_id:
                for other, row in zip(states, rows, strict=True):
                    if other is state:
                        num_tokens += row.num_new_tokens
                        break
        return num_tokens


class StepFeedback:
    """Tells whoever plans with step times how long steps took, in the order of their ends.

    Parameters
    ----------
    model : told of every step's time; None where nobody predicts.
    rules : their costs are taken anew from the model now and then, and they hear of steps that took far
        longer than planned; None where nobody plans with them.
    run_side_by_side : whether steps of a pipeline do not wait for one another.

    Attributes
    ----------
    last_end : when the last step ended, seconds.
    """

    def __init__(
        self, model: StepTimeModel | None, rules: StepRules | None, *, run_side_by_side: bool
    ) -> None:
        self.last_end = float("-inf")
        self.model, self.rules = model, rules
        self._run_side_by_side = run_side_by_side

    def observe(self, shape: BatchShape, planned_at: float, now: float, *, has_run: bool = True) -> None:
        """Learn from a step; one that took no time, or was told of before, teaches nothing.

        Parameters
        ----------
        planned_at, now : when it was planned, and when it ended; seconds.
        has_run : whether it came to its end; else its time says nothing.
        """
        begun, last_end = planned_at, self.last_end
        if begun < last_end and not self._run_side_by_side:
            begun = last_end
        self.last_end = now
        if self.model is None or not has_run or now <= begun:
            return
        self.model.observe(shape, now - begun)
        if self.rules is not None:
            self.rules.cost_model.count()


class Relegation:
    """Serves infeasible requests as best effort, or ends them where their callers prefer that.

    Parameters
    ----------
    table : where they are.
    admission : counts those that end, and knows when too many wait; None where the policy has none.
    """

    def __init__(self, table: Table, admission: Admission | None) -> None:
        self.num_relegated = 0
        """Requests so far that have become best effort."""
        self.expired: list[RequestOutput] = []
        """Last outputs of requests that were ended, until they are taken."""
        self._table = table
        self._admission = admission

    def commit(self, plan: StepPlan) -> None:
        """Relegate the infeasible requests of a plan, or end them; end the overdue ones."""
        if plan.infeasible:
            begun = {id(admission.state) for admission in plan.admissions}
            for state in plan.infeasible:
                self._relegate(state, plan, waits_on=id(state) not in begun)
        if self._admission is not None:
            for state in plan.overdue:
                self._refuse(state, self._admission.bound.overdue(plan.waiting))

    def take_expired(self) -> list[RequestOutput]:
        """Return the last outputs of those that were ended since the last call."""
        expired, self.expired = self.expired, []
        return expired

    def _relegate(self, state: RequestState, plan: StepPlan, *, waits_on: bool) -> None:
        """Serve an infeasible request as best effort from now on, or not at all.

        Parameters
        ----------
        waits_on : whether it does not begin with this plan.
        """
        is_waiting = state.status is RequestStatus.WAITING
        if is_waiting and not state.num_output_tokens:
            if state.request.shed is ShedMode.REJECT:
                objective = state.slo.ttft_deadline - state.request.arrival
                error = (
                    "the first token can no longer come within the objective "
                    f"({objective * 1e3:g} ms after arrival)"
                )
                self._end(state, Fate.EXPIRED, error, "deadline_exceeded")
                return
            bound = None if self._admission is None else self._admission.bound
            if waits_on and bound is not None and (refusal := bound.refusal(plan.waiting)) is not None:
                self._refuse(state, refusal)
                return
        state.slo.relegate()
        self.num_relegated += 1
        if is_waiting:
            self._table.requeue(state)

    def _refuse(self, state: RequestState, refusal: Overloaded) -> None:
        """End a request that would have to wait for too long."""
        self._end(state, Fate.OVERDUE, str(refusal), refusal.reason).retry_after = refusal.retry_after

    def _end(self, state: RequestState, fate: Fate, error: str, reason: str) -> RequestOutput:
        if self._admission is not None:
            self._admission.num_rejected[reason] += 1
        output = state.last_output(FinishReason.EXPIRED)
        output.predicted_ttft = state.slo.predicted_ttft
        output.fate, output.error = fate, error
        self._table.drop(state)
        self.expired.append(output)
        return output


class Planner:
    """A policy at work on a table of requests, with the steps in flight and what ended ones have taught.

    Parameters
    ----------
    config : limits.
    policy : decides.
    model : told of every step's time; None where nobody predicts.

    Attributes
    ----------
    new_plan : returns a plan in which nothing is decided, for a step that starts at a time, seconds.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        table: Table,
        model: StepTimeModel | None,
    ) -> None:
        self.config, self.policy, self.model = config, policy, model
        self._table, known = table, policy.known
        self.new_plan = partial(
            StepPlan,
            config,
            table,
            whole_prompts=known.whole_prompts,
            reserves_maximum=known.reserves_maximum,
        )
        self.relegation = Relegation(table, policy.admission)
        # Steps wait for one another, save for those of a pipeline.
        self.feedback = StepFeedback(
            model,
            None if policy.slo is None else policy.slo.rules,
            run_side_by_side=config.num_micro_batches > 1,
        )
        self.in_flight = StepsInFlight()
        self._num_added = 0

    # --- arrivals -------------------------------------------------------------------------------------

    def new_state(self, request: Request, now: float) -> RequestState:
        """Return a new request with its place in the order and its deadlines."""
        sort_key = (self.policy.order(request), request.arrival, self._num_added)
        self._num_added += 1
        limit = self.config.max_model_len
        state = RequestState(request, sort_key=sort_key, max_model_len=limit, slo=SLOState())
        if self.policy.known.keeps_deadlines:
            max_output_tokens = state.max_total_tokens - state.num_prompt_tokens
            state.slo.begin(request, self.config.slo_mode, now=now, max_output_tokens=max_output_tokens)
        if self.config.window_tokens is not None and self.policy.known.pauses:
            state.pause_at = state.num_tokens + self.config.window_tokens
        return state

    def add(self, state: RequestState, now: float) -> None:
        """Let a new request wait.

        Raises
        ------
        Overloaded : it would have to wait for too long (`max_queue_seconds`).
        SLOUnattainable : it would miss its TTFT objective and asks to be refused then (`Request.shed`).
        """
        admission, in_flight = self.policy.admission, self.in_flight
        if admission is not None:
            plan = self.new_plan(now)
            admission.on_arrival(state, plan, in_flight.busy_until if in_flight else plan.now)
            # It is best effort from the start, though it has an objective.
            self.relegation.num_relegated += state.slo.is_best_effort and not state.num_output_tokens
        self._table.add(state)

    def state(self) -> SchedulerState | None:
        """Return how queues and objectives stand; None where the policy keeps no deadlines."""
        admission, in_flight = self.policy.admission, self.in_flight
        if admission is None:
            return None
        now = max(in_flight.last_plan, in_flight.busy_until if in_flight else self.feedback.last_end)
        return admission.report(self.new_plan(now), self.relegation.num_relegated)

    # --- a step ---------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan) -> None:
        """Remember what a plan decides that is carried out."""
        self.policy.composer.commit(plan)
        if self.policy.admission is not None:
            self.policy.admission.on_plan(plan)
        for request_id, num_hit_tokens in plan.num_hit_tokens.items():
            self._table.states[request_id].num_hit_tokens = num_hit_tokens
        if plan.infeasible or plan.overdue:
            self.relegation.commit(plan)

    def launch(
        self,
        shape: BatchShape,
        states: list[RequestState],
        rows: tuple[ScheduledRequest, ...],
        *,
        start: float,
        planned_at: float,
        expected_tokens: float = 0.0,
    ) -> StepInFlight:
        """Count a step that is carried out.

        Parameters
        ----------
        states, rows : of the step, in one order; whoever takes no results by rows gives none.
        start, planned_at : when it starts, and when it was planned; seconds.
        expected_tokens : see `StepInFlight`.
        """
        in_flight, seconds = self.in_flight, 0.0
        if self.policy.slo is not None and self.model is not None and self.config.num_micro_batches == 1:
            seconds = self.model.step_time(shape)
            in_flight.busy_until = start + seconds
        step = StepInFlight(in_flight.num_planned, states, rows, planned_at, seconds, expected_tokens)
        in_flight.num_planned += 1
        in_flight.append(step)
        return step
