"""KV blocks where layers with a window have block tables of their own."""

from __future__ import annotations

from collections.abc import Sequence

from onbeat.core.hashing import BlockHash
from onbeat.core.step import NewPages
from onbeat.scheduler.replica.kv import KVCacheManager
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.scheduler_config import SchedulerConfig


class WindowedKV(KVCacheManager):
    """Gives back what the windows of requests have passed.

    Layers with a window read the last tokens only. All tables have their blocks from one pool, and a request
    gives back those that its windows have passed (Zhang et al., "Jenga", SOSP 2025). Their content stays
    findable while nobody needs the room.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._window = config.window_length
        self._windows = config.windows
        self._num_groups, self._most_window_blocks = self._windows

    def num_blocks_for(self, num_tokens: int, num_requests: int = 1) -> int:
        """Return the blocks of all tables that hold so many tokens of requests, and the slots behind them."""
        return self._windows.num_blocks(super().num_blocks_for(num_tokens), num_requests)

    def _within_windows(self, state: RequestState, block_ids: list[int]) -> list[int]:
        """Return the longest prefix of cached blocks of which the last window is cached, too."""
        end = len(block_ids)
        for index in range(len(block_ids) - 1, -1, -1):
            if index < self._first_block(end * self.block_size):
                break
            if not self._pages_of(state.block_hashes[index]):
                end = index
        return block_ids[:end]

    def hold(self, state: RequestState, cached_block_ids: list[int]) -> None:
        """Keep what `match` has found of a request until it is admitted."""
        super().hold(state, cached_block_ids)
        num_cached = len(cached_block_ids)
        state.num_passed_blocks = self._first_block(num_cached * self.block_size)
        hashes = state.block_hashes[state.num_passed_blocks : num_cached]
        state.page_ids = [page_id for each in hashes for page_id in self._pages_of(each)]
        self.pool.hold(state.page_ids)
        self.tell_pages(state)

    def adopt(self, state: RequestState, block_ids: list[int], num_computed: int) -> None:
        """Give a new request blocks that hold the KV of its first tokens, those of its windows last."""
        first = self._first_block(num_computed)
        num_filled = -(-(num_computed + self._num_lookahead) // self.block_size)
        end = num_filled + (num_filled - first) * self._num_groups
        self.pool.release(block_ids[end:])
        super().adopt(state, block_ids[:num_filled], num_computed)
        state.page_ids, state.num_passed_blocks = block_ids[num_filled:end], first
        self.grow(state, state.num_tokens)

    def moved_ids(self, state: RequestState) -> tuple[int, ...]:
        """Return the blocks of a request, in no step, that hold what goes with it, those of windows last."""
        self.slide(state)
        block_ids = super().moved_ids(state)
        num_pages = (len(block_ids) - state.num_passed_blocks) * self._num_groups
        return (*block_ids, *state.page_ids[:num_pages])

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        """Extend the block tables to hold `num_tokens`; return the new ids of the first."""
        if new_block_ids := super().grow(state, num_tokens):
            self.slide(state)
        return new_block_ids

    def grow_each(self, states: Sequence[RequestState]) -> None:
        """Extend the block tables of requests in turn to hold what is computed of them."""
        for state in states:
            self.grow(state, state.num_computed_tokens)

    def slide(self, state: RequestState) -> None:
        """Give back what the windows of a request have passed, before the step that computes its next tokens.

        What a prompt gives back it takes again for the tokens to come: these were counted at its admission.
        """
        num_certain = state.num_computed_tokens - state.num_in_flight_drafts
        first = max(self._first_block(num_certain), state.num_passed_blocks)
        num_passed = (first - state.num_passed_blocks) * self._num_groups
        self.pool.release(state.page_ids[:num_passed])
        del state.page_ids[:num_passed]
        state.num_passed_blocks, num_held = first, len(state.page_ids)
        num_wanted = min(len(state.block_ids) - first, self._most_window_blocks) * self._num_groups
        state.page_ids += self.pool.allocate(max(num_wanted - num_held, 0))
        self.tell_pages(state, num_held)

    def tell_pages(self, state: RequestState, start: int = 0) -> None:
        """Have the model runner hear of a request's pages, from one of them on, with the next step."""
        passed, page_ids = state.num_passed_blocks, tuple(state.page_ids[start:])
        first = passed + start // self._num_groups
        self.new_pages.append(NewPages(state.request_id, passed, first, page_ids))

    def _first_block(self, num_computed: int) -> int:
        """Return the first block that the windows of a request's next token reach into."""
        return max(num_computed + 1 - self._window, 0) // self.block_size

    def _pages_of(self, block_hash: BlockHash) -> list[int]:
        """Return the cached blocks of all groups for a block of tokens; none unless all are there."""
        found = [self.pool.id_of_hash.get((group, block_hash)) for group in range(self._num_groups)]
        return [page_id for page_id in found if page_id is not None] if None not in found else []

    def distrust(self, state: RequestState) -> None:
        """Let nobody go on from what a request has computed."""
        names = [(group, each) for each in state.block_hashes for group in range(self._num_groups)]
        page_ids = [page_id for name in names if (page_id := self.pool.id_of_hash.get(name)) is not None]
        self.pool.hold(page_ids)  # those that its windows have passed lie idle
        super().distrust(state)
        self.pool.unregister(page_ids)
        self.pool.release(page_ids)

    def register_full_blocks(self, state: RequestState, num_valid_tokens: int) -> range:
        """Make blocks findable whose tokens are known and computed, in each table that has them."""
        registered = super().register_full_blocks(state, num_valid_tokens)
        for index in registered:
            start = (index - state.num_passed_blocks) * self._num_groups
            for group in range(self._num_groups if start >= 0 else 0):
                self.pool.register(state.page_ids[start + group], (group, state.block_hashes[index]))
        return registered
