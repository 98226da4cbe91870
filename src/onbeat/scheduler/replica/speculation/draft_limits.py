"""How many drafts a row can have at all."""

from __future__ import annotations

from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.step_plan import StepPlan


def most_drafts(state: RequestState, limit: int) -> int:
    """Return how many drafts may become output of a decode row: none beyond its last token.

    Parameters
    ----------
    limit : most of any row.
    """
    if state.status is not RequestStatus.RUNNING:
        return 0
    num_left = state.max_total_tokens - state.num_tokens - state.num_in_flight_tokens - 1
    if num_left >= limit:
        return limit
    return max(0, num_left)


def fit_blocks(plan: StepPlan, state: RequestState, num_drafts: int, *, num_kept: int = 0) -> int:
    """Return as many of the drafts as find a KV slot without preemption, and set the blocks aside.

    A request's own token already has its slot, in a block that the plan has set aside where it takes one.

    Parameters
    ----------
    num_kept : free blocks that drafts leave to others.
    """
    size = plan.block_size
    num_allocated = max(state.num_allocated_tokens, -(-(state.num_computed_tokens + 1) // size) * size)
    while state.num_computed_tokens + 1 + num_drafts > num_allocated:
        if plan.num_blocks_left <= num_kept or not plan.take_block():
            return num_allocated - state.num_computed_tokens - 1
        num_allocated += size
    return num_drafts
