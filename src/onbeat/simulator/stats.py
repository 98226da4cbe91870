"""What is counted of a virtual replica's scheduler."""

from __future__ import annotations

from typing import NamedTuple

from onbeat.core.step import BatchShape, SchedulerOutput, StepStats
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.simulator.result import DraftCounts, ReplicaCounters


class PlanningCounts(NamedTuple):
    """What planning has done so far."""

    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int


def planning_counts(scheduler: Scheduler) -> PlanningCounts:
    """Return the scheduler's counts."""
    return PlanningCounts(scheduler.num_preemptions, scheduler.num_prefix_queries, scheduler.num_prefix_hits)


def step_stats(
    scheduler: Scheduler,
    scheduled: SchedulerOutput,
    counts: tuple[PlanningCounts, PlanningCounts],
    start: float,
    end: float,
) -> StepStats:
    """Describe a step that has been updated.

    Parameters
    ----------
    counts : before and after it was planned.
    start, end : when the step, or the run that it began, started and ended.
    """
    before, after = counts
    return StepStats(
        step_id=scheduled.step_id,
        start=start,
        end=end,
        shape=scheduled.shape,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_blocks=scheduler.kv.pool.num_blocks,
        num_used_blocks=scheduler.kv.pool.num_used_blocks,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        num_prefix_queries=after.num_prefix_queries - before.num_prefix_queries,
        num_prefix_hits=after.num_prefix_hits - before.num_prefix_hits,
        schedule_seconds=0.0,
        update_seconds=0.0,
        chunk_request_ids=[
            row.request_id for row in scheduled.rows if row.num_new_tokens - row.num_draft_tokens > 1
        ],
        predicted_seconds=end - start,
        budget_seconds=scheduled.budget,
        budget_request_id=scheduled.budget_request_id,
    )


def add_work(total: BatchShape, shape: BatchShape, *, first_context: int, num_steps: int) -> None:
    """Add a step, or a run of steps of which each decode reads one token more than in the step before.

    Parameters
    ----------
    first_context : `decode_context_tokens` of the first step.
    """
    num_rows = shape.num_lm_head_rows
    total.num_decodes += shape.num_decodes * num_steps
    total.num_new_tokens += shape.num_new_tokens * num_steps
    total.num_lm_head_rows += num_rows * num_steps
    total.query_key_pairs += shape.query_key_pairs * num_steps
    total.chunk_cached_tokens += shape.chunk_cached_tokens * num_steps
    more_context = num_rows * (num_steps * (num_steps - 1) // 2)
    total.decode_context_tokens += first_context * num_steps + more_context
    total.num_draft_tokens += shape.num_draft_tokens * num_steps
    total.num_draft_passes += shape.num_draft_passes * num_steps
    total.num_catch_up_tokens += shape.num_catch_up_tokens * num_steps
    total.catch_up_pairs += shape.catch_up_pairs * num_steps


def count(
    scheduler: Scheduler,
    *,
    num_steps: int,
    busy_seconds: float,
    work: BatchShape,
    drafts: DraftCounts | None = None,
) -> ReplicaCounters:
    """Sum up a replica."""
    pool = scheduler.kv.pool
    return ReplicaCounters(
        num_steps=num_steps,
        busy_seconds=busy_seconds,
        work=work,
        num_preemptions=scheduler.num_preemptions,
        num_prefix_queries=scheduler.num_prefix_queries,
        num_prefix_hits=scheduler.num_prefix_hits,
        num_blocks=pool.num_blocks,
        peak_used_blocks=pool.peak_used_blocks,
        num_leaked_blocks=pool.num_used_blocks if scheduler.num_unfinished == 0 else 0,
        drafts=drafts,
    )
