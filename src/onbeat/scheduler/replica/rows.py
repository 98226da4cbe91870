"""The rows of a step: requests advanced by what they run, and taken back by drafts that were rejected.

A request with drafts has more tokens to catch up with: the step computes its last token and the drafts
behind it, and samples after each. What is planned before the result is known counts on all of them, so a
later step may be planned meanwhile; the result then takes back what was rejected.

These loops run for each row of each step, and are written flat for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from onbeat.core.request import TokenLogprobs
from onbeat.core.step import AdmittedRequest, BatchShape, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from onbeat.scheduler.replica.kv import KVCacheManager
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.request_table import RequestTable
from onbeat.scheduler.replica.step_plan import StepPlan

SampledRow = tuple[list[int], list[TokenLogprobs] | None, int, int | None]
"""Tokens, their log-probabilities, drafts verified, drafts available."""

DECODE = ScheduledRequest("", 0, 1, (), samples=True)
"""The row of each plain decode of a step whose rows nobody reads."""

new_tuple = tuple.__new__
"""Makes a named tuple without the call of its own constructor: `new_tuple(ScheduledRequest, (...))`."""


def commit_rows(
    plan: StepPlan, table: RequestTable, shape: BatchShape, *, now: float, step_id: int
) -> tuple[list[ScheduledRequest], list[RequestState], list[AdmittedRequest]]:
    """Advance the requests of a step, and admit those that join the batch with it.

    Parameters
    ----------
    shape : gets the rows.
    now : when the step is planned, seconds.

    Returns
    -------
    The rows, the request of each, and whom the model runner must hear of.
    """
    admitted = table.take_unannounced()
    states = plan.decodes.copy()
    rows = _decode_rows(states, plan.num_drafts, table, shape)
    shape.num_draft_passes = plan.num_draft_passes
    for _, num_read, num_tokens in plan.catch_ups:
        shape.add_catch_up(num_read, num_tokens)
    for state, num_new in plan.chunks:
        if table.kv.num_tables > 1:
            table.kv.slide(state)
        rows.append(advance_chunk(state, num_new, shape))
        states.append(state)
    for admission in plan.admissions:
        state = admission.state
        admitted.append(table.admit(admission, now, step_id))
        rows.append(advance_chunk(state, admission.num_new_tokens, shape))
        states.append(state)
    if table.num_guided or table.num_pooled:
        for place, (state, row) in enumerate(zip(states, rows, strict=True)):
            if not row.samples:
                continue
            if state.is_guided:
                shape.num_guided_rows += 1
                state.last_step_id = step_id
            # What completes a prompt that is pooled counts as in flight until its embedding is there, but
            # has no logits.
            if state.request.pooling is not None:
                shape.num_lm_head_rows -= 1
                rows[place] = row._replace(samples=False)
    return rows, states, admitted


def _decode_rows(
    states: list[RequestState], num_drafts: list[int], table: RequestTable, shape: BatchShape
) -> list[ScheduledRequest]:
    """Advance requests by a token and their drafts; return their rows, with the KV blocks that these need.

    Parameters
    ----------
    num_drafts : of each state; 0 for a padding row, which runs its last token again. Empty: none has any.
    shape : gets the rows.
    """
    if num_drafts:
        rows, context, num_sampling = _draft_rows(states, num_drafts, table.kv)
    else:
        rows, context, num_sampling = _plain_rows(states, table)
    # `BatchShape.add_verify` of all rows at once.
    num_decodes, num_all_drafts = len(states), sum(num_drafts)
    shape.num_new_tokens += num_decodes + num_all_drafts
    shape.num_sequences += num_decodes
    shape.num_decodes += num_decodes
    shape.decode_context_tokens += context + num_decodes + num_all_drafts
    shape.num_lm_head_rows += num_sampling + num_all_drafts
    shape.num_draft_tokens += num_all_drafts
    shape.num_verify_rows += len(num_drafts) - num_drafts.count(0)
    return rows


def _plain_rows(states: list[RequestState], table: RequestTable) -> tuple[list[ScheduledRequest], int, int]:
    """Return the rows of `_decode_rows` without drafts, what they read, and how many sample."""
    rows: list[ScheduledRequest] = []
    context = num_sampling = 0
    running, kv, makes_rows = RequestStatus.RUNNING, table.kv, table.makes_rows
    for state in states:
        num_computed = state.num_computed_tokens
        context += num_computed
        block_ids: tuple[int, ...] = ()
        if num_computed >= state.num_allocated_tokens:
            block_ids = kv.grow(state, num_computed + 1)
        samples = state.status is running
        if samples:
            state.num_computed_tokens = num_computed + 1
            state.num_in_flight_tokens += 1
            num_sampling += 1
        if makes_rows:
            rows.append(
                new_tuple(ScheduledRequest, (state.request_id, num_computed, 1, block_ids, samples, 0))
            )
    return (rows if makes_rows else [DECODE] * len(states)), context, num_sampling


def _draft_rows(
    states: list[RequestState], num_drafts: list[int], kv: KVCacheManager
) -> tuple[list[ScheduledRequest], int, int]:
    """Return the rows of `_decode_rows` with drafts; see `_plain_rows`."""
    rows: list[ScheduledRequest] = []
    context = num_sampling = 0
    for state, num in zip(states, num_drafts, strict=True):
        num_computed, num_new = state.num_computed_tokens, 1 + num
        context += num_computed
        block_ids: tuple[int, ...] = ()
        if num_computed + num_new > state.num_allocated_tokens:
            block_ids = kv.grow(state, num_computed + num_new)
        samples = state.status is RequestStatus.RUNNING
        if samples:
            state.num_computed_tokens += num_new
            state.num_in_flight_tokens += num_new
            state.num_in_flight_drafts += num
            num_sampling += 1
        rows.append(ScheduledRequest(state.request_id, num_computed, num_new, block_ids, samples, num))
    return rows, context, num_sampling


def advance_chunk(state: RequestState, num_new: int, shape: BatchShape) -> ScheduledRequest:
    """Plan a chunk or a new request's row; the blocks were reserved at admission, so it takes none."""
    num_computed = state.num_computed_tokens
    samples = num_computed + num_new == state.num_tokens + state.num_in_flight_tokens
    state.num_computed_tokens += num_new
    state.num_in_flight_tokens += samples
    shape.add(num_computed, num_new, samples=num_new if state.scores_prompt else samples)
    return ScheduledRequest(state.request_id, num_computed, num_new, (), samples)


def sampled_rows(result: ModelRunnerOutput) -> Iterator[SampledRow]:
    """Return what each row with `samples` gave."""
    return zip(
        result.sampled_token_ids,
        repeat(None) if result.logprobs is None else result.logprobs,
        repeat(0) if result.num_drafted is None else result.num_drafted,
        repeat(None) if result.num_available is None else result.num_available,
        strict=False,  # some repeat for ever
    )


def correct_shape(scheduled: SchedulerOutput, drafted: list[int]) -> None:
    """Take the drafts out of a step's shape that were planned but could not be proposed.

    Parameters
    ----------
    drafted : `ModelRunnerOutput.num_drafted`.
    """
    if not scheduled.shape.num_draft_tokens:
        return
    shape = scheduled.shape
    sampling = (row for row in scheduled.rows if row.samples)
    for row, num_drafted in zip(sampling, drafted, strict=True):
        num_missing = row.num_draft_tokens - num_drafted
        if num_missing:
            shape.num_new_tokens -= num_missing
            shape.num_draft_tokens -= num_missing
            shape.num_lm_head_rows -= num_missing
            shape.decode_context_tokens -= num_missing
            shape.num_verify_rows -= num_drafted == 0
