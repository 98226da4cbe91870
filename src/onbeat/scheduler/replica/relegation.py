"""What becomes of requests whose first token can no longer be in time."""

from __future__ import annotations

from onbeat.core.request import FinishReason, RequestOutput
from onbeat.core.slo import ShedMode
from onbeat.scheduler.replica.delivery import last_output
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.roster import Roster
from onbeat.scheduler.replica.slo.tracker import SLOTracker


class Relegation:
    """Serves late requests as best effort, or ends them where their callers prefer that.

    Parameters
    ----------
    roster : where they are.
    tracker : counts those that end; None where the policy keeps none.
    """

    def __init__(self, roster: Roster, tracker: SLOTracker | None) -> None:
        self.num_relegated = 0
        """Requests so far that have become best effort."""
        self._expired: list[RequestOutput] = []
        self._roster = roster
        self._tracker = tracker

    def commit(self, states: list[RequestState]) -> None:
        """Serve requests as best effort from now on, or not at all."""
        for state in states:
            is_waiting = state.status is RequestStatus.WAITING
            if is_waiting and state.request.shed is ShedMode.REJECT and not state.num_output_tokens:
                self._expire(state)
                continue
            state.slo.give_up()
            self.num_relegated += 1
            if is_waiting:
                self._roster.requeue(state)

    def take_expired(self) -> list[RequestOutput]:
        """Return the last outputs of those that were ended since the last call."""
        expired, self._expired = self._expired, []
        return expired

    def _expire(self, state: RequestState) -> None:
        """End a request that its caller does not want served late."""
        output = last_output(state, FinishReason.EXPIRED)
        output.predicted_ttft = state.slo.predicted_ttft
        output.error = (
            "the first token can no longer come within the objective "
            f"({(state.slo.ttft_deadline - state.request.arrival) * 1e3:g} ms after arrival)"
        )
        if self._tracker is not None:
            self._tracker.reject("deadline_exceeded")
        self._roster.drop(state)
        self._expired.append(output)
