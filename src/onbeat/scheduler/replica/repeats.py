"""Steps of decodes alone that are run several times over, while nothing but token counts changes."""

from __future__ import annotations

from collections.abc import Iterable

from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.kv_manager import KVCacheManager
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus


def count_repeats(decodes: Iterable[RequestState], shape: BatchShape, kv: KVCacheManager) -> int:
    """Return how often a committed step may be run before a request ends or may lack a block.

    Whoever waits could not be admitted, and while only token counts grow that stays so.

    Parameters
    ----------
    decodes : the rows of the step, each advanced by its first token already.
    shape : of the step; one with chunks is run once.
    """
    if shape.num_chunks:
        return 1
    num_left = [
        state.max_total_tokens - state.num_tokens
        for state in decodes
        if state.status is RequestStatus.RUNNING
    ]
    if not num_left or shape.num_lm_head_rows != len(num_left):
        return 1
    # Every row may be about to need a block, and then one more each block_size tokens.
    num_blocks_each = kv.pool.num_free_blocks // len(num_left)
    return max(1, min(*num_left, (num_blocks_each - 1) * kv.block_size + 1))


def advance_repeats(states: Iterable[RequestState], num_more: int, kv: KVCacheManager) -> None:
    """Advance the rows of a step that was run `num_more` times beyond the first."""
    for state in states:
        if state.status is RequestStatus.RUNNING:
            num_computed = state.num_computed_tokens = state.num_computed_tokens + num_more
            if num_computed > state.num_allocated_tokens:
                kv.grow(state, num_computed)
