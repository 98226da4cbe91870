"""Which replicas hold which prefixes, as far as whoever sends them prompts can know."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from onbeat.core.hashing import BlockHash


class Holders:
    """Who holds how much of a prompt; each answer costs O(levels), however many replicas hold it.

    Parameters
    ----------
    levels : numbers of blocks, the largest first, and the replicas that hold so many, a bit each.
    """

    __slots__ = ("_levels",)

    def __init__(self, levels: Sequence[tuple[int, int]]) -> None:
        self._levels = levels

    def num_held(self, replica: int) -> int:
        """Return how many of the first blocks a replica holds."""
        for depth, replicas in self._levels:
            if replicas >> replica & 1:
                return depth
        return 0

    def longest_first(self) -> Iterator[int]:
        """Yield the replicas that hold some, those that hold the most first."""
        for _, replicas in self._levels:
            left = replicas
            while left:
                lowest = left & -left
                yield lowest.bit_length() - 1
                left ^= lowest


class _Held:
    """The blocks that one replica is taken to hold, the least recently used first."""

    __slots__ = ("bit", "blocks", "num_blocks")

    def __init__(self, replica: int, num_blocks: int) -> None:
        self.blocks: OrderedDict[BlockHash, None] = OrderedDict()
        self.num_blocks = num_blocks
        self.bit = 1 << replica
        """As `PrefixMemory` writes it down. Most blocks have one holder alone, and all its blocks share this
        number: one of their own each, with a bit for any of 1,000 replicas, would be most of the memory."""


class PrefixMemory:
    """The prefixes that replicas were sent, less those that they must have evicted since.

    Each replica is taken to hold what it was sent most recently, up to its memory. A look-up costs O(blocks
    of the prompt), however many replicas there are.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockHash, int] = {}
        """Block -> its replicas, a bit each."""
        self._held: dict[int, _Held] = {}

    def join(self, replica: int, num_blocks: int) -> None:
        """Count with a replica that holds nothing."""
        self._held[replica] = _Held(replica, num_blocks)

    def forget(self, replica: int) -> None:
        """Count no more with a replica. O(its blocks)."""
        held = self._held.pop(replica, None)
        if held is not None:
            for block in held.blocks:
                self._drop(block, replica)

    def look_up(self, blocks: Sequence[BlockHash]) -> Holders:
        """Return who holds how many of the first blocks of a prompt."""
        holders = self._holders
        levels: list[tuple[int, int]] = []
        alive, depth = -1, 0
        for block in blocks:
            still = alive & holders.get(block, 0)
            if still != alive:
                if depth:
                    levels.append((depth, alive & ~still))
                alive = still
                if not alive:
                    break
            depth += 1
        if depth and alive:
            levels.append((depth, alive))
        levels.reverse()
        return Holders(levels)

    def send(self, replica: int, blocks: Sequence[BlockHash]) -> None:
        """Take a replica to hold a prompt that it is sent."""
        held = self._held.get(replica)
        if held is None:
            return
        holders, own, bit = self._holders, held.blocks, held.bit
        for block in reversed(blocks):  # of a prefix, the end is evicted before the beginning
            if block in own:
                own.move_to_end(block)
            else:
                own[block] = None
                others = holders.get(block)
                holders[block] = others | bit if others else bit
        while len(own) > held.num_blocks:
            self._drop(own.popitem(last=False)[0], replica)

    def _drop(self, block: BlockHash, replica: int) -> None:
        rest = self._holders[block] & ~(1 << replica)
        if rest:
            self._holders[block] = rest
        else:
            del self._holders[block]
