"""What is told of the steps of a scheduler, live and simulated."""

from __future__ import annotations

from typing import NamedTuple

from onbeat.core.step import SchedulerOutput
from onbeat.core.step_stats import StepStats
from onbeat.scheduler.replica.scheduler import Scheduler


class Planned(NamedTuple):
    """What planning has done."""

    num_preemptions: int = 0
    num_prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    num_prefix_hits: int = 0
    """Of these, tokens found."""


class StepReporter:
    """Describes the steps of a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._reported = Planned()
        """Of the whole so far, what has been told."""

    def take_planned(self) -> Planned:
        """Return what planning has done since this was asked last."""
        scheduler, before = self._scheduler, self._reported
        self._reported = now = Planned(
            scheduler.table.num_preemptions,
            scheduler.table.num_prefix_queries,
            scheduler.table.num_prefix_hits,
        )
        return Planned(*(after - each for after, each in zip(now, before, strict=True)))

    def stats(self, scheduled: SchedulerOutput, planned: Planned, *, start: float, end: float) -> StepStats:
        """Describe a step that has been updated.

        Parameters
        ----------
        planned : what its planning did.
        start, end : when it began and ended, seconds.
        """
        scheduler, rows = self._scheduler, scheduled.rows if scheduled.shape.num_chunks else ()
        return StepStats(
            step_id=scheduled.step_id,
            start=start,
            end=end,
            shape=scheduled.shape,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=scheduler.config.num_blocks,
            num_used_blocks=-(-scheduler.kv.pool.num_used_blocks // scheduler.kv.num_tables),
            num_kept_blocks=len(scheduler.kv.pool.kept.until) // scheduler.kv.num_tables,
            num_kept_states=scheduler.kv.snapshots.num_used,
            **planned._asdict(),
            chunk_request_ids=[
                row.request_id for row in rows if row.num_new_tokens > 1 + row.num_draft_tokens
            ],
            budget_seconds=scheduled.budget,
            budget_request_id=scheduled.budget_request_id,
            scheduler=scheduler.planner.state(),
            drafts=scheduler.results.drafts,
        )
