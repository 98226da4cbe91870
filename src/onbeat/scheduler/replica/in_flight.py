"""The steps that were planned and have not come back, and when the next one may start."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from onbeat.core.step import ScheduledRequest
from onbeat.scheduler.replica.request_state import RequestState


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

    def next_start(self, now: float) -> float:
        """Return when a step that is planned now may start, seconds."""
        return max(now, self.busy_until) if self else now

    def end_oldest(self, now: float) -> StepInFlight:
        """Take out the oldest step, which has ended; errors of predictions must not add up in the others."""
        ended = self.popleft()
        if self:
            self.busy_until = now + sum([step.seconds for step in self])
        return ended

    def has(self, state: RequestState) -> bool:
        """Whether a request has had a row in one of them since it was last admitted."""
        return self.num_new_tokens(state) > 0

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
