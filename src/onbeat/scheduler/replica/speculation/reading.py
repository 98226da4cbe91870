"""What a draft model has read of the requests, and which of them are worth reading.

A draft model is never told of prompts: a request for which drafts are planned, and with which it is far
behind, it reads instead, so many tokens in a step. That takes time, which the plan of the step has to know.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.scheduler.replica.tracker import OutputLengths


class DraftReading:
    """Keeps count of what the draft model has read, going by what was planned.

    What it may have of a prompt from an earlier request is not known here, so that a plan asks for too much
    time rather than for too little.

    Parameters
    ----------
    most : tokens that it reads in a step, over all requests that are more than a block behind; 0 where it
        reads nothing.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._lengths = OutputLengths()

    def finish(self, state: RequestState) -> None:
        """Learn how long an answer was."""
        self._lengths.observe(state.request.slo_class, state.num_output_tokens)

    def num_behind(self, state: RequestState) -> int:
        """Return how many tokens the draft model has not seen, the request's last one included."""
        return state.num_tokens + state.num_in_flight_tokens - _num_read(state)

    def is_far(self, state: RequestState, block_size: int) -> bool:
        """Whether a request has to be read before it can have drafts."""
        return self.most > 0 and self.num_behind(state) > block_size

    def fitting(self, states: list[RequestState]) -> list[RequestState]:
        """Return those of which the draft model can read all that it missed in one step, nearest first."""
        num_left, found = self.most, []
        for state in sorted(states, key=self.num_behind):
            num_left -= self.num_behind(state)
            if num_left < 0:
                break
            found.append(state)
        return found

    def worthwhile(self, states: list[RequestState], *, saved: float, per_token: float) -> list[RequestState]:
        """Return the requests for which drafts save more time than reading them takes, nearest first.

        They save it until the answer ends, of which the median is taken; no more are returned than the draft
        model can begin with in one step.

        Parameters
        ----------
        saved : seconds that drafts save with each token of a request.
        per_token : seconds to read one.
        """
        num_left, found = self.most, []
        for state in sorted(states, key=self.num_behind):
            if num_left <= 0:
                break
            limit = max(1, state.max_total_tokens - state.num_tokens)
            num_more = self._lengths.remaining(
                state.request.slo_class, state.num_output_tokens, q=0.5, limit=limit
            )
            if saved * num_more >= per_token * self.num_behind(state):
                found.append(state)
                num_left -= self.num_behind(state)
        return found

    def sums(self, states: Iterable[RequestState], block_size: int) -> tuple[int, int]:
        """Return what a step reads of these, as `BatchShape.num_catch_up_tokens` and `catch_up_pairs`."""
        sums = BatchShape()
        for _, num_read, num_tokens in self.catch_ups(states, block_size):
            sums.add_catch_up(num_read, num_tokens)
        return sums.num_catch_up_tokens, sums.catch_up_pairs

    def count(self, plan: StepPlan) -> None:
        """Count what the draft model reads in a step that is carried out."""
        if not self.most:
            return
        for state in compress(plan.decodes, plan.num_drafts):
            if not self.is_far(state, plan.block_size):
                _set_num_read(state, _num_read(state) + self.num_behind(state))
        for state, num_read, num_tokens in plan.catch_ups:
            _set_num_read(state, num_read + num_tokens)

    def catch_ups(
        self, states: Iterable[RequestState], block_size: int
    ) -> list[tuple[RequestState, int, int]]:
        """Return what a step with drafts for these has the draft model read first: see `StepPlan.catch_ups`.

        Of those that are more than a block behind, nearest first.
        """
        num_left, chunks = self.most, []
        far = [state for state in states if self.is_far(state, block_size)]
        for state in sorted(far, key=self.num_behind):
            num = min(self.num_behind(state), num_left)
            num_left -= num
            if num:
                chunks.append((state, _num_read(state), num))
        return chunks


def _num_read(state: RequestState) -> int:
    draft = state.draft
    return draft.num_read if draft.read_life == state.num_preemptions else 0


def _set_num_read(state: RequestState, num_tokens: int) -> None:
    state.draft.num_read, state.draft.read_life = num_tokens, state.num_preemptions
