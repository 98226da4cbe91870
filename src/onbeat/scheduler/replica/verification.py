"""Rows that verify draft tokens: planned as if all were accepted, taken back where they were not.

A request with drafts has more tokens to catch up with: the step computes its last token and the drafts
behind it, and samples after each. What is planned before the result is known counts on all of them, so a
later step may be planned meanwhile; the result then takes back what was rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from onbeat.core.request import TokenLogprobs
from onbeat.core.step import BatchShape, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from onbeat.scheduler.replica.kv_manager import KVCacheManager
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus

SampledRow = tuple[list[int], list[TokenLogprobs] | None, int, int | None]
"""Tokens, their log-probabilities, drafts verified, drafts available."""

new_tuple = tuple.__new__
"""Makes a named tuple without the call of its own constructor: `new_tuple(ScheduledRequest, (...))`."""


def sampled_rows(result: ModelRunnerOutput) -> Iterator[SampledRow]:
    """Return what each row with `samples` gave."""
    return zip(
        result.sampled_token_ids,
        repeat(None) if result.logprobs is None else result.logprobs,
        repeat(0) if result.num_drafted is None else result.num_drafted,
        repeat(None) if result.num_available is None else result.num_available,
        strict=False,  # some repeat for ever
    )


def advance_with_drafts(
    states: list[RequestState], num_drafts: list[int], kv: KVCacheManager, shape: BatchShape
) -> list[ScheduledRequest]:
    """Plan decode rows with drafts, and give them the KV blocks that these need.

    Parameters
    ----------
    num_drafts : of each state; 0 for a padding row, which runs its last token again.
    shape : gets the rows.
    """
    rows: list[ScheduledRequest] = []
    context = num_sampling = num_verifying = 0
    running = RequestStatus.RUNNING
    for state, num in zip(states, num_drafts, strict=True):
        num_computed, num_new = state.num_computed_tokens, 1 + num
        block_ids: tuple[int, ...] = ()
        if num_computed + num_new > state.num_allocated_tokens:
            block_ids = kv.grow(state, num_computed + num_new)
        samples = state.status is running
        if samples:
            state.advance(num_new, num_new, num)
            num_sampling += num_new
        context += num_computed
        num_verifying += num > 0
        rows.append(
            new_tuple(ScheduledRequest, (state.request_id, num_computed, num_new, block_ids, samples, num))
        )
    num_rows, num_all_drafts = len(rows), sum(num_drafts)
    # `BatchShape.add_verify` of all rows at once.
    shape.num_new_tokens += num_rows + num_all_drafts
    shape.num_sequences += num_rows
    shape.num_decodes += num_rows
    shape.decode_context_tokens += context + num_rows + num_all_drafts
    shape.num_lm_head_rows += num_sampling
    shape.num_draft_tokens += num_all_drafts
    shape.num_verify_rows += num_verifying
    return rows


def take_back_rejected(state: RequestState, num_planned: int, num_sampled: int) -> None:
    """Let the tokens behind the first rejected draft count as not computed; their KV slots are used again.

    Parameters
    ----------
    num_planned : drafts of the row.
    num_sampled : tokens that it gave: one more than drafts were accepted.
    """
    state.retract(1 + num_planned - num_sampled)


def correct_shape(scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
    """Take the drafts out of a step's shape that were planned but could not be proposed."""
    if result.num_drafted is None or not scheduled.shape.num_draft_tokens:
        return
    shape = scheduled.shape
    sampling = (row for row in scheduled.rows if row.samples)
    for row, num_drafted in zip(sampling, result.num_drafted, strict=True):
        num_missing = row.num_draft_tokens - num_drafted
        if num_missing:
            shape.num_new_tokens -= num_missing
            shape.num_draft_tokens -= num_missing
            shape.num_lm_head_rows -= num_missing
            shape.decode_context_tokens -= num_missing
            shape.num_verify_rows -= num_drafted == 0
