"""The waiting queue, sorted, with cheap work at its head."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from onbeat.scheduler.replica.request_state import RequestState


def _sort_key(state: RequestState) -> tuple[float, ...]:
    return state.sort_key


def _rank(state: RequestState) -> float:
    return state.sort_key[0]


class WaitingQueue:
    """Requests by ascending `sort_key`.

    Looking at the head and taking from it cost O(1) whatever the length; an arrival that belongs at the end
    is an append. Taken entries are skipped by an offset and dropped once they are half of the list.
    """

    def __init__(self) -> None:
        self._items: list[RequestState] = []
        self._first = 0

    def __len__(self) -> int:
        return len(self._items) - self._first

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._items[self._first :])

    def peek(self, offset: int = 0) -> RequestState | None:
        """Return the request `offset` places behind the head, or None."""
        index = self._first + offset
        return self._items[index] if index < len(self._items) else None

    def before(self, rank: float) -> list[RequestState]:
        """Return the requests of a lower rank, in order."""
        return self._items[self._first : self._first + self.num_before(rank)]

    def num_before(self, rank: float) -> int:
        """Return how many requests have a lower rank."""
        return bisect_left(self._items, rank, lo=self._first, key=_rank) - self._first

    def first_from(self, rank: float, most: int = 32) -> list[RequestState]:
        """Return the first requests of at least this rank."""
        index = self._first + self.num_before(rank)
        return self._items[index : index + most]

    def push(self, state: RequestState) -> None:
        if len(self) == 0 or self._items[-1].sort_key < state.sort_key:
            self._items.append(state)
        else:
            insort(self._items, state, lo=self._first, key=_sort_key)

    def take(self, count: int) -> None:
        """Drop `count` requests from the head."""
        self._first += count
        if self._first * 2 > len(self._items):
            del self._items[: self._first]
            self._first = 0

    def take_all(self, states: list[RequestState]) -> None:
        """Drop requests from wherever they are; cheap for those at the head, in order."""
        count = 0
        while count < len(states) and self.peek(count) is states[count]:
            count += 1
        self.take(count)
        for state in states[count:]:
            self.remove(state)

    def remove(self, state: RequestState) -> None:
        index = bisect_left(self._items, state.sort_key, lo=self._first, key=_sort_key)
        assert self._items[index] is state, "sort keys are unique"
        del self._items[index]


class RunningList(list[RequestState]):
    """Requests in the batch, by ascending `sort_key`; the last one is the first to be preempted."""

    def insert_sorted(self, state: RequestState) -> None:
        insort(self, state, key=_sort_key)
