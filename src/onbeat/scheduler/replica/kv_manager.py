"""KV blocks of requests: prefix lookup, growth, release."""

from __future__ import annotations

from onbeat.core.hashing import hash_blocks, root_hash
from onbeat.scheduler.replica.block_pool import BlockPool
from onbeat.scheduler.replica.request_state import NEVER, RequestState


class KVCacheManager:
    """Gives requests their block tables; knows block ids only, never tensors.

    Parameters
    ----------
    num_blocks : blocks in the cache.
    block_size : tokens a block holds.
    enable_prefix_caching : whether full blocks can be found again by their content.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, state: RequestState) -> list[int]:
        """Return the longest cached prefix as block ids, without taking a reference.

        At least one token is left to compute: without a forward pass there would be no logits to sample.
        """
        if not self.enable_prefix_caching:
            return []
        num_usable_blocks = (state.num_tokens - 1) // self.block_size
        block_ids: list[int] = []
        for index in range(num_usable_blocks):
            if self._extend_hashes(state, index + 1) <= index:
                break
            block_id = self.pool.find(state.block_hashes[index])
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def admit(self, state: RequestState, cached_block_ids: list[int]) -> None:
        """Give a waiting request its cached prefix (already held by the caller's `pool.hold`)."""
        assert not state.block_ids, "a waiting request holds no blocks"
        state.block_ids = list(cached_block_ids)
        num_cached = len(cached_block_ids) * self.block_size
        state.restart(num_cached)
        state.num_allocated_tokens = num_cached
        state.num_registered_blocks = len(cached_block_ids)
        state.num_tokens_to_register = num_cached + self.block_size

    def adopt(self, state: RequestState, block_ids: list[int], num_computed: int) -> None:
        """Give a new request blocks that hold the KV of its first tokens."""
        assert not state.block_ids, "it has blocks"
        assert num_computed <= len(block_ids) * self.block_size
        state.block_ids = block_ids
        state.num_allocated_tokens = len(block_ids) * self.block_size
        state.restart(num_computed)

    def grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        """Extend the block table to hold `num_tokens`; return the new ids."""
        num_new_blocks = -(-num_tokens // self.block_size) - len(state.block_ids)
        if num_new_blocks <= 0:
            return ()
        new_block_ids = self.pool.allocate(num_new_blocks)
        state.block_ids += new_block_ids
        state.num_allocated_tokens = len(state.block_ids) * self.block_size
        return tuple(new_block_ids)

    def register_full_blocks(self, state: RequestState, num_valid_tokens: int) -> None:
        """Make blocks findable whose tokens are known and computed."""
        if not self.enable_prefix_caching:
            state.num_tokens_to_register = NEVER
            return
        num_full_blocks = num_valid_tokens // self.block_size
        num_known_blocks = self._extend_hashes(state, num_full_blocks)
        for index in range(state.num_registered_blocks, min(num_full_blocks, num_known_blocks)):
            self.pool.register(state.block_ids[index], state.block_hashes[index])
        state.num_registered_blocks = max(state.num_registered_blocks, num_full_blocks)
        has_more = state.request.block_hashes is None or num_full_blocks < num_known_blocks
        state.num_tokens_to_register = (num_full_blocks + 1) * self.block_size if has_more else NEVER

    def free(self, state: RequestState) -> None:
        """Give up all blocks of a request."""
        self.pool.release(self.detach(state))

    def detach(self, state: RequestState) -> list[int]:
        """Take all blocks from a request and return their ids; they stay in use."""
        block_ids, state.block_ids = state.block_ids, []
        state.num_allocated_tokens = 0
        state.restart(0)
        state.num_registered_blocks = 0
        state.num_tokens_to_register = self.block_size
        return block_ids

    def _extend_hashes(self, state: RequestState, num_blocks: int) -> int:
        """Hash the request's first blocks, as far as its tokens are known; return how many have a hash."""
        hashes = state.block_hashes
        if len(hashes) < num_blocks and state.request.block_hashes is None:
            parent = hashes[-1] if hashes else root_hash(state.request.cache_salt)
            assert isinstance(parent, bytes)
            size = self.block_size
            hashes += hash_blocks(parent, state.token_slice(len(hashes) * size, num_blocks * size), size)
        return len(hashes)
