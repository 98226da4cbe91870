"""What is kept for requests to come: idle blocks for calls of jobs, and states at the ends of blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from onbeat.core.hashing import BlockHash

KEPT_SHARE = 0.3
"""Of all blocks, those that may be kept for calls to come."""


@dataclass(slots=True)
class KeptBlocks:
    """Blocks that are evicted behind all other idle ones, until a time, and which tenant they are kept for.

    Parameters
    ----------
    most : at once.
    idle_ids : the other idle blocks: kept ones come from there, and go back there.
    """

    most: int
    idle_ids: dict[int, None]
    until: dict[int, float] = field(default_factory=dict)
    """Until when each of them is kept, seconds."""
    ends: list[tuple[float, int, int]] = field(default_factory=list)
    """(until when, minus its place in its request, block) of these, as a heap; some are kept no more."""
    of_tenant: dict[str, dict[int, None]] = field(default_factory=dict)
    """Each tenant's, in the order in which they came to be."""
    _tenant_of: dict[int, str] = field(default_factory=dict)

    def keep(self, block_ids: Sequence[int], until: float, tenant: str) -> None:
        """Keep those of a request's blocks that are idle, from the first on, as far as there is room."""
        kept, idle_ids = self.until, self.idle_ids
        if (num_missing := len(kept) + len(block_ids) - self.most) > 0 and kept:
            self._take_from_the_greediest(tenant, num_missing)
        for place, block_id in enumerate(block_ids):
            if len(kept) >= self.most:
                break
            if block_id in idle_ids:
                del idle_ids[block_id]
                kept[block_id] = until
                self._tenant_of[block_id] = tenant
                self.of_tenant.setdefault(tenant, {})[block_id] = None
                heappush(self.ends, (until, -place, block_id))
        if len(self.ends) > 2 * self.most:
            self.ends = [each for each in self.ends if kept.get(each[2]) == each[0]]
            heapify(self.ends)

    def _take_from_the_greediest(self, tenant: str, num_blocks: int) -> None:
        """Keep less for the tenant for which most is kept, but not less than for another."""
        most = max(self.of_tenant.values(), key=len)
        num_more = (len(most) - len(self.of_tenant.get(tenant, ()))) // 2
        for block_id in [*most][len(most) - min(num_more, num_blocks) :]:
            self.drop(block_id)
            self.idle_ids[block_id] = None

    def drop(self, block_id: int) -> None:
        """Keep a block no more; whoever asks has another use for it."""
        del self.until[block_id]
        tenant = self._tenant_of.pop(block_id)
        del self.of_tenant[tenant][block_id]
        if not self.of_tenant[tenant]:
            del self.of_tenant[tenant]

    def pop(self) -> int:
        """Take the block whose time ends first."""
        while True:
            until, _, block_id = heappop(self.ends)
            if self.until.get(block_id) == until:
                self.drop(block_id)
                return block_id

    def expire(self, now: float) -> None:
        """Let blocks be idle like any other whose time to be kept is over."""
        while self.ends and self.ends[0][0] <= now:
            until, _, block_id = heappop(self.ends)
            if self.until.get(block_id) == until:
                self.drop(block_id)
                self.idle_ids[block_id] = None

    def check_invariants(self) -> None:
        """Raise AssertionError unless each block is kept until a time, for one tenant."""
        assert not self.idle_ids.keys() & self.until.keys(), "a block is kept and not kept"
        assert len(self.until) <= self.most, "too many blocks are kept"
        kept_for = {block_id: tenant for tenant, ids in self.of_tenant.items() for block_id in ids}
        assert kept_for == self._tenant_of, "a block is kept for nobody"
        assert kept_for.keys() == self.until.keys(), "a block is kept for ever"


@dataclass(slots=True)
class Snapshots:
    """States of requests at the ends of blocks, from which hits of the prefix cache go on.

    A state is as large as the KV of thousands of tokens, so few are kept: where a prompt ends, and where one
    was seen to part from another (Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", 2024).
    The least recently used goes first. A state that comes from another replica lies here, too, until its
    request has its slot.
    """

    num_places: int
    _free: list[int]
    """At first all of them, the first one last."""
    num_taken: int = 0
    _ids: OrderedDict[BlockHash, int] = field(default_factory=OrderedDict)
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
