"""KV blocks: which are free, which can be found by their content, and which each request holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from onbeat.core.hashing import BlockHash, hash_blocks
from onbeat.core.step import KeptState, NewPages, ScheduledRequest
from onbeat.scheduler.replica.request_state import NEVER, RequestState
from onbeat.scheduler.scheduler_config import SchedulerConfig

KEPT_SHARE = 0.3
"""Of all blocks, those that may be kept for calls to come."""
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
        self.most_kept = int(KEPT_SHARE * num_blocks)
        self.num_free_blocks = num_blocks
        """Blocks that `allocate` could hand out now."""
        self._fewest_free = num_blocks
        self._free_ids: list[int] = []
        """Free blocks that were in use before; those from `_num_touched` on have never been."""
        self._num_touched = 0
        self._idle_ids: OrderedDict[int, None] = OrderedDict()
        """Idle blocks that are not kept, the least recently used first."""
        self._kept_until: dict[int, float] = {}
        """The other idle blocks, and until when they are kept, seconds."""
        self.kept_ends: list[tuple[float, int, int]] = []
        """(until when, minus its place in its request, block) of these, as a heap; some are kept no more."""
        self._tenant_of: dict[int, str] = {}
        self._kept_for: dict[str, dict[int, None]] = {}
        """For which tenant they are kept, and each tenant's in the order in which they came to be."""
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
        idle_ids, kept = self._idle_ids, self._kept_until
        return sum(block_id in idle_ids or block_id in kept for block_id in block_ids)

    @property
    def num_kept_blocks(self) -> int:
        """Idle blocks that are kept for a request to come."""
        return len(self._kept_until)

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
            elif block_id in self._kept_until:
                self._drop_kept(block_id)
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
            block_id = self._idle_ids.popitem(last=False)[0] if self._idle_ids else self._pop_kept()
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
            self._keep(block_ids, kept_until, tenant)

    def _keep(self, block_ids: Sequence[int], until: float, tenant: str) -> None:
        """Keep those of a request's blocks that are idle, from the first on, as far as there is room."""
        kept, idle_ids = self._kept_until, self._idle_ids
        if (num_missing := len(kept) + len(block_ids) - self.most_kept) > 0 and kept:
            self._take_from_the_greediest(tenant, num_missing)
        for place, block_id in enumerate(block_ids):
            if len(kept) >= self.most_kept:
                break
            if block_id in idle_ids:
                del idle_ids[block_id]
                kept[block_id] = until
                self._tenant_of[block_id] = tenant
                self._kept_for.setdefault(tenant, {})[block_id] = None
                heappush(self.kept_ends, (until, -place, block_id))
        if len(self.kept_ends) > 2 * self.most_kept:
            self.kept_ends = [each for each in self.kept_ends if kept.get(each[2]) == each[0]]
            heapify(self.kept_ends)

    def _take_from_the_greediest(self, tenant: str, num_blocks: int) -> None:
        """Keep less for the tenant for which most is kept, but not less than for another."""
        most = max(self._kept_for.values(), key=len)
        num_more = (len(most) - len(self._kept_for.get(tenant, ()))) // 2
        for block_id in [*most][len(most) - min(num_more, num_blocks) :]:
            self._drop_kept(block_id)
            self._idle_ids[block_id] = None

    def _drop_kept(self, block_id: int) -> None:
        del self._kept_until[block_id]
        tenant = self._tenant_of.pop(block_id)
        del self._kept_for[tenant][block_id]
        if not self._kept_for[tenant]:
            del self._kept_for[tenant]

    def _pop_kept(self) -> int:
        """Take the kept block whose time ends first."""
        while True:
            until, _, block_id = heappop(self.kept_ends)
            if self._kept_until.get(block_id) == until:
                self._drop_kept(block_id)
                return block_id

    def expire(self, now: float) -> None:
        """Let blocks be idle like any other whose time to be kept is over."""
        ends = self.kept_ends
        while ends and ends[0][0] <= now:
            until, _, block_id = heappop(ends)
            if self._kept_until.get(block_id) == until:
                self._drop_kept(block_id)
                self._idle_ids[block_id] = None

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
        assert not idle & self._kept_until.keys(), "a block is kept and not kept"
        assert len(self._kept_until) <= self.most_kept, "too many blocks are kept"
        kept_for = {block_id: tenant for tenant, ids in self._kept_for.items() for block_id in ids}
        assert kept_for == self._tenant_of, "a block is kept for nobody"
        assert kept_for.keys() == self._kept_until.keys(), "a block is kept for ever"
        idle |= self._kept_until.keys()
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


