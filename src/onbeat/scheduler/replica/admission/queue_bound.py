"""How long best effort waits, and when no more of it is taken."""

from __future__ import annotations

from math import exp, inf

from onbeat.core.errors import Overloaded
from onbeat.scheduler.replica.queues import QueuedWork, WaitingQueue
from onbeat.scheduler.replica.slo.cost_model import CostModel
from onbeat.scheduler.replica.slo.deadlines import BEST_EFFORT_RANK
from onbeat.scheduler.replica.slo.rules import OVERDUE
from onbeat.scheduler.replica.step_plan import StepPlan

REFUSED = "queue_too_long"
"""Reason of a rejection, in the counts."""
SHORTEST_RETRY = 0.05
"""Seconds; a client that comes back sooner finds the same step under way."""
_MEMORY_SECONDS = 30.0
"""Time constant of the pace."""
_PRIOR_SECONDS = 0.1
"""What "prompts get all the time" weighs before anything was seen."""
_SLOWEST = 1 / 100
"""The pace that best effort is taken to have at least: else its wait would be infinite."""


class _Pace:
    """Seconds of prefill work that are begun in a second in which some waits, exponentially weighted.

    While none waits it returns to "all the time": what held prompts up then is over, for all that is known.
    """

    def __init__(self) -> None:
        self._begun = self._watched = _PRIOR_SECONDS
        self._last = 0.0
        """Until when it has counted, seconds."""
        self._some_wait = False
        """Whether prompts have waited since then."""

    def count(self, now: float, begun: float, *, some_wait: bool) -> None:
        """Count the time until now, and the work begun at its end, seconds; whether some wait from now on."""
        seconds = max(0.0, now - self._last)
        self._last = max(now, self._last)
        decay = exp(-seconds / _MEMORY_SECONDS)
        forgotten = (1 - decay) * _PRIOR_SECONDS
        self._begun = self._begun * decay + (begun if self._some_wait else forgotten)
        self._watched = self._watched * decay + (seconds if self._some_wait else forgotten)
        self._some_wait = some_wait

    def forget(self, now: float) -> None:
        """Note that nobody has waited since the last plan."""
        self._some_wait = False
        self.count(now, 0.0, some_wait=False)

    @property
    def rate(self) -> float:
        return max(self._begun / self._watched, _SLOWEST)


class QueueBound:
    """Predicts how long an arrival waits as best effort, and refuses it where that is too long.

    The prompt work that waits, by predicted step times, over the pace at which such work was begun of late.
    The pace holds all that stands between them: streams and their slots, memory, prompts with deadlines that
    overtake. Each call costs O(1). Prompts that can be in time are never refused here: the deadlines bound
    how many of them there are.

    Parameters
    ----------
    longest : the longest wait for which another is taken, seconds; infinite takes all.
    num_slots : with fewer requests waiting, one is taken whatever is predicted.
    """

    def __init__(self, cost_model: CostModel, longest: float, num_slots: int) -> None:
        self._cost_model = cost_model
        self._longest, self._num_slots = longest, num_slots
        self._all, self._best_effort = _Pace(), _Pace()

    def on_plan(self, plan: StepPlan) -> None:
        """Learn from a plan that is carried out; the queue still holds those that it admits."""
        begun = begun_best_effort = 0.0
        num_best_effort = plan.waiting.best_effort.num_requests
        for admission in plan.admissions:
            seconds = self._cost_model.of_sums(*admission.state.queued_work)
            begun += seconds
            if admission.state.sort_key[0] >= BEST_EFFORT_RANK:
                begun_best_effort += seconds
                num_best_effort -= 1
        self._all.count(plan.now, begun, some_wait=len(plan.waiting) > len(plan.admissions))
        self._best_effort.count(plan.now, begun_best_effort, some_wait=num_best_effort > 0)

    def on_arrival(self, waiting: WaitingQueue, now: float) -> None:
        """Hear of an arrival that does not wait yet. Where nobody does, nobody has since the last plan.

        Those who waited then have left (aborted, or ended for being late), and the time since says nothing of
        how fast prompts are begun.
        """
        if not waiting.best_effort.num_requests:
            self._best_effort.forget(now)
        if not waiting:
            self._all.forget(now)

    def wait(self, waiting: WaitingQueue, *, is_protected: bool = False) -> float:
        """Return how long an arrival would wait until it is begun, seconds.

        Parameters
        ----------
        is_protected : whether it goes by its deadline even once that has passed; else as best effort.
        """
        best_effort, ranked = self._seconds(waiting.best_effort), self._seconds(waiting.ranked)
        if is_protected:
            return ranked / self._all.rate
        return max(best_effort / self._best_effort.rate, (best_effort + ranked) / self._all.rate)

    def refusal(self, waiting: WaitingQueue, *, is_protected: bool = False) -> Overloaded | None:
        """Return why another is not taken that would be late; None where it is."""
        if len(waiting) < self._num_slots or self._longest == inf:
            return None
        wait = self.wait(waiting, is_protected=is_protected)
        if wait <= self._longest:
            return None
        return self._overloaded(
            f"{len(waiting)} requests wait; one more that cannot be in time would be begun in {wait:.0f} s, "
            f"later than may be (max_queue_seconds {self._longest:g}); try again later",
            waiting,
            wait,
        )

    def overdue(self, waiting: WaitingQueue) -> Overloaded:
        """Return why one is ended that was taken."""
        return self._overloaded(
            f"the request has waited {OVERDUE:g} times as long as may be (max_queue_seconds "
            f"{self._longest:g}), as others that can be in time left nothing over; try again later",
            waiting,
            self.wait(waiting),
        )

    def _overloaded(self, message: str, waiting: WaitingQueue, wait: float) -> Overloaded:
        # How long it takes until another is taken, if no other arrives.
        until_short = wait * (len(waiting) - self._num_slots + 1) / max(len(waiting), 1)
        retry_after = max(min(wait - self._longest, until_short), SHORTEST_RETRY)
        return Overloaded(message, code="server_overloaded", retry_after=retry_after, reason=REFUSED)

    def _seconds(self, queued: QueuedWork) -> float:
        return self._cost_model.of_sums(queued.num_tokens, queued.num_pairs)
