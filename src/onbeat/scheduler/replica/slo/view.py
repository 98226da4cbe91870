"""The running requests as the planner of a step sees them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from math import inf

from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.request_state import RequestState


class RunningView:
    """Running requests by what they want: one token each, or the rest of a prompt.

    Parameters
    ----------
    running : all of them.
    horizon : the earliest that a step can end, seconds. A token that is due before comes late whatever is
        done, so its deadline does not bound the step.

    Attributes
    ----------
    streams : requests that want one token and have a deadline for it.
    dues : that deadline of each stream (`next_due`).
    loose : requests that want one token and have none: nothing was promised, or the promise is broken.
    prefills : requests in the middle of their prompt.
    due : the earliest deadline of `streams` that can be met; infinite without any.
    due_state : whose it is.
    tightest : the shortest TBT objective of `streams`; infinite without any.
    """

    def __init__(self, running: Iterable[RequestState], horizon: float) -> None:
        self.streams: list[RequestState] = []
        self.dues: list[float] = []
        self.loose: list[RequestState] = []
        self.prefills: list[RequestState] = []
        self.due = self.tightest = inf
        self.due_state: RequestState | None = None
        self._look(running, horizon)

    def _look(self, running: Iterable[RequestState], horizon: float) -> None:
        streams, loose, due, tightest = self.streams, self.loose, self.due, self.tightest
        dues = self.dues
        for state in running:
            num_in_flight = state.num_in_flight_tokens
            if state.is_in_flight or (num_in_flight and state.will_be_full):
                continue
            wanted = state.num_tokens + num_in_flight - state.num_computed_tokens
            if wanted != 1:
                if wanted > 1:
                    self.prefills.append(state)
                continue
            deadline = state.next_deadline
            if deadline == inf:
                loose.append(state)
                continue
            streams.append(state)
            if num_in_flight:
                deadline += state.num_certain_tokens * state.tbt
            dues.append(deadline)
            if horizon <= deadline < due:
                due, self.due_state = deadline, state
            if state.tbt < tightest:
                tightest = state.tbt
        self.due, self.tightest = due, tightest

    def drop_streams(self, victims: Container[int]) -> None:
        """Take streams out, named by the `id` of their states."""
        kept = [pair for pair in zip(self.streams, self.dues, strict=True) if id(pair[0]) not in victims]
        self.streams = [state for state, _ in kept]
        self.dues = [due for _, due in kept]


def next_due(state: RequestState) -> float:
    """Return the deadline of the next token to plan, the ones in flight counted as delivered."""
    num_certain = state.num_certain_tokens
    return state.next_deadline + num_certain * state.tbt if num_certain else state.next_deadline


def decode_shape(states: Iterable[RequestState]) -> BatchShape:
    """Return the shape of a step with one token for each."""
    num, context = 0, 0
    for state in states:
        num += 1
        context += state.num_computed_tokens
    return BatchShape(
        num_new_tokens=num,
        num_sequences=num,
        num_decodes=num,
        decode_context_tokens=context + num,
        num_lm_head_rows=num,
    )
