"""What a draft model has read of the requests, and which of them are worth reading.

A draft model is never told of prompts: a request for which drafts are planned, and with which it is far
behind, it reads instead, so many tokens in a step. That takes time, which the plan of the step has to know.
"""

from __future__ import annotations

from collections.abc import Iterable

from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.lengths import OutputLengths
from onbeat.scheduler.replica.speculation.acceptance import AcceptanceBook
from onbeat.scheduler.replica.step_plan import StepPlan

_FEW_TOKENS = 64
"""What the draft model may have missed of a request and still draft for it in the step that reads them: its
passes pay where many requests share them, and while it reads some, others must not have to be read again."""
_CLEAR_GAIN = 1.5
"""Time that drafts for a request are expected to save until it ends, over the time to read it, from which on
it is read. Answers may end early, and whoever arrives meanwhile waits."""


class DraftReading:
    """Keeps count of what the draft model has read, going by what was planned.

    What it may have of a prompt from an earlier request is not known here, so that a plan asks for too much
    time rather than for too little.

    Parameters
    ----------
    most : tokens that it reads in a step, over all requests that are far behind; 0 where it reads nothing.
    book : holds the count of each request.
    """

    def __init__(self, most: int, book: AcceptanceBook) -> None:
        self.most = most
        self._book = book
        self._lengths = OutputLengths()

    def finish(self, state: RequestState) -> None:
        """Learn how long an answer was."""
        self._lengths.observe(state.request.slo_class, state.num_output_tokens)

    def num_behind(self, state: RequestState) -> int:
        """Return how many tokens the draft model has not seen, the request's last one included."""
        rate = self._book.of(state)
        if rate.read_life != state.num_preemptions:
            rate.num_read, rate.read_life = 0, state.num_preemptions
        return state.num_tokens + state.num_in_flight_tokens - rate.num_read

    def is_unread(self, state: RequestState) -> bool:
        """Whether a request has to be read before it can have drafts."""
        return self.most > 0 and self.num_behind(state) > _FEW_TOKENS

    def sums(self, states: Iterable[RequestState], num_near: int) -> tuple[int, int]:
        """Return what a step reads of these, as `BatchShape.num_catch_up_tokens` and `catch_up_pairs`.

        Parameters
        ----------
        num_near : tokens that a request may be behind without being counted: a block.
        """
        num_left, sums = self.most, BatchShape()
        if not num_left:
            return 0, 0
        far = [state for state in states if self.num_behind(state) > num_near]
        for state in sorted(far, key=self.num_behind):
            num = min(self.num_behind(state), num_left)
            num_left -= num
            sums.add_catch_up(self._book.of(state).num_read, num)
        return sums.num_catch_up_tokens, sums.catch_up_pairs

    def is_worthwhile(self, state: RequestState, *, saved: float, per_token: float) -> bool:
        """Whether drafts for a request save clearly more time than reading it takes.

        Parameters
        ----------
        saved : seconds that drafts for it are expected to save with each of its tokens.
        per_token : seconds to read one.
        """
        limit = state.max_total_tokens - state.num_tokens
        num_behind = self.num_behind(state)
        num_left = self._lengths.remaining(
            state.request.slo_class, state.num_output_tokens, q=0.5, limit=max(1, limit)
        )
        return saved * num_left >= _CLEAR_GAIN * per_token * num_behind

    def count(self, plan: StepPlan, states: Iterable[RequestState]) -> None:
        """Count what the draft model reads of the requests that a step plans drafts for.

        Those that are nearest to their ends come first. `plan.catch_ups` gets what is read of those that are
        far behind.
        """
        if not self.most:
            return
        num_left = self.most
        for state in sorted(states, key=self.num_behind):
            rate, num_behind = self._book.of(state), self.num_behind(state)
            if num_behind > plan.block_size:
                num_behind = min(num_behind, num_left)
                num_left -= num_behind
                if num_behind:
                    plan.catch_ups.append((rate.num_read, num_behind))
            rate.num_read += num_behind