class Snapshots:
    """States of requests at the ends of blocks, from which hits of the prefix cache go on.

    A state is as large as the KV of thousands of tokens, so few are kept: where a prompt ends, and where one
    was seen to part from another (Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", 2024).
    The least recently used goes first. A state that comes from another replica lies here, too, until its
    request has its slot.
    """

    def __init__(self, num_snapshots: int) -> None:
        self.num_places, self.num_taken = num_snapshots, 0
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._ids: OrderedDict[BlockHash, int] = OrderedDict()
        """By the hash of the last block."""

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._ids

    def use(self, block_hash: BlockHash) -> int:
        """Return the snapshot at the end of a block."""
        self._ids.move_to_end(block_hash)
        return self._ids[block_hash]

    def keep(self, block_hash: BlockHash) -> int:
        """Return where the state at the end of a block is to be kept."""
        snapshot = self._free.pop() if self._free else self._ids.popitem(last=False)[1]
        self._ids[block_hash] = snapshot
        return snapshot

    @property
    def num_used(self) -> int | None:
        """Places that are not free; None where the model keeps no states."""
        return self.num_places - len(self._free) if self.num_places else None

    def take(self) -> int | None:
        """Return a place for a state from elsewhere, until `give_back`; None where the model keeps none."""
        if not self.num_places:
            return None
        self.num_taken += 1
        return self._free.pop() if self._free else self._ids.popitem(last=False)[1]

    def give_back(self, snapshot: int | None) -> None:
        """Let a place be used again that was taken; None is nothing."""
        if snapshot is not None:
            self.num_taken -= 1
            self._free.append(snapshot)

    def check_invariants(self) -> None:
        """Raise AssertionError unless each place is free, taken, or holds one state."""
        num_places = len({*self._free, *self._ids.values()}) + self.num_taken
        assert num_places == self.num_places, "a state's place has leaked"

    def drop(self, block_hashes: Iterable[BlockHash]) -> None:
        """Forget states that may not be sound."""
        for block_hash in block_hashes:
            if block_hash in self._ids:
                self._free.append(self._ids.pop(block_hash))


