"""Fixed-size KV blocks: who holds them, which content they still carry, which to give away next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from onbeat.core.hashing import BlockHash


class BlockPool:
    """Ids, reference counts and the least-recently-used order of idle cached blocks.

    A block is in one of three states: *in use* (reference count > 0), *idle* (count 0, its content still
    findable by hash) or *free* (count 0, no content worth keeping). Idle blocks count as free space: the
    least recently used one is evicted when the free list is empty.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.peak_used_blocks = 0
        """Most blocks in use at once so far."""
        self.num_used_blocks = 0
        """Blocks with a reference."""
        self._free_ids: list[int] = []
        """Free blocks that were in use before; those from `len(_ref_counts)` on have never been."""
        self._idle_ids: OrderedDict[int, None] = OrderedDict()
        self._ref_counts: list[int] = []
        self._id_of_hash: dict[BlockHash, int] = {}
        self._hash_of_id: dict[int, BlockHash] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return self.num_blocks - self.num_used_blocks

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the block that holds this content, if any."""
        return self._id_of_hash.get(block_hash)

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """Count the blocks that `hold` would take out of the free space."""
        ref_counts = self._ref_counts
        return sum(ref_counts[block_id] == 0 for block_id in block_ids)

    def exclusive_ids(self, block_ids: Iterable[int]) -> list[int]:
        """Return the blocks that `release` would return to the free space."""
        ref_counts = self._ref_counts
        return [block_id for block_id in block_ids if ref_counts[block_id] == 1]

    def hold(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to blocks that carry content."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._idle_ids[block_id]
                self.num_used_blocks += 1
            self._ref_counts[block_id] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks with one reference each; the caller has checked `num_free_blocks`."""
        assert num_blocks <= self.num_free_blocks, "allocation was not planned for"
        self.num_used_blocks += num_blocks
        self.peak_used_blocks = max(self.peak_used_blocks, self.num_used_blocks)
        ref_counts, free_ids = self._ref_counts, self._free_ids
        block_ids = []
        for _ in range(num_blocks):
            if free_ids:
                block_id = free_ids.pop()
                ref_counts[block_id] = 1
            elif len(ref_counts) < self.num_blocks:
                block_id = len(ref_counts)
                ref_counts.append(1)
            else:
                block_id, _ = self._idle_ids.popitem(last=False)
                del self._id_of_hash[self._hash_of_id.pop(block_id)]
                ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block of a request, in the order of its tokens.

        The tail of a request becomes idle first and is evicted first, because a prefix is worth more.
        """
        ref_counts, hash_of_id, free_ids = self._ref_counts, self._hash_of_id, self._free_ids
        for block_id in reversed(block_ids):
            count = ref_counts[block_id] = ref_counts[block_id] - 1
            if count == 0:
                self.num_used_blocks -= 1
                if block_id in hash_of_id:
                    self._idle_ids[block_id] = None
                else:
                    free_ids.append(block_id)

    def register(self, block_id: int, block_hash: BlockHash) -> None:
        """Make the content of a full block findable; the first block with a content keeps the name."""
        if block_hash not in self._id_of_hash and block_id not in self._hash_of_id:
            self._id_of_hash[block_hash] = block_id
            self._hash_of_id[block_id] = block_hash

    def unregister(self, block_ids: Iterable[int]) -> None:
        """Make the content of blocks in use unfindable: nobody shall reuse it."""
        for block_id in block_ids:
            block_hash = self._hash_of_id.pop(block_id, None)
            if block_hash is not None:
                del self._id_of_hash[block_hash]

    def check_invariants(self) -> None:
        """Raise AssertionError unless every block is in exactly one state."""
        untouched = range(len(self._ref_counts), self.num_blocks)
        free, idle = {*self._free_ids, *untouched}, set(self._idle_ids)
        in_use = {block_id for block_id, count in enumerate(self._ref_counts) if count > 0}
        assert min(self._ref_counts, default=0) >= 0
        assert self.num_used_blocks == len(in_use), "a block is counted wrongly"
        assert len(free) == len(self._free_ids) + len(untouched), "a block is free twice"
        assert len(free | idle | in_use) == len(free) + len(idle) + len(in_use), "a block is in two states"
        assert len(free) + len(idle) + len(in_use) == self.num_blocks, "a block is lost"
        assert idle <= self._hash_of_id.keys(), "an idle block has no content"
        assert not free & self._hash_of_id.keys(), "a free block is still findable"
        assert {self._id_of_hash[h] for h in self._id_of_hash} == self._hash_of_id.keys()
        assert all(self._id_of_hash[h] == block_id for block_id, h in self._hash_of_id.items())
