"""KV blocks: which are free, which can be found by their content, and which each request holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from onbeat.core.hashing import BlockHash, hash_blocks, root_hash
from onbeat.core.step import KeptState, NewPages, ScheduledRequest
from onbeat.scheduler.replica.kept_kv import KEPT_SHARE, KeptBlocks, Snapshots
from onbeat.scheduler.replica.request_state import NEVER, RequestState
from onbeat.scheduler.scheduler_config import SchedulerConfig

ContentName = BlockHash | tuple[int, BlockHash]
"""A block's hash; with the number of a group of layers with a window before it, that group's part of it."""


class BlockPool:
    """Ids, shared references and the least-recently-used order of idle cached blocks.

    A block is in one of three states: *in use* (by one request or more), *idle* (by none, its content still
    findable by hash) or *free* (by none, no content worth keeping). Idle blocks count as free space: the
    least recently used one is evicted when the free list is empty. Some idle blocks are *kept* until a time,
    for a request that is expected to come: they are evicted behind all others, and count as free all the
    same, so that nobody who runs or waits goes without for them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks
        """Blocks that `allocate` could hand out now."""
        self._fewest_free = num_blocks
        self._free_ids: list[int] = []
        """Free blocks that were in use before; those from `_num_touched` on have never been."""
        self._num_touched = 0
        self._idle_ids: OrderedDict[int, None] = OrderedDict()
        """Idle blocks that are not kept, the least recently used first."""
        self.kept = KeptBlocks(int(KEPT_SHARE * num_blocks), self._idle_ids)
        """The other idle blocks."""
        self._num_sharers: dict[int, int] = {}
        """References to a block beyond the first; most blocks are not shared and have no entry."""
        self.id_of_hash: dict[ContentName, int] = {}
        self._hash_of_id: dict[int, ContentName] = {}
        self.unsound_ids: set[int] = set()
        """Blocks that were unregistered since whoever lends blocks to others looked."""

    @property
    def num_used_blocks(self) -> int:
        """Blocks in use."""
        return self.num_blocks - self.num_free_blocks

    @property
    def peak_used_blocks(self) -> int:
        """Most blocks in use at once so far, when some were allocated."""
        return self.num_blocks - self._fewest_free

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """Count the blocks that `hold` would take out of the free space."""
        idle_ids, kept = self._idle_ids, self.kept.until
        return sum(block_id in idle_ids or block_id in kept for block_id in block_ids)

    def exclusive_ids(self, block_ids: Iterable[int]) -> list[int]:
        """Return the blocks that `release` would return to the free space."""
        num_sharers = self._num_sharers
        return [block_id for block_id in block_ids if block_id not in num_sharers]

    def hold(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to blocks that carry content."""
        for block_id in block_ids:
            if block_id in self._idle_ids:
                del self._idle_ids[block_id]
                self.num_free_blocks -= 1
            elif block_id in self.kept.until:
                self.kept.drop(block_id)
                self.num_free_blocks -= 1
            else:
                self._num_sharers[block_id] = self._num_sharers.get(block_id, 0) + 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks with one reference each; the caller has checked `num_free_blocks`.

        Blocks that were in use last come first, then those that never were, then the longest idle, then kept
        ones.
        """
        self.num_free_blocks = num_free = self.num_free_blocks - num_blocks
        assert num_free >= 0, "allocation was not planned for"
        if num_free < self._fewest_free:
            self._fewest_free = num_free
        if num_blocks == 1 and self._free_ids:
            return [self._free_ids.pop()]
        block_ids = self._free_ids[: -num_blocks - 1 : -1]
        del self._free_ids[len(self._free_ids) - len(block_ids) :]
        if len(block_ids) < num_blocks:
            start = self._num_touched
            self._num_touched = min(start + num_blocks - len(block_ids), self.num_blocks)
            block_ids += range(start, self._num_touched)
        while len(block_ids) < num_blocks:
            block_id = self._idle_ids.popitem(last=False)[0] if self._idle_ids else self.kept.pop()
            del self.id_of_hash[self._hash_of_id.pop(block_id)]
            block_ids.append(block_id)
        return block_ids

    def release(self, block_ids: Sequence[int], kept_until: float = 0.0, tenant: str = "") -> None:
        """Give up one reference to each block of a request, in the order of its tokens.

        The tail of a request becomes idle first and is evicted first, because a prefix is worth more.

        Parameters
        ----------
        kept_until : when its content is worth no more than any other, seconds; 0 of one that is not kept.
        tenant : whose it is: what may be kept is shared by tenants.
        """
        if not self._hash_of_id and not self._num_sharers:  # the usual case without a prefix cache
            self._free_ids += reversed(block_ids)
            self.num_free_blocks += len(block_ids)
            return
        num_sharers, hash_of_id, free_ids = self._num_sharers, self._hash_of_id, self._free_ids
        for block_id in reversed(block_ids):
            if block_id in num_sharers:
                num_sharers[block_id] -= 1
                if not num_sharers[block_id]:
                    del num_sharers[block_id]
                continue
            self.num_free_blocks += 1
            if block_id in hash_of_id:
                self._idle_ids[block_id] = None
            else:
                free_ids.append(block_id)
        if kept_until:
            self.kept.keep(block_ids, kept_until, tenant)

    def register(self, block_id: int, block_hash: ContentName) -> None:
        """Make the content of a full block findable; the first block with a content keeps the name."""
        if block_hash not in self.id_of_hash and block_id not in self._hash_of_id:
            self.id_of_hash[block_hash] = block_id
            self._hash_of_id[block_id] = block_hash

    def unregister(self, block_ids: Sequence[int]) -> None:
        """Make the content of blocks in use unfindable, so that no request reuses it."""
        self.unsound_ids.update(block_ids)
        for block_id in block_ids:
            block_hash = self._hash_of_id.pop(block_id, None)
            if block_hash is not None:
                del self.id_of_hash[block_hash]

    def check_references(self, num_references: Mapping[int, int]) -> None:
        """Raise AssertionError unless each block has as many references as its users know of.

        Parameters
        ----------
        num_references : of each block in use.
        """
        assert len(num_references) == self.num_used_blocks, "a block is held by nobody, or by a stranger"
        shared = {block_id: num - 1 for block_id, num in num_references.items() if num > 1}
        assert shared == self._num_sharers, "a block has other references than its users know of"

    def check_invariants(self) -> None:
        """Raise AssertionError unless every block is in exactly one state."""
        free, idle = {*self._free_ids, *range(self._num_touched, self.num_blocks)}, set(self._idle_ids)
        self.kept.check_invariants()
        idle |= self.kept.until.keys()
        num_free = len(self._free_ids) + self.num_blocks - self._num_touched
        assert len(free) == num_free, "a block is free twice"
        assert not free & idle, "a block is in two states"
        assert len(free) + len(idle) + self.num_used_blocks == self.num_blocks, "a block has leaked"
        assert not (free | idle) & self._num_sharers.keys(), "an unused block is shared"
        assert min(self._num_sharers.values(), default=1) >= 1
        assert idle <= self._hash_of_id.keys(), "an idle block has no content"
        assert not free & self._hash_of_id.keys(), "a free block is still findable"
        assert {self.id_of_hash[h] for h in self.id_of_hash} == self._hash_of_id.keys()
        assert all(self.id_of_hash[h] == block_id for block_id, h in self._hash_of_id.items())


class KVCacheManager:
    """Gives requests their block tables; knows block ids only, never tensors.

    `WindowedKV` adds tables of layers with a window.

    Parameters
    ----------
    config : sizes of the cache.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = BlockPool(config.num_pages)
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self._num_lookahead = config.num_lookahead_tokens
        self.keeps_states = bool(config.num_snapshots)
        num_snapshots = config.num_snapshots or 0
        self.snapshots = Snapshots(num_snapshots, list(range(num_snapshots - 1, -1, -1)))
        self.num_tables = config.num_tables
        self.new_pages: list[NewPages] = []  # what the model runner has yet to hear of

    def num_blocks_for(self, num_tokens: int, num_requests: int = 1) -> int:  # noqa: ARG002
        """Return the blocks that hold so many tokens of requests, and the slots behind them."""
        return -(-(num_tokens + self._num_lookahead) // self.block_size)

    def match(self, state: RequestState) -> list[int]:
        """Return the longest cached prefix as block ids, without taking a reference.

        At least one token is left to compute: without a forward pass there would be no logits to sample. For
        the same reason a prompt whose log-probabilities are reported is computed whole.
        """
        if not (self.enable_prefix_caching and state.looks_up):
            return []
        num_usable_blocks = (state.num_tokens - 1) // self.block_size
        block_ids: list[int] = []
        hashes, id_of_hash = state.block_hashes, self.pool.id_of_hash
        has_all = state.request.block_hashes is not None  # that it will ever have
        for index in range(num_usable_blocks):
            if index >= len(hashes) and (has_all or self._extend_hashes(state, index + 1) <= index):
                break
            block_id = id_of_hash.get(hashes[index])
            if block_id is None:
                break
            block_ids.append(block_id)
        if self.num_tables > 1:
            block_ids = self._within_windows(state, block_ids)
        if self.keeps_states:
            state.num_shared_blocks = len(block_ids)
            while block_ids and hashes[len(block_ids) - 1] not in self.snapshots:
                block_ids.pop()
        return block_ids

    def hold(self, state: RequestState, cached_block_ids: list[int]) -> None:  # noqa: ARG002
        """Keep what `match` has found of a request until it is admitted."""
        self.pool.hold(cached_block_ids)

    def admit(self, state: RequestState, cached_block_ids: list[int]) -> None:
        """Give a waiting request its cached prefix, which it holds already."""
        assert not state.block_ids, "a waiting request holds no blocks"
        state.block_ids = list(cached_block_ids)
        num_cached = len(cached_block_ids) * self.block_size
        state.num_computed_tokens = num_cached
        state.num_allocated_tokens = num_cached
        state.num_registered_blocks = len(cached_block_ids)
        state.num_tokens_to_register = num_cached + self.block_size

    def adopt(self, state: RequestState, block_ids: list[int], num_computed: int) -> None:
        """Give a new request blocks that hold the KV of its first tokens."""
        assert not state.block_ids, "it has blocks"
        assert num_computed <= len(block_ids) * self.block_size
        state.block_ids = block_ids
        state.num_allocated_tokens = len(block_ids) * self.block_size - self._num_lookahead
        state.num_computed_tokens = num_computed

    def moved_ids(self, state: RequestState) -> tuple[int, ...]:
        """Return the blocks of a request, in no step, that hold what goes with it to another replica."""
        num_blocks = -(-(state.num_computed_tokens + self._num_lookahead) // self.block_size)
        return tuple(state.block_ids[:num_blocks])

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        """Extend the block table to hold `num_tokens`; return the new ids."""
        # Written out: it is called for each row of a step.
        num_new_blocks = -(-(num_tokens + self._num_lookahead) // self.block_size) - len(state.block_ids)
        if num_new_blocks <= 0:
            return ()
        new_block_ids = self.pool.allocate(num_new_blocks)
        state.block_ids += new_block_ids
        state.num_allocated_tokens = len(state.block_ids) * self.block_size - self._num_lookahead
        return tuple(new_block_ids)

    def grow_each(self, states: Sequence[RequestState]) -> None:
        """Extend the block tables of requests in turn, as `grow` does, to hold what is computed of them."""
        size, num_behind, start = self.block_size, self._num_lookahead, 0
        num_new: list[int] = []
        for state in states:
            num_new.append(-(-(state.num_computed_tokens + num_behind) // size) - len(state.block_ids))
        block_ids = self.pool.allocate(sum(num_new))
        for state, num in zip(states, num_new, strict=True):
            state.block_ids += block_ids[start : start + num]
            state.num_allocated_tokens = len(state.block_ids) * size - num_behind
            start += num

    def _within_windows(self, state: RequestState, block_ids: list[int]) -> list[int]:  # noqa: ARG002
        """Return as many cached blocks of a request as its windows can go on from; here it has none."""
        return block_ids

    def slide(self, state: RequestState) -> None:
        """Give back what the windows of a request have passed; here it has none."""

    def tell_pages(self, state: RequestState, start: int = 0) -> None:
        """Have the model runner hear of the blocks of a request's windows; here it has none."""

    def places_to_keep(self, state: RequestState) -> tuple[int, ...]:
        """Return after how many of a request's tokens its state is worth keeping, as it is admitted."""
        if not self.keeps_states or state.scores_prompt or state.request.pooling is not None:
            return ()
        ends = {state.num_shared_blocks, (state.num_tokens - 1) // self.block_size}
        return tuple(sorted(end * self.block_size for end in ends if end))

    def kept_states(
        self, states: Sequence[RequestState], rows: Sequence[ScheduledRequest]
    ) -> tuple[KeptState, ...]:
        """Return the states that a step keeps of its rows' requests, each in a place of its own."""
        kept: list[KeptState] = []
        most = self.snapshots.num_places - self.snapshots.num_taken
        for index, (state, row) in enumerate(zip(states, rows, strict=True)):
            for place in state.places_to_keep:
                passed = place - row.num_computed_tokens
                num_blocks = place // self.block_size
                if not 0 < passed <= row.num_new_tokens or len(kept) == most:
                    continue
                if self._extend_hashes(state, num_blocks) >= num_blocks:
                    block_hash = state.block_hashes[num_blocks - 1]
                    if block_hash not in self.snapshots:
                        kept.append(KeptState(index, passed, self.snapshots.keep(block_hash)))
        return tuple(kept)

    def distrust(self, state: RequestState) -> None:
        """Let nobody go on from what a request has computed."""
        self.pool.unregister(state.held_ids)
        self.snapshots.drop(state.block_hashes)

    def register_full_blocks(self, state: RequestState, num_valid_tokens: int) -> range:
        """Make blocks findable whose tokens are known and computed; return which, of those of a request.

        Not those of a request with pooling: a flood of documents would push out the prefixes of chats.
        """
        if not self.enable_prefix_caching or state.request.pooling is not None:
            state.num_tokens_to_register = NEVER
            return range(0)
        num_full_blocks = num_valid_tokens // self.block_size
        num_known_blocks = self._extend_hashes(state, num_full_blocks)
        registered = range(state.num_registered_blocks, min(num_full_blocks, num_known_blocks))
        for index in registered:
            self.pool.register(state.block_ids[index], state.block_hashes[index])
        state.num_registered_blocks = max(state.num_registered_blocks, num_full_blocks)
        has_more = state.request.block_hashes is None or num_full_blocks < num_known_blocks
        state.num_tokens_to_register = (num_full_blocks + 1) * self.block_size if has_more else NEVER
        return registered

    def free(self, state: RequestState) -> None:
        """Give up all blocks of a request."""
        block_ids, state.block_ids = [*state.block_ids, *state.page_ids], []
        state.page_ids, state.num_passed_blocks = [], 0
        state.num_allocated_tokens = 0
        state.num_computed_tokens = 0
        state.num_registered_blocks = 0
        state.num_tokens_to_register = self.block_size
        self.pool.release(block_ids, state.kept_until, state.request.tenant or "")

    def _extend_hashes(self, state: RequestState, num_blocks: int) -> int:
        """Hash the request's first blocks, as far as its tokens are known; return how many have a hash."""
        hashes, request = state.block_hashes, state.request
        if len(hashes) < num_blocks and request.block_hashes is None:
            parent = hashes[-1] if hashes else root_hash(request.cache_salt, request.adapter)
            assert isinstance(parent, bytes)
            size = self.block_size
            hashes += hash_blocks(parent, state.token_slice(len(hashes) * size, num_blocks * size), size)
        return len(hashes)
