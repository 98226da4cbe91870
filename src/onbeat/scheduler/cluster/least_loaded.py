"""The least loaded of many replicas, while loads go up and down."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush

NONE_EXCLUDED: frozenset[int] = frozenset()


class LeastLoaded:
    """Replicas by a load that goes up and down; of equal ones, the least recently chosen first.

    A heap in which only a replica's newest entry counts; stale ones are dropped when they come to the top, or
    all at once when they are the majority, so a change costs O(log replicas).
    """

    def __init__(self, num_replicas: int) -> None:
        self.loads: list[float] = []
        self.members: set[int] = set()
        """Replicas that may be chosen; the loads of others are kept."""
        self._last_choices: list[int] = []
        self._num_choices = 0
        self._heap: list[tuple[float, int, int]] = []
        for replica in range(num_replicas):
            self.join(replica)

    def peek(self, excluded: Collection[int] = NONE_EXCLUDED) -> int | None:
        """Return the member with the least load; None where there is none that may be chosen."""
        found = self.least(1, excluded)
        return found[0] if found else None

    def least(self, number: int, excluded: Collection[int] = NONE_EXCLUDED) -> list[int]:
        """Return up to so many members that may be chosen, those with the least load first."""
        heap, members, loads, last_choices = self._heap, self.members, self.loads, self._last_choices
        looked_at: list[tuple[float, int, int]] = []
        found: list[int] = []
        while heap and len(found) < number:
            load, last_choice, replica = entry = heappop(heap)
            if load != loads[replica] or last_choice != last_choices[replica] or replica not in members:
                continue
            looked_at.append(entry)
            if replica not in excluded and replica not in found:
                found.append(replica)
        for entry in looked_at:
            heappush(heap, entry)
        return found

    def choose(self, replica: int, load: float) -> None:
        """Add load to a replica that was chosen."""
        self._last_choices[replica] = self._num_choices
        self._num_choices += 1
        self.add(replica, load)

    def add(self, replica: int, load: float) -> None:
        """Change a replica's load."""
        self.loads[replica] += load
        heappush(self._heap, self._entry(replica))
        if len(self._heap) > 4 * len(self.loads):
            self._heap = [self._entry(each) for each in self.members]
            heapify(self._heap)

    def join(self, replica: int) -> None:
        """Let a replica be chosen: a new one, or one that has left."""
        num_new = replica + 1 - len(self.loads)
        self.loads += [0.0] * num_new
        self._last_choices += [-1] * num_new  # of those that were never chosen, the lowest number is first
        if replica not in self.members:
            self.members.add(replica)
            heappush(self._heap, self._entry(replica))

    def leave(self, replica: int) -> None:
        """Choose a replica no more."""
        self.members.discard(replica)

    def _entry(self, replica: int) -> tuple[float, int, int]:
        return (self.loads[replica], self._last_choices[replica], replica)