class KVCacheManager:
    """Gives requests their block tables; knows block ids only, never tensors.

    Layers with a window read the last tokens only. Where they have tables of their own, all tables have their
    blocks from one pool, and a request gives back those that its windows have passed (Zhang et al., "Jenga",
    SOSP 2025). Their content stays findable while nobody needs the room.

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
        self.snapshots = Snapshots(config.num_snapshots or 0)
        self.num_tables = config.num_tables
        self._windows, self._window = config.windows, config.window_length
        self._num_groups, self._most_window_blocks = self._windows
        self.new_pages: list[NewPages] = []  # what the model runner has yet to hear of

    def num_blocks_for(self, num_tokens: int, num_requests: int = 1) -> int:
        """Return the blocks that hold so many tokens of requests, and the slots behind them."""
        num_blocks = -(-(num_tokens + self._num_lookahead) // self.block_size)
        return self._windows.num_blocks(num_blocks, num_requests) if self._num_groups else num_blocks

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
        if self._num_groups:
            del block_ids[self._num_with_window(state, len(block_ids)) :]
        if self.keeps_states:
            state.num_shared_blocks = len(block_ids)
            while block_ids and state.block_hashes[len(block_ids) - 1] not in self.snapshots:
                block_ids.pop()
        return block_ids

    def hold(self, state: RequestState, cached_block_ids: list[int]) -> None:
        """Keep what `match` has found of a request until it is admitted."""
        self.pool.hold(cached_block_ids)
        if self._num_groups:
            num_cached = len(cached_block_ids)
            state.num_passed_blocks = self._first_block(num_cached * self.block_size)
            hashes = state.block_hashes[state.num_passed_blocks : num_cached]
            state.page_ids = [page_id for each in hashes for page_id in self._pages_of(each)]
            self.pool.hold(state.page_ids)
            self.tell_pages(state)

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
        if self._num_groups:
            first = self._first_block(num_computed)
            num_filled = -(-(num_computed + self._num_lookahead) // self.block_size)
            end = num_filled + (num_filled - first) * self._num_groups
            self.pool.release(block_ids[end:])
            state.page_ids, state.num_passed_blocks = block_ids[num_filled:end], first
            block_ids = block_ids[:num_filled]
        state.block_ids = block_ids
        state.num_allocated_tokens = len(block_ids) * self.block_size - self._num_lookahead
        state.num_computed_tokens = num_computed
        if self._num_groups:
            self.grow(state, state.num_tokens)

    def moved_ids(self, state: RequestState) -> tuple[int, ...]:
        """Return the blocks of a request, in no step, that hold what goes with it to another replica."""
        if self._num_groups:
            self.slide(state)
        num_blocks = -(-(state.num_computed_tokens + self._num_lookahead) // self.block_size)
        num_pages = (num_blocks - state.num_passed_blocks) * self._num_groups
        return (*state.block_ids[:num_blocks], *state.page_ids[:num_pages])

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        """Extend the block table to hold `num_tokens`; return the new ids."""
        # Written out: it is called for each row of a step.
        num_new_blocks = -(-(num_tokens + self._num_lookahead) // self.block_size) - len(state.block_ids)
        if num_new_blocks <= 0:
            return ()
        new_block_ids = self.pool.allocate(num_new_blocks)
        state.block_ids += new_block_ids
        state.num_allocated_tokens = len(state.block_ids) * self.block_size - self._num_lookahead
        if self._num_groups:
            self.slide(state)
        return tuple(new_block_ids)

    def grow_each(self, states: Sequence[RequestState]) -> None:
        """Extend the block tables of requests in turn, as `grow` does, to hold what is computed of them."""
        if self._num_groups:
            for state in states:
                self.grow(state, state.num_computed_tokens)
            return
        size, num_behind, start = self.block_size, self._num_lookahead, 0
        num_new: list[int] = []
        for state in states:
            num_new.append(-(-(state.num_computed_tokens + num_behind) // size) - len(state.block_ids))
        block_ids = self.pool.allocate(sum(num_new))
        for state, num in zip(states, num_new, strict=True):
            state.block_ids += block_ids[start : start + num]
            state.num_allocated_tokens = len(state.block_ids) * size - num_behind
            start += num

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
        if self._num_groups:
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

    def _num_with_window(self, state: RequestState, num_blocks: int) -> int:
        """Return how long a prefix of cached blocks is, of which the last window is cached, too."""
        end = num_blocks
        for index in range(num_blocks - 1, -1, -1):
            if index < self._first_block(end * self.block_size):
                break
            if not self._pages_of(state.block_hashes[index]):
                end = index
        return end

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
        names = [(group, each) for each in state.block_hashes for group in range(self._num_groups)]
        page_ids = [page_id for name in names if (page_id := self.pool.id_of_hash.get(name)) is not None]
        self.pool.hold(page_ids)  # those that its windows have passed lie idle
        self.pool.unregister([*state.held_ids, *page_ids])
        self.pool.release(page_ids)
        self.snapshots.drop(state.block_hashes)

    def register_full_blocks(self, state: RequestState, num_valid_tokens: int) -> None:
        """Make blocks findable whose tokens are known and computed.

        Not those of a request with pooling: a flood of documents would push out the prefixes of chats.
        """
        if not self.enable_prefix_caching or state.request.pooling is not None:
            state.num_tokens_to_register = NEVER
            return
        num_full_blocks = num_valid_tokens // self.block_size
        num_known_blocks = self._extend_hashes(state, num_full_blocks)
        for index in range(state.num_registered_blocks, min(num_full_blocks, num_known_blocks)):
            self.pool.register(state.block_ids[index], state.block_hashes[index])
            start = (index - state.num_passed_blocks) * self._num_groups
            for group in range(self._num_groups if start >= 0 else 0):
                self.pool.register(state.page_ids[start + group], (group, state.block_hashes[index]))
        state.num_registered_blocks = max(state.num_registered_blocks, num_full_blocks)
        has_more = state.request.block_hashes is None or num_full_blocks < num_known_blocks
        state.num_tokens_to_register = (num_full_blocks + 1) * self.block_size if has_more else NEVER

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
        hashes = state.block_hashes
        if len(hashes) < num_blocks and state.request.block_hashes is None:
            parent = hashes[-1] if hashes else state.request.prefix_root
            assert isinstance(parent, bytes)
            size = self.block_size
            hashes += hash_blocks(parent, state.token_slice(len(hashes) * size, num_blocks * size), size)
        return len(hashes)
