"""What becomes of requests whose first token can no longer be in time: best effort, or an early end."""

from __future__ import annotations

from onbeat.core.request import FinishReason, RequestOutput
from onbeat.core.slo import ShedMode
from onbeat.scheduler.replica.delivery import last_output
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.roster import Roster, rank_last
from onbeat.scheduler.replica.slo.book import PromiseBook
from onbeat.scheduler.replica.slo.deadlines import give_up


class LostRequests:
    """Relegates requests that a plan has found lost, or ends them where their callers prefer that.

    Parameters
    ----------
    roster : where they are.
    book : counts those that end; None where nothing is promised.
    """

    def __init__(self, roster: Roster, book: PromiseBook | None) -> None:
        self.num_relegated = 0
        """Requests so far that have become best effort."""
        self.expired: list[RequestOutput] = []
        """The last outputs of those that were ended."""
        self._roster = roster
        self._book = book

    def commit(self, states: list[RequestState]) -> None:
        """Serve requests as best effort from now on, or not at all."""
        relegated: list[RequestState] = []
        for state in states:
            is_waiting = state.status is RequestStatus.WAITING
            if is_waiting and state.request.shed is ShedMode.REJECT and not state.num_output_tokens:
                self._expire(state)
                continue
            give_up(state)
            self.num_relegated += 1
            if is_waiting:
                relegated.append(state)
        # All at once: a whole queue may be lost with one step, and those with early deadlines stand in front.
        waiting = self._roster.waiting
        waiting.take_all(relegated)
        for state in relegated:
            rank_last(state)
            waiting.push(state)

    def take_expired(self) -> list[RequestOutput]:
        """Return the last outputs of those that were ended since the last call."""
        expired, self.expired = self.expired, []
        return expired

    def _expire(self, state: RequestState) -> None:
        """End a request that its caller does not want served late."""
        output = last_output(state, FinishReason.EXPIRED)
        slo = state.request.slo
        assert slo is not None
        output.predicted_ttft = state.predicted_ttft
        output.error = (
            "the first token can no longer come within the objective "
            f"({(state.ttft_deadline - state.request.arrival) * 1e3:g} ms after arrival)"
        )
        if self._book is not None:
            self._book.reject("deadline_exceeded")
        self._roster.drop(state)
        self.expired.append(output)
