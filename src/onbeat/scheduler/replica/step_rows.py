"""The rows of a step, and the requests advanced by what they run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from onbeat.core.step import AdmittedRequest, BatchShape, ScheduledRequest
from onbeat.scheduler.replica.kv_manager import KVCacheManager
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.request_table import RequestTable
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.scheduler.replica.verification import advance_with_drafts, new_tuple


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


def oldest_row(in_flight: Iterable[StepInFlight], state: RequestState) -> ScheduledRequest | None:
    """Return the first row in flight of a request since it was last admitted; None where it has none."""
    for step_id, states, rows, *_ in in_flight:
        if step_id >= state.admitted_step_id:
            for other, row in zip(states, rows, strict=True):
                if other is state:
                    return row
    return None


class CommittedRows(NamedTuple):
    """What a plan has become."""

    rows: list[ScheduledRequest]
    states: list[RequestState]
    """Of each row."""
    admitted: list[AdmittedRequest]
    """Whom the model runner must hear of."""


def commit_rows(
    plan: StepPlan, table: RequestTable, shape: BatchShape, *, now: float, step_id: int
) -> CommittedRows:
    """Advance the requests of a step, and admit those that join the batch with it.

    Parameters
    ----------
    shape : gets the rows.
    now : when the step is planned, seconds.
    """
    admitted = table.take_unannounced()
    states = plan.decodes.copy()
    if plan.num_drafts:
        rows = advance_with_drafts(states, plan.num_drafts, table.kv, shape)
        shape.num_draft_passes = plan.num_draft_passes
        for _, num_read, num_tokens in plan.catch_ups:
            shape.add_catch_up(num_read, num_tokens)
    else:
        rows = decode_rows(states, table.kv, shape)
    for state, num_new in plan.chunks:
        rows.append(advance_chunk(state, num_new, shape))
        states.append(state)
    for admission in plan.admissions:
        state = admission.state
        admitted.append(table.admit(admission, now, step_id))
        rows.append(advance_chunk(state, admission.num_new_tokens, shape))
        states.append(state)
    return new_tuple(CommittedRows, (rows, states, admitted))


def decode_rows(states: list[RequestState], kv: KVCacheManager, shape: BatchShape) -> list[ScheduledRequest]:
    """Advance requests by one token each; return their rows, with the KV blocks that these need.

    Parameters
    ----------
    shape : gets the rows.
    """
    rows: list[ScheduledRequest] = []
    context = num_sampling = 0
    running = RequestStatus.RUNNING
    for state in states:
        num_computed = state.num_computed_tokens
        context += num_computed
        block_ids: tuple[int, ...] = ()
        if num_computed >= state.num_allocated_tokens:
            block_ids = kv.grow(state, num_computed + 1)
        samples = state.status is running
        if samples:  # as `advance` does, without a call for each; a padding row runs its last token again
            state.num_computed_tokens = num_computed + 1
            state.num_in_flight_tokens += 1
            num_sampling += 1
        rows.append(new_tuple(ScheduledRequest, (state.request_id, num_computed, 1, block_ids, samples, 0)))
    num_decodes = len(states)
    shape.num_new_tokens += num_decodes
    shape.num_sequences += num_decodes
    shape.num_decodes += num_decodes
    shape.decode_context_tokens += context + num_decodes
    shape.num_lm_head_rows += num_sampling
    return rows


def advance_chunk(state: RequestState, num_new: int, shape: BatchShape) -> ScheduledRequest:
    """Plan a chunk or a new request's row; the blocks were reserved at admission, so it takes none."""
    num_computed = state.num_computed_tokens
    samples = num_computed + num_new == state.num_tokens + state.num_in_flight_tokens
    state.advance(num_new, samples)
    shape.add(num_computed, num_new, samples=samples)
    return ScheduledRequest(state.request_id, num_computed, num_new, (), samples)
