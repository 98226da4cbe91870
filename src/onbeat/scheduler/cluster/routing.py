"""What a router answers and hears of.

It finds the least loaded of many replicas, and those that hold a prefix, as far as whoever sends them prompts
can know.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from onbeat.core.fleet import ReplicaLimits, ReplicaLoad
from onbeat.core.hashing import BlockHash
from onbeat.scheduler.cluster.events import RoutingRequest

NONE_EXCLUDED: frozenset[int] = frozenset()


class RoutingChoice(NamedTuple):
    """Where a request goes."""

    replica: int
    why: str
    """One word: `turn`, `load`, `prefix` or `cost`."""
    predicted_ttft: float | None = None
    """Seconds from now until the first token, if it comes in its turn; None where nothing predicts."""


class Router:
    """Chooses a replica and hears what becomes of the request there; by itself it keeps nothing of that.

    Replicas have numbers. They may join at any time, and one whose memory is lost is to join under a new
    number. Each call costs at most O(log replicas), and
    O(blocks) where prefixes are looked at; a change of the members O(replicas).
    """

    reads_reports = False
    """Whether it goes by what replicas report, which else need not be told."""
    reads_every_report = False
    """Whether reports that come between its choices change what it chooses."""

    def route(
        self, request: RoutingRequest, now: float = 0.0, excluded: Collection[int] = NONE_EXCLUDED
    ) -> RoutingChoice | None:
        """Return the replica that serves the request; it counts as outstanding there from now on.

        Parameters
        ----------
        excluded : members that may not be chosen. Where no other is left, the answer is None.
        """
        raise NotImplementedError

    def join(self, replica: int, limits: ReplicaLimits | None = None) -> None:
        """Let a replica be chosen: a new one, or one that has left, with what is outstanding there."""
        raise NotImplementedError

    def leave(self, replica: int) -> None:
        """Choose a replica no more; it may still end what it has."""
        raise NotImplementedError

    def take(self, replica: int, request: RoutingRequest) -> None:
        """Hear that a request is outstanding there whose prompt has been computed elsewhere.

        The replica does not count it as one that it was sent (`ReplicaLoad.num_taken`).
        """

    def num_held(self, request: RoutingRequest) -> Mapping[int, int]:  # noqa: ARG002 (it knows no prefixes)
        """Return how many tokens of a prompt replicas are taken to hold, of those that hold some."""
        return {}

    def on_first_token(self, replica: int, request: RoutingRequest) -> None:
        """Hear that its prompt is done."""

    def on_finish(self, replica: int, request: RoutingRequest) -> None:
        """Hear that it ended there, or was taken back."""

    def on_report(self, replica: int, load: ReplicaLoad, now: float) -> None:
        """Hear how a replica stood at a time, which another call may have been after."""

    def least_wait(self, request: RoutingRequest, now: float) -> float | None:
        """Return the seconds until the first token of a request where it is soonest; None if not known."""


class LeastLoaded:
    """Replicas by a load that goes up and down; of equal ones, the least recently chosen first.

    A list in their order: a change costs O(log replicas), and moves the part of the list between two places.
    """

    def __init__(self) -> None:
        self.loads: list[float] = []
        self.members: set[int] = set()
        """Replicas that may be chosen; the loads of others are kept."""
        self._last_choices: list[int] = []
        self._num_choices = 0
        self._order: list[tuple[float, int, int]] = []
        """Of the members, the least load first."""

    def peek(self, excluded: Collection[int] = NONE_EXCLUDED) -> int | None:
        """Return the member with the least load; None where there is none that may be chosen."""
        return next((replica for *_, replica in self._order if replica not in excluded), None)

    def least(self, number: int, excluded: Collection[int] = NONE_EXCLUDED) -> list[int]:
        """Return up to so many members that may be chosen, those with the least load first."""
        return list(islice((replica for *_, replica in self._order if replica not in excluded), number))

    def choose(self, replica: int, load: float) -> None:
        """Add load to a replica that was chosen."""
        self._num_choices += 1
        self._place(replica, self.loads[replica] + load, self._num_choices)

    def add(self, replica: int, load: float) -> None:
        """Change a replica's load."""
        self.put(replica, self.loads[replica] + load)

    def put(self, replica: int, load: float) -> None:
        """Let a replica have a load."""
        self._place(replica, load, self._last_choices[replica])

    def join(self, replica: int) -> None:
        """Let a replica be chosen: a new one, or one that has left."""
        num_new = replica + 1 - len(self.loads)
        self.loads += [0.0] * num_new
        self._last_choices += [-1] * num_new  # of those that were never chosen, the lowest number is first
        if replica not in self.members:
            self.members.add(replica)
            insort(self._order, self._entry(replica))

    def leave(self, replica: int) -> None:
        """Choose a replica no more."""
        if replica in self.members:
            self.members.discard(replica)
            del self._order[bisect_left(self._order, self._entry(replica))]

    def _place(self, replica: int, load: float, last_choice: int) -> None:
        is_member = replica in self.members
        if is_member:
            del self._order[bisect_left(self._order, self._entry(replica))]
        self.loads[replica], self._last_choices[replica] = load, last_choice
        if is_member:
            insort(self._order, self._entry(replica))

    def _entry(self, replica: int) -> tuple[float, int, int]:
        return (self.loads[replica], self._last_choices[replica], replica)


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

    def longest_first(self, start: int = 0) -> Iterator[int]:
        """Yield the replicas that hold some, those that hold the most first; of equals, from `start` on."""
        for _, replicas in self._levels:
            for left in (replicas >> start << start, replicas & ((1 << start) - 1)):
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
