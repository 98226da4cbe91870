"""Steps of decodes alone that are run several times over, while nothing but token counts changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.kv_manager import KVCacheManager
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus


def count_repeats(decodes: Sequence[RequestState], shape: BatchShape, kv: KVCacheManager) -> int:
    """Return how often a committed step may be run before a request ends or may lack a block.

    Whoever waits could not be admitted, and while only token counts grow that stays so, up to the moment at
    which a new full block can be found in the prefix cache.

    Parameters
    ----------
    decodes : the rows of the step, each advanced by its first token already.
    shape : of the step; one with chunks is run once.
    """
    if shape.num_chunks:
        return 1
    running = RequestStatus.RUNNING
    num_left = [state.max_total_tokens - state.num_tokens for state in decodes if state.status is running]
    if not num_left or shape.num_lm_head_rows != len(num_left):
        return 1
    # Every row may be about to need a block, and then one more each block_size tokens.
    num_blocks_each = kv.pool.num_free_blocks // len(num_left)
    num_repeats = min(*num_left, (num_blocks_each - 1) * kv.block_size + 1)
    if kv.enable_prefix_caching:
        num_repeats = min(num_repeats, _until_findable(decodes, kv.block_size, num_repeats))
    return max(1, num_repeats)


def _until_findable(decodes: Iterable[RequestState], block_size: int, num_repeats: int) -> int:
    """Return after how many repeats the first row fills a block whose content has a name."""
    for state in decodes:
        num_computed, hashes = state.num_computed_tokens, state.request.block_hashes
        if hashes is None or len(hashes) > (num_computed - 1) // block_size:
            num_repeats = min(num_repeats, 1 + -num_computed % block_size)
    return num_repeats


def advance_repeats(
    states: Sequence[RequestState], num_more: int, kv: KVCacheManager, *, num_in_flight: int = 0
) -> None:
    """Advance the rows of a step that was run `num_more` times beyond the first.

    Parameters
    ----------
    num_in_flight : of these runs, the last ones that have not ended.
    """
    running = RequestStatus.RUNNING
    for state in states:
        if state.status is running:  # a padding row runs its last token again and again
            num_computed = state.num_computed_tokens = state.num_computed_tokens + num_more
            state.num_in_flight_tokens += num_in_flight
            if num_computed > state.num_allocated_tokens:
                kv.grow(state, num_computed)
