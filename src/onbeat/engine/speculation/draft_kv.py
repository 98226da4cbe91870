"""Which tokens' KV a draft model has: by request, and by block for who gets the block from the prefix cache.

The draft model's KV lies in blocks of its own that have the ids of the target's. A block whose content the
target still has may be filled by the draft model wholly, in part or not at all, for the draft model runs only
when drafts are asked for.
"""

from __future__ import annotations

import numpy as np

from onbeat.engine.attention.base import IntArray
from onbeat.engine.input_batch import InputBatch

_NEVER = np.iinfo(np.int64).max


class DraftKV:
    """Keeps count of the draft model's KV.

    Parameters
    ----------
    num_blocks, block_size : of the KV cache.
    max_num_seqs : request slots.
    """

    def __init__(self, *, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self._block_size = block_size
        self._num_filled = np.zeros(num_blocks, np.int64)
        """Leading tokens of each block that the draft model has filled."""
        self._num_seen_blocks = np.full(max_num_seqs, _NEVER, np.int64)
        """Blocks of each slot's table that are known not to be new; free slots have no new ones."""
        self._num_valid: dict[int, int] = {}
        """Leading tokens of each request that have KV; set when it is first asked for."""
        self._num_cached_blocks: dict[int, int] = {}
        """Blocks that each request got from the prefix cache."""
        self._batch: InputBatch | None = None

    def admit(self, batch: InputBatch, slot: int, num_computed_tokens: int) -> None:
        """Take in a request whose first blocks hold so many tokens by the prefix cache."""
        self._batch = batch
        num_cached_blocks = num_computed_tokens // self._block_size
        self._num_cached_blocks[slot] = num_cached_blocks
        self._num_seen_blocks[slot] = num_cached_blocks

    def release(self, slot: int) -> None:
        """Forget a request; what its blocks hold stays known."""
        if slot in self._num_cached_blocks and self._batch is not None:
            self._reset_new_blocks(self._batch, slot)
            self._num_seen_blocks[slot] = _NEVER
            del self._num_cached_blocks[slot]
            self._num_valid.pop(slot, None)

    def sync(self, batch: InputBatch) -> None:
        """Notice the blocks that requests were given since: what they held is another request's."""
        for slot in np.flatnonzero(batch.num_blocks_S > self._num_seen_blocks):
            self._reset_new_blocks(batch, int(slot))

    def num_valid(self, batch: InputBatch, slot: int) -> int:
        """Return how many leading tokens of a request have KV; call `sync` first."""
        known = self._num_valid.get(slot)
        if known is None:
            known = self._num_valid[slot] = self._num_reusable(batch, slot)
        return known

    def extend(self, batch: InputBatch, slot: int, num_tokens: int) -> None:
        """Count the tokens up to `num_tokens`, which are known to be the request's, as filled."""
        start, size = self._num_valid[slot], self._block_size
        self._num_valid[slot] = num_tokens
        blocks = np.arange(start // size, -(-num_tokens // size))
        block_ids = batch.block_tables_SB[slot, blocks]
        num_filled = np.minimum(num_tokens - blocks * size, size)
        self._num_filled[block_ids] = np.maximum(self._num_filled[block_ids], num_filled)

    def invalidate(self, block_ids: IntArray) -> None:
        """Count blocks as empty: what the model wrote there is of no use."""
        self._num_filled[block_ids] = 0

    def _num_reusable(self, batch: InputBatch, slot: int) -> int:
        """Return how many tokens of the blocks from the prefix cache are filled without a gap."""
        num_blocks = self._num_cached_blocks[slot]
        num_filled = self._num_filled[batch.block_tables_SB[slot, :num_blocks]]
        partial = np.flatnonzero(num_filled < self._block_size)
        if not len(partial):
            return num_blocks * self._block_size
        first = int(partial[0])
        return first * self._block_size + int(num_filled[first])

    def _reset_new_blocks(self, batch: InputBatch, slot: int) -> None:
        start, end = int(self._num_seen_blocks[slot]), int(batch.num_blocks_S[slot])
        self._num_filled[batch.block_tables_SB[slot, start:end]] = 0
        self._num_seen_blocks[slot] = max(start, end)
