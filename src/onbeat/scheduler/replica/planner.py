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
from onbeat.core.step import BatchShape, ScheduledRequest, new_tuple
from onbeat.core.step_stats import SchedulerState
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.policies import Policy
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus, SLOState
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


class Planner:
    """A policy at work on a table of requests, with the steps in flight and what ended ones have taught.

    It tells whoever plans with step times how long steps took, in the order of their ends. Infeasible
    requests it serves as best effort, or ends them where their callers prefer that.

    Parameters
    ----------
    config : limits.
    policy : decides.
    model : told of every step's time; None where nobody predicts.

    Attributes
    ----------
    new_plan : returns a plan in which nothing is decided, for a step that starts at a time, seconds.
    last_end : when the last step ended, seconds.
    cost_model : its costs are taken anew from the model now and then; None where nobody plans with them.
    num_relegated : requests so far that have become best effort.
    expired : last outputs of requests that were ended, until they are taken.
    """

    def __init__(
        self, config: SchedulerConfig, policy: Policy, table: Table, model: StepTimeModel | None
    ) -> None:
        self.config, self.policy, self.model = config, policy, model
        self._table, known = table, policy.known
        whole, most = known.whole_prompts, known.reserves_maximum
        self.new_plan = partial(StepPlan, config, table, whole_prompts=whole, reserves_maximum=most)
        self.cost_model = None if policy.slo is None else policy.slo.cost_model
        self.last_end = float("-inf")
        # Steps wait for one another, save for those of a pipeline.
        self._is_serial = config.num_micro_batches == 1
        self.num_relegated = 0
        self.expired: list[RequestOutput] = []
        self.in_flight = StepsInFlight()
        self._num_added = 0

    # --- arrivals -------------------------------------------------------------------------------------

    def new_state(self, request: Request) -> RequestState:
        """Return a new request with its place in the order, and no deadlines yet."""
        # Where objectives are followed, the table ranks it by its deadlines.
        rank = self.policy.order(request) if self.policy.slo is None else 0.0
        sort_key = (rank, request.arrival, self._num_added)
        self._num_added += 1
        limit = self.config.max_model_len
        state = RequestState(request, sort_key=sort_key, max_model_len=limit, slo=SLOState())
        if self.config.window_tokens is not None and self.policy.known.pauses:
            state.pause_at = state.num_tokens + self.config.window_tokens
        return state

    def begin(self, state: RequestState, now: float) -> None:
        """Set the deadlines of a new request by what it asks for alone, where the policy keeps any."""
        if self.policy.known.keeps_deadlines:
            most = state.max_total_tokens - state.num_prompt_tokens
            state.slo.begin(state.request, self.config.slo_mode, now=now, max_output_tokens=most)

    def add(self, state: RequestState, now: float) -> None:
        """Let a new request wait.

        Raises
        ------
        Overloaded : it would have to wait for too long (`max_queue_seconds`).
        SLOUnattainable : it would miss its TTFT objective and asks to be refused then (`Request.shed`).
        """
        admission, in_flight = self.policy.admission, self.in_flight
        if admission is None:
            self.begin(state, now)
        else:
            plan = self.new_plan(now)
            busy_until = in_flight.busy_until if in_flight else plan.now
            admission.on_arrival(state, plan, busy_until, in_flight.num_planned)
            # It is best effort from the start, though it has an objective.
            self.num_relegated += state.slo.is_best_effort and state.num_tokens == state.num_prompt_tokens
        self._table.add(state)

    def state(self) -> SchedulerState | None:
        """Return how queues and objectives stand; None where the policy keeps no deadlines."""
        admission, in_flight = self.policy.admission, self.in_flight
        if admission is None:
            return None
        now = max(in_flight.last_plan, in_flight.busy_until if in_flight else self.last_end)
        return admission.report(self.new_plan(now), self.num_relegated)

    # --- a step ---------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan) -> None:
        """Remember what a plan decides that is carried out; relegate or end whom it gives up."""
        slo, admission = self.policy.slo, self.policy.admission
        self.policy.composer.commit(plan)
        if slo is not None:
            slo.tracker.on_plan(plan, slo.cost_model)
        for request_id, num_hit_tokens in plan.num_hit_tokens.items():
            self._table.states[request_id].num_hit_tokens = num_hit_tokens
        if plan.infeasible:
            begun = {id(each.state) for each in plan.admissions}
            for state in plan.infeasible:
                self._relegate(state, plan, waits_on=id(state) not in begun)
        if plan.overdue and admission is not None:
            for state in plan.overdue:
                self._refuse(state, admission.overdue(plan.waiting))

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
        if self.cost_model is not None and self.model is not None and self._is_serial:
            seconds = self.model.step_time(shape)
            in_flight.busy_until = start + seconds
        fields = (in_flight.num_planned, states, rows, planned_at, seconds, expected_tokens)
        step = new_tuple(StepInFlight, fields)
        in_flight.num_planned += 1
        in_flight.append(step)
        return step

    def observe(self, shape: BatchShape, planned_at: float, now: float, *, has_run: bool = True) -> None:
        """Learn from a step; one that took no time, or was told of before, teaches nothing.

        Parameters
        ----------
        planned_at, now : when it was planned, and when it ended; seconds.
        has_run : whether it came to its end; else its time says nothing.
        """
        begun = max(planned_at, self.last_end) if self._is_serial else planned_at
        self.last_end = now
        if self.model is None or not has_run or now <= begun:
            return
        self.model.observe(shape, now - begun)
        if self.cost_model is not None:
            self.cost_model.count()

    # --- requests that are given up -------------------------------------------------------------------

    def take_expired(self) -> list[RequestOutput]:
        """Return the last outputs of requests that plans gave up since the last call.

        Their TTFT deadline passed in the queue, and they had asked not to be served late, or too many wait
        already that are.
        """
        expired, self.expired = self.expired, []
        return expired

    def _relegate(self, state: RequestState, plan: StepPlan, *, waits_on: bool) -> None:
        """Serve an infeasible request as best effort from now on, or not at all.

        Parameters
        ----------
        waits_on : whether it does not begin with this plan.
        """
        is_waiting, admission = state.status is RequestStatus.WAITING, self.policy.admission
        if is_waiting and not state.num_output_tokens:
            if state.request.shed is ShedMode.REJECT:
                objective = state.slo.ttft_deadline - state.request.arrival
                error = (
                    "the first token can no longer come within the objective "
                    f"({objective * 1e3:g} ms after arrival)"
                )
                self._end(state, Fate.EXPIRED, error, "deadline_exceeded")
                return
            if (
                waits_on
                and admission is not None
                and (refusal := admission.refusal(plan.waiting)) is not None
            ):
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
        if self.policy.admission is not None:
            self.policy.admission.num_rejected[reason] += 1
        output = state.last_output(FinishReason.EXPIRED)
        output.predicted_ttft = state.slo.predicted_ttft
        output.fate, output.error = fate, error
        self._table.drop(state)
        self.expired.append(output)
        return output
