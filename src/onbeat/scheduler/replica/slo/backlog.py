"""How long best effort waits, and when no more of it is taken.

Prompts that can be in time are never refused here: the deadlines bound how many of them there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, inf
from typing import NamedTuple

from onbeat.core.errors import Overloaded
from onbeat.core.slo import DEFAULT_QUEUE_SECONDS
from onbeat.scheduler.replica.queues import QueuedWork, WaitingQueue
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.deadlines import BEST_EFFORT_RANK
from onbeat.scheduler.replica.slo.tracker import SLOTracker
from onbeat.scheduler.replica.slo.work import PrefillWork
from onbeat.scheduler.replica.step_plan import StepPlan

REFUSED = "queue_too_long"
"""Reason of a rejection, in the counts."""
SHORTEST_RETRY = 0.05
"""Seconds; a client that comes back sooner finds the same step under way."""
_MEMORY_SECONDS = 30.0
"""Time constant of the pace."""
_PRIOR_SECONDS = 0.1
"""What "prompts get all the time" weighs before anything was seen."""
BEST_EFFORT_STEPS = 100
"""In one step of so many best effort goes before prompts with deadlines: it never starves for time."""
_SLOWEST = 1 / BEST_EFFORT_STEPS
"""The pace of best effort however busy it is."""
OVERDUE = 1.5
"""Times the bound that a request waits before it is ended. Above the errors of predictions: only requests
that prompts with deadlines have overtaken wait so long."""


class _Pace:
    """Seconds of prefill work that are begun in a second in which some waits, exponentially weighted.

    While none waits it returns to "all the time": what held prompts up then is over, for all that is known.
    """

    __slots__ = ("_begun", "_last", "_watched", "some_wait")

    def __init__(self) -> None:
        self._begun = self._watched = _PRIOR_SECONDS
        self._last = 0.0
        """Until when it has counted, seconds."""
        self.some_wait = False
        """Whether prompts have waited since then."""

    def count(self, now: float, begun: float) -> None:
        """Count the time until now, and the work begun at its end, seconds."""
        seconds = max(0.0, now - self._last)
        self._last = max(now, self._last)
        decay = exp(-seconds / _MEMORY_SECONDS)
        if self.some_wait:
            self._begun = self._begun * decay + begun
            self._watched = self._watched * decay + seconds
        else:
            forgotten = (1 - decay) * _PRIOR_SECONDS
            self._begun = self._begun * decay + forgotten
            self._watched = self._watched * decay + forgotten

    @property
    def rate(self) -> float:
        return max(self._begun / self._watched, _SLOWEST)


class QueueBound(NamedTuple):
    """When another prompt is not taken."""

    seconds: float
    """Longest wait for which one is; infinite takes all."""
    num_slots: int
    """With fewer requests waiting than may run at once, one is taken whatever is predicted."""


class Backlog:
    """Predicts how long an arrival waits as best effort, and rejects it where that is too long.

    The prompt work that waits, by predicted step times, over the pace at which such work was begun of late.
    The pace holds all that stands between them: streams and their slots, memory, prompts with deadlines that
    overtake. Each call costs O(1).

    Parameters
    ----------
    tracker : counts the rejected.
    bound : when another is too many.
    """

    def __init__(self, tracker: SLOTracker, work: PrefillWork, bound: QueueBound) -> None:
        self.tracker = tracker
        self._work = work
        self._bound = bound
        self._all, self._best_effort = _Pace(), _Pace()

    def on_plan(self, plan: StepPlan) -> None:
        """Learn from a plan that is carried out; the queue still holds those that it admits."""
        begun = begun_best_effort = 0.0
        num_best_effort = plan.waiting.best_effort.num_requests
        for admission in plan.admissions:
            seconds = self._work.of_sums(*admission.state.queued_work)
            begun += seconds
            if admission.state.sort_key[0] >= BEST_EFFORT_RANK:
                begun_best_effort += seconds
                num_best_effort -= 1
        self._all.count(plan.now, begun)
        self._best_effort.count(plan.now, begun_best_effort)
        self._all.some_wait = len(plan.waiting) > len(plan.admissions)
        self._best_effort.some_wait = num_best_effort > 0

    def on_arrival(self, waiting: WaitingQueue, now: float) -> None:
        """Hear of an arrival that does not wait yet. Where nobody does, nobody has since the last plan.

        Those who waited then have left (aborted, or ended for being late), and the time since says nothing of
        how fast prompts are begun.
        """
        if not waiting.best_effort.num_requests:
            self._best_effort.some_wait = False
            self._best_effort.count(now, 0.0)
            if not waiting.ranked.num_requests:
                self._all.some_wait = False
                self._all.count(now, 0.0)

    def wait(self, waiting: WaitingQueue) -> float:
        """Return how long best effort that came now would wait until it is begun, seconds."""
        best_effort, ranked = self._seconds(waiting.best_effort), self._seconds(waiting.ranked)
        return max(best_effort / self._best_effort.rate, (best_effort + ranked) / self._all.rate)

    def _ranked_wait(self, waiting: WaitingQueue) -> float:
        """Return how long one would wait that keeps its turn though it is late (`ShedMode.OFF`), seconds."""
        return self._seconds(waiting.ranked) / self._all.rate

    def overdue(self, states: Iterable[RequestState], now: float) -> list[RequestState]:
        """Return those of some waiting requests that have waited for too long.

        They were taken, but have had to let others go first ever since. None has begun.
        """
        latest = now - OVERDUE * self._bound.seconds
        return [
            state
            for state in states
            if not state.has_run and not state.output_token_ids and _waits_since(state) < latest
        ]

    def is_starved(self, state: RequestState, now: float) -> bool:
        """Whether best effort that has begun gets no further, for lack of memory.

        It was preempted, or is computed again after that, and its last token is as long ago as a request may
        wait to be begun. Nobody ends it, as its client has read what there is.
        """
        longest = self._bound.seconds if self._bound.seconds < inf else DEFAULT_QUEUE_SECONDS
        slo = state.slo
        return (
            state.num_preemptions > 0
            and slo.runs_as_best_effort
            and now - max(slo.last_delivery, _waits_since(state)) > longest
        )

    def refusal(self, waiting: WaitingQueue, *, keeps_turn: bool = False) -> Overloaded | None:
        """Return why another prompt is not taken; None where it is.

        Parameters
        ----------
        keeps_turn : whether it goes by its deadline even once that has passed (`ShedMode.OFF`).
        """
        bound = self._bound
        if bound.seconds == inf or len(waiting) < bound.num_slots:
            return None
        wait = self._ranked_wait(waiting) if keeps_turn else self.wait(waiting)
        if wait <= bound.seconds:
            return None
        return self._refuse(
            f"{len(waiting)} requests wait; one more that cannot be in time would be begun in {wait:.0f} s, "
            f"later than may be (max_queue_seconds {bound.seconds:g}); try again later",
            self._until_room(wait, waiting, bound),
        )

    def overdue_refusal(self, waiting: WaitingQueue) -> Overloaded:
        """Return why a request that has waited is not served after all."""
        return self._refuse(
            f"the request has waited {OVERDUE:g} times as long as may be (max_queue_seconds "
            f"{self._bound.seconds:g}), as others that can be in time left nothing over; try again later",
            self._until_room(self.wait(waiting), waiting, self._bound),
        )

    def _refuse(self, message: str, retry_after: float) -> Overloaded:
        self.tracker.reject(REFUSED)
        return Overloaded(message, code="server_overloaded", retry_after=retry_after, reason=REFUSED)

    def _until_room(self, wait: float, waiting: WaitingQueue, bound: QueueBound) -> float:
        """Return how long it takes until another is taken, if no other arrives: seconds."""
        num_too_many = len(waiting) - bound.num_slots + 1
        until_short = wait * num_too_many / len(waiting) if len(waiting) else 0.0
        return max(min(wait - bound.seconds, until_short), SHORTEST_RETRY)

    def _seconds(self, work: QueuedWork) -> float:
        return self._work.of_sums(work.num_tokens, work.num_pairs)


def _waits_since(state: RequestState) -> float:
    """Return when its wait as best effort has begun: at its arrival, or when its objective passed."""
    due = state.slo.ttft_deadline
    return state.request.arrival if due == inf else due
