"""Count what a policy with deadlines plans and decides: budgets, slack, best effort, predicted waiting."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from onbeat.core.fleet import ReplicaId
from onbeat.core.step import SchedulerState, StepStats
from onbeat.metrics.buckets import GAP_SECONDS, SLACK_SECONDS
from onbeat.metrics.histogram import Histogram


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """What the policy expects of its queue."""

    predicted_wait: float
    """Seconds until a prompt with a deadline would be begun."""
    queue_seconds: float
    """Seconds until one that is not in time, or has no deadline, would be begun."""


class PolicyCounts:
    """Counts steps, and remembers the last state that a policy with deadlines reported."""

    def __init__(self) -> None:
        self.num_chunk_tokens = 0
        """Prompt tokens that steps have computed."""
        self.budget = Histogram(GAP_SECONDS)
        self.num_over_budget = 0
        """Steps that took longer than their budget."""
        self.slack = Histogram(SLACK_SECONDS)
        self._states: dict[ReplicaId, SchedulerState] = {}
        """By replica, as it said last."""
        self._before = SchedulerState()
        """What lives of replicas that are over have counted."""
        self._has_lost = False

    @property
    def state(self) -> SchedulerState | None:
        """Of all replicas together; None where none keeps deadlines.

        Counts are added up; of waiting times the shortest is taken.
        """
        states = list(self._states.values())
        if not self._has_lost and len(states) <= 1:
            return states[0] if states else None
        if not states:
            return self._before
        rejected = Counter(self._before.num_rejected)
        for each in states:
            rejected.update(each.num_rejected)
        return SchedulerState(
            num_best_effort=sum(each.num_best_effort for each in states),
            num_relegated=sum(each.num_relegated for each in states) + self._before.num_relegated,
            num_missed=sum(each.num_missed for each in states) + self._before.num_missed,
            num_rejected=dict(rejected),
            predicted_wait=min(each.predicted_wait for each in states),
            queue_seconds=min(each.queue_seconds for each in states),
        )

    def forget(self, replica: ReplicaId) -> None:
        """Keep of a replica whose process has ended what it has counted alone."""
        if (state := self._states.pop(replica, None)) is not None:
            self._has_lost = True
            self._before.num_relegated += state.num_relegated
            self._before.num_missed += state.num_missed
            self._before.num_rejected = dict(Counter(self._before.num_rejected) + Counter(state.num_rejected))

    def on_step(self, stats: StepStats, replica: ReplicaId = "r0") -> None:
        """Count a step of a replica."""
        self.num_chunk_tokens += stats.shape.num_chunk_tokens
        if stats.budget_seconds is not None:
            self.budget.observe(stats.budget_seconds)
            self.num_over_budget += stats.end - stats.start > stats.budget_seconds
        if stats.scheduler is not None:
            self._take(replica, stats.scheduler)
            self.slack.observe_many(stats.scheduler.decode_slacks)

    def _take(self, replica: ReplicaId, state: SchedulerState) -> None:
        known = self._states.get(replica)
        if known is not None and _num_decided(state) < _num_decided(known):
            self.forget(replica)  # it counts from nothing: another life
        self._states[replica] = state

    def load(self, *, num_open: int) -> LoadEstimate | None:
        """Return what the policy expects; None without one that estimates.

        Parameters
        ----------
        num_open : requests that have not ended.
        """
        state = self.state
        if state is None:
            return None
        return LoadEstimate(
            predicted_wait=state.predicted_wait if num_open else 0.0,
            queue_seconds=state.queue_seconds if num_open else 0.0,
        )


def _num_decided(state: SchedulerState) -> int:
    """Return a count that only rises while a process lives."""
    return state.num_relegated + state.num_missed + sum(state.num_rejected.values())
