"""The least loaded of many replicas, while loads go up and down."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from heapq import heapify, heappop, heappush

NONE_EXCLUDED: frozenset[int] = frozenset()


class LeastLoaded:
    """Replicas by a load that goes up and down; of equal ones, the least recently chosen first.

    A heap in which only a replica's newest entry counts; stale ones are dropped when they come to the top, or
    all at once when they are the majority, so a change costs O(log replicas).
    """

    def __init__(self, num_replicas: int) -> None:
        self.loads: list[float] = []
        self.members: frozenset[int] = frozenset()
        self._last_choices: list[int] = []
        self._num_choices = 0
        self._heap: list[tuple[float, int, int]] = []
        self.set_members(range(num_replicas))

    def peek(self, excluded: Collection[int] = NONE_EXCLUDED) -> int | None:
        """Return the member with the least load; None where there is none that may be chosen."""
        heap, members = self._heap, self.members
        passed_over: list[tuple[float, int, int]] = []
        least = None
        while heap and least is None:
            load, last_choice, replica = entry = heap[0]
            is_newest = load == self.loads[replica] and last_choice == self._last_choices[replica]
            if not (is_newest and replica in members):
                heappop(heap)
            elif replica in excluded:
                passed_over.append(heappop(heap))
            else:
                least = replica
        for entry in passed_over:
            heappush(heap, entry)
        return least

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
            self.set_members(self.members)

    def set_members(self, members: Iterable[int]) -> None:
        """Say which replicas may be chosen; the loads of the others are kept."""
        self.members = frozenset(members)
        num_new = max(self.members, default=-1) + 1 - len(self.loads)
        self.loads += [0.0] * num_new
        self._last_choices += [-1] * num_new  # of those that were never chosen, the lowest number is first
        self._heap = [self._entry(each) for each in self.members]
        heapify(self._heap)

    def _entry(self, replica: int) -> tuple[float, int, int]:
        return (self.loads[replica], self._last_choices[replica], replica)
