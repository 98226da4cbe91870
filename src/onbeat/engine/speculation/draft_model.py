"""Drafts by a smaller model with the same tokenizer.

It has as many KV blocks as its target and uses the target's block tables, so that nobody manages a second set
of blocks (as vLLM does it). It is never told of prompts: when drafts are asked for, it catches up with what
the request has become since.

Which tokens' KV a draft model has: by request, and by block for who gets the block from the prefix cache.

The draft model's KV lies in blocks of its own that have the ids of the target's. A block whose content the
target still has may be filled by the draft model wholly, in part or not at all, for the draft model runs only
when drafts are asked for.
"""

from __future__ import annotations

import numpy as np

from onbeat.engine.attention.base import IntArray
from onbeat.engine.forward import ForwardPass
from onbeat.engine.input_batch import InputBatch
from onbeat.engine.sampler import Sampler
from onbeat.engine.speculation.guesser import Guesser, GuessRow
from onbeat.engine.speculation.proposer import DraftRow, Proposer
from onbeat.engine.speculation.speculative_config import MAX_CATCH_UP_TOKENS

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


class DraftModelProposer(Proposer):
    """Guesses with a model of its own.

    Parameters
    ----------
    forward : the draft model, with a KV cache of `num_blocks` blocks.
    num_blocks, block_size, max_num_seqs : of the target's KV cache and batch.
    vocab_size : of the target.
    max_catch_up_tokens : see `MAX_CATCH_UP_TOKENS`.
    """

    def __init__(
        self,
        forward: ForwardPass,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        vocab_size: int,
        max_catch_up_tokens: int = MAX_CATCH_UP_TOKENS,
    ) -> None:
        self.forward = forward
        self._guesser = Guesser(forward.run, Sampler(forward.config.vocab_size), vocab_size)
        self._kv = DraftKV(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs)
        self._near = block_size
        """Rows no further behind than this are not held back: they are so after any step with drafts."""
        self._max_catch_up_tokens = max_catch_up_tokens
        self._unconfirmed: dict[int, tuple[int, list[int]]] = {}
        """Drafts of each request's last proposal that have KV, and the position of the first."""
        self._broken: set[int] = set()
        """Requests on which the model gave no numbers; they get no more drafts."""

    def admit(self, batch: InputBatch, slot: int, num_computed_tokens: int) -> None:
        """Take in a request; see `Proposer.admit`."""
        self._kv.admit(batch, slot, num_computed_tokens)

    def release(self, slot: int) -> None:
        """Forget a request; see `Proposer.release`."""
        self._kv.release(slot)
        self._guesser.release(slot)
        self._unconfirmed.pop(slot, None)
        self._broken.discard(slot)

    def propose(self, batch: InputBatch, rows: list[DraftRow]) -> list[list[int]]:
        """Return the drafts of each row; none where the model is still catching up, or out of its context."""
        self._kv.sync(batch)
        places, guess_rows = self._guess_rows(batch, rows)
        drafts: list[list[int]] = [[] for _ in rows]
        if not guess_rows:
            return drafts
        guesses = self._guesser.guess(batch, guess_rows)
        for place, guess_row, found in zip(places, guess_rows, guesses.drafts, strict=True):
            self._kv.extend(batch, guess_row.slot, guess_row.end)
            if len(found) > 1:
                self._unconfirmed[guess_row.slot] = (guess_row.end, found[:-1])
            drafts[place] = found
        for index in guesses.failed:
            self._give_up(batch, guess_rows[index].slot)
        return drafts

    def touch_ahead(self) -> bool:
        """Have a little of the draft model's KV cache provided."""
        return self.forward.touch_ahead()

    def close(self) -> None:
        """Let the draft model's threads and KV cache go."""
        self.forward.close()

    def _guess_rows(self, batch: InputBatch, rows: list[DraftRow]) -> tuple[list[int], list[GuessRow]]:
        """Return which rows run and how far, those that are nearest to their ends first."""
        starts = [self._confirm(batch, row) for row in rows]
        num_left = self._max_catch_up_tokens
        places, guess_rows = [], []
        for place in sorted(range(len(rows)), key=lambda place: rows[place].num_tokens - starts[place]):
            row, start = rows[place], starts[place]
            num_behind = row.num_tokens - start
            num_drafts = self._num_in_context(row)
            if not num_drafts:
                continue
            if num_behind > self._near:
                num_taken = min(num_behind, num_left)
                num_left -= num_taken
                if num_taken < num_behind:
                    num_behind, num_drafts = num_taken, 0
            if num_behind:
                places.append(place)
                guess_rows.append(GuessRow(row.slot, start, start + num_behind, num_drafts))
        return places, guess_rows

    def _confirm(self, batch: InputBatch, row: DraftRow) -> int:
        """Return how many tokens need not be run: at most all but the last one, whose logits are wanted.

        Of the drafts before, those that became tokens of the request have KV already.
        """
        slot = row.slot
        num_valid = self._kv.num_valid(batch, slot)
        if slot in self._unconfirmed:
            start, drafts = self._unconfirmed.pop(slot)
            token_ids = batch.token_ids_SP[slot, start : row.num_tokens].tolist()
            num_same = 0
            while num_same < min(len(drafts), len(token_ids)) and drafts[num_same] == token_ids[num_same]:
                num_same += 1
            if num_same:
                num_valid = start + num_same
                self._kv.extend(batch, slot, num_valid)
        return min(num_valid, row.num_tokens - 1)

    def _num_in_context(self, row: DraftRow) -> int:
        """Return how many of the drafts the model can make within the context that it was made for."""
        if row.slot in self._broken:
            return 0
        limit = self.forward.config.max_position_embeddings
        return max(0, min(row.num_drafts, limit - row.num_tokens + 1))

    def _give_up(self, batch: InputBatch, slot: int) -> None:
        self._broken.add(slot)
        block_ids = batch.block_ids(slot)
        self.forward.scrub(block_ids)  # its blocks will be another request's
        self._kv.invalidate(block_ids)
