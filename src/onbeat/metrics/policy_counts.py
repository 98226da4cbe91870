"""Count what a policy with deadlines plans and decides: budgets, slack, best effort, predicted waiting.

Of speculation it is what was planned, and what came of it: acceptance, draft lengths, goodput.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from onbeat.core.fleet import ReplicaId
from onbeat.core.step_stats import DraftStats, SchedulerState, StepStats
from onbeat.metrics.declare import counter, histogram, shown
from onbeat.metrics.histogram import DRAFT_LENGTHS, GAP_SECONDS, SLACK_SECONDS, Histogram


@dataclass(slots=True)
class PolicyCounts:
    """Counts steps, and remembers the last state that a policy with deadlines reported."""

    num_chunk_tokens: int = counter("chunk_tokens_total", "prompt tokens that steps have computed")
    budget: Histogram = histogram(
        "step_budget_seconds",
        "time that the policy allowed a step; steps that nothing bound are not in it",
        GAP_SECONDS,
    )
    num_over_budget: int = counter("steps_over_budget_total", "steps that took longer than their budget")
    slack: Histogram = histogram(
        "decode_slack_seconds",
        "at each step, of each running stream: time to its next deadline; below 0 is late",
        SLACK_SECONDS,
    )
    _states: dict[ReplicaId, SchedulerState] = field(default_factory=dict)
    """By replica, as it said last."""
    _before: SchedulerState = field(default_factory=SchedulerState)
    """What lives of replicas that are over have counted."""
    _has_lost: bool = False

    @shown("requests_relegated_total")
    def num_relegated(self) -> int | None:
        """Requests turned into best effort, at arrival or later."""
        return None if self.state is None else self.state.num_relegated

    @shown("requests_lost_total")
    def num_missed(self) -> int | None:
        """Running requests that missed their objective."""
        return None if self.state is None else self.state.num_missed

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


def _num_decided(state: SchedulerState) -> int:
    """Return a count that only rises while a process lives."""
    return state.num_relegated + state.num_missed + sum(state.num_rejected.values())


@dataclass(slots=True)
class SpeculationCounts:
    """Counts steps that had decode rows while drafts could be planned; without speculation there are none."""

    length: Histogram = histogram(
        "spec_draft_length", "drafts planned for a decode row, rows with none included", DRAFT_LENGTHS
    )
    drafted_at: Counter[int] = counter(
        "spec_draft_tokens_at_position_total", "drafts verified, the first of a row at 0", "position"
    )
    accepted_at: Counter[int] = counter(
        "spec_accepted_tokens_at_position_total", "of these, drafts accepted", "position"
    )
    num_tokens: int = counter("spec_delivered_tokens_total", "output tokens of decode rows")
    expected_tokens: float = counter(
        "spec_expected_tokens_total", "output tokens expected of them when their steps were planned"
    )

    @shown("spec_drafts_total")
    def num_drafts(self) -> int:
        """Decode rows that verified drafts."""
        return self.drafted_at[0]

    @shown("spec_draft_tokens_total")
    def num_drafted_tokens(self) -> int:
        """Drafts verified; the proposer may have fewer than were planned."""
        return self.drafted_at.total()

    @shown("spec_accepted_tokens_total")
    def num_accepted_tokens(self) -> int:
        """Of these, drafts accepted, those behind the end of an answer too."""
        return self.accepted_at.total()

    def on_step(self, drafts: DraftStats) -> None:
        """Count a step."""
        for length, num_rows in enumerate(drafts.lengths):
            if num_rows:
                self.length.observe_many([length] * num_rows)
        for position, count in enumerate(drafts.drafted_at):
            self.drafted_at[position] += count
            self.accepted_at[position] += 0
        for position, count in enumerate(drafts.accepted_at):
            self.accepted_at[position] += count
        self.num_tokens += drafts.num_tokens
        self.expected_tokens += drafts.expected_tokens
