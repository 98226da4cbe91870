"""What becomes of requests whose first token can no longer be in time."""

from __future__ import annotations

from typing import Protocol

from onbeat.core.errors import Overloaded
from onbeat.core.request import FinishReason, RequestOutput
from onbeat.core.slo import Fate, ShedMode
from onbeat.scheduler.replica.admission import Admission
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.results import last_output
from onbeat.scheduler.replica.step_plan import StepPlan


class Places(Protocol):
    """Where requests are: `RequestTable`, or what follows the queues of another engine."""

    def add(self, state: RequestState) -> None:
        """Let a new request wait."""
        ...

    def requeue(self, state: RequestState) -> None:
        """Give a waiting request the place that its deadline, or the loss of it, asks for."""
        ...

    def drop(self, state: RequestState) -> None:
        """Forget a request."""
        ...


class Relegation:
    """Serves infeasible requests as best effort, or ends them where their callers prefer that.

    Parameters
    ----------
    table : where they are.
    admission : counts those that end, and knows when too many wait; None where the policy has none.
    """

    def __init__(self, table: Places, admission: Admission | None) -> None:
        self.num_relegated = 0
        """Requests so far that have become best effort."""
        self._expired: list[RequestOutput] = []
        self._table = table
        self._admission = admission

    def on_arrival(self, state: RequestState) -> None:
        """Count a new request that is served as best effort from the start, though it has an objective."""
        if state.slo.is_best_effort and not state.num_output_tokens:
            self.num_relegated += 1

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
        expired, self._expired = self._expired, []
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
                self._expire(state)
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
        output = self._end(state, Fate.OVERDUE, str(refusal), refusal.reason)
        output.retry_after = refusal.retry_after

    def _expire(self, state: RequestState) -> None:
        """End a request that its caller does not want served late."""
        self._end(
            state,
            Fate.EXPIRED,
            "the first token can no longer come within the objective "
            f"({(state.slo.ttft_deadline - state.request.arrival) * 1e3:g} ms after arrival)",
            "deadline_exceeded",
        )

    def _end(self, state: RequestState, fate: Fate, error: str, reason: str) -> RequestOutput:
        if self._admission is not None:
            self._admission.num_rejected[reason] += 1
        output = last_output(state, FinishReason.EXPIRED)
        output.predicted_ttft = state.slo.predicted_ttft
        output.fate, output.error = fate, error
        self._table.drop(state)
        self._expired.append(output)
        return output
