"""Count what a policy with deadlines plans and decides: budgets, slack, best effort, predicted waiting."""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.core.step import SchedulerState, StepStats
from onbeat.metrics.buckets import GAP_SECONDS, SLACK_SECONDS
from onbeat.metrics.histogram import Histogram

FRESH_SECONDS = 1.0
"""For so long after a step, what the policy said of its load is taken as it stands."""


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """What the policy expects of its queue."""

    predicted_wait: float
    """Seconds until a prompt with a deadline would be begun."""
    queue_seconds: float
    """Seconds until one that is not in time, or has no deadline, would be begun."""
    arrival_rate: float
    """Requests per second."""
    utilisation: float


class PolicyCounts:
    """Counts steps, and remembers the last state that a policy with deadlines reported."""

    def __init__(self) -> None:
        self.num_chunk_tokens = 0
        """Prompt tokens that steps have computed."""
        self.budget = Histogram(GAP_SECONDS)
        self.num_over_budget = 0
        """Steps that took longer than their budget."""
        self.slack = Histogram(SLACK_SECONDS)
        self.state: SchedulerState | None = None
        self._last_step = 0.0

    def on_step(self, stats: StepStats) -> None:
        """Count a step."""
        self.num_chunk_tokens += stats.shape.num_chunk_tokens
        if stats.budget_seconds is not None:
            self.budget.observe(stats.budget_seconds)
            self.num_over_budget += stats.end - stats.start > stats.budget_seconds
        if stats.scheduler is not None:
            self.state = stats.scheduler
            self._last_step = stats.end
            self.slack.observe_many(stats.scheduler.decode_slacks)

    def load(self, now: float, *, num_open: int) -> LoadEstimate | None:
        """Return what the policy expects; None without one that estimates.

        Parameters
        ----------
        now : seconds, on the clock of the steps.
        num_open : requests that have not ended.

        Notes
        -----
        An idle engine takes no steps and reports nothing: since the last one no more than one request can
        have come, which bounds the rate, and with it the utilisation.
        """
        state = self.state
        if state is None:
            return None
        silence = now - self._last_step
        share = 1.0
        if silence > FRESH_SECONDS and state.arrival_rate > 0:
            share = min(1.0, 1 / (state.arrival_rate * silence))
        return LoadEstimate(
            predicted_wait=state.predicted_wait if num_open else 0.0,
            queue_seconds=state.queue_seconds if num_open else 0.0,
            arrival_rate=state.arrival_rate * share,
            utilisation=state.utilisation * share,
        )
