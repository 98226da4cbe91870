"""What plans the steps of one batch, whoever has the requests and the KV: onbeat's engine, or another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from onbeat.core.request import Request
from onbeat.core.step import BatchShape, ScheduledRequest, SchedulerState
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.kv_view import KVView
from onbeat.scheduler.replica.policies import Policy
from onbeat.scheduler.replica.queues import RunningList, WaitingQueue
from onbeat.scheduler.replica.relegation import Places, Relegation
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.results import StepFeedback, StepInFlight, StepsInFlight
from onbeat.scheduler.replica.slo.deadlines import SLOState
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.scheduler.scheduler_config import SchedulerConfig


class Table(Places, Protocol):
    """Where the requests are: `RequestTable`, or what follows the queues of another engine."""

    @property
    def running(self) -> RunningList: ...

    @property
    def waiting(self) -> WaitingQueue: ...

    @property
    def states(self) -> Mapping[str, RequestState]:
        """Requests that wait or run and will deliver more, by id."""
        ...

    @property
    def kv(self) -> KVView: ...


class Planner:
    """A policy at work on a table of requests, with the steps in flight and what ended ones have taught.

    Parameters
    ----------
    config : limits.
    policy : decides.
    model : told of every step's time; None where nobody predicts.
    num_slots_kept : returns the places of the batch that are kept for others than the table's requests.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        table: Table,
        model: StepTimeModel | None,
        num_slots_kept: Callable[[], int],
    ) -> None:
        self.config, self.policy, self.model = config, policy, model
        self._table, self._num_slots_kept = table, num_slots_kept
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
        sort_key = (self.policy.order.rank(request), request.arrival, self._num_added)
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
            self.relegation.on_arrival(state)
        self._table.add(state)

    def state(self) -> SchedulerState | None:
        """Return how queues and objectives stand; None where the policy keeps no deadlines."""
        admission, in_flight = self.policy.admission, self.in_flight
        if admission is None:
            return None
        now = max(in_flight.last_plan, in_flight.busy_until if in_flight else self.feedback.last_end)
        return admission.report(self.new_plan(now), self.relegation.num_relegated)

    # --- a step ---------------------------------------------------------------------------------------

    def begin(self, now: float) -> float:
        """Return when a step that is planned now starts, seconds."""
        start = self.in_flight.last_plan = self.in_flight.next_start(now)
        return start

    def new_plan(self, now: float) -> StepPlan:
        """Return a plan in which nothing is decided.

        Parameters
        ----------
        now : when its step starts, seconds.
        """
        table = self._table
        plan = StepPlan(
            config=self.config, kv=table.kv, running=table.running, waiting=table.waiting, now=now
        )
        plan.max_num_seqs -= self._num_slots_kept()
        return plan

    def compose(self, plan: StepPlan) -> None:
        """Decide what a step holds. Nothing but the plan changes."""
        self.policy.composer.compose(plan, self.policy.order)

    def commit(self, plan: StepPlan) -> None:
        """Remember what a plan decides that is carried out."""
        self.policy.composer.commit(plan)
        if self.policy.admission is not None:
            self.policy.admission.on_plan(plan)
        states = self._table.states
        for request_id, num_hit_tokens in plan.num_hit_tokens.items():
            states[request_id].note_hits(num_hit_tokens)
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
