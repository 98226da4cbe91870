"""The waiting queue and the running list: sorted, at a cost that does not grow with the number that wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, islice
from operator import attrgetter

from onbeat.scheduler.replica.request_state import BEST_EFFORT_RANK, RequestState

_MOST_IN_BUCKET = 512
"""Requests of a bucket. Finding one's place costs the number of buckets, moving it in the length of one: with
100,000 waiting some 300 of each."""


sort_key = attrgetter("sort_key")
"""Of a request. The rank alone, as `(rank,)`, stands before all keys that begin with it."""
_last_key, _items = attrgetter("last_key"), attrgetter("items")
"""Of a bucket."""


class QueuedWork:
    """How many requests some are, and the sums of their `RequestState.queued_work`."""

    __slots__ = ("num_pairs", "num_requests", "num_tokens")

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.num_pairs = 0.0

    def count(self, state: RequestState, sign: int) -> None:
        """Count a request's work in (1) or out (-1)."""
        num_tokens, num_pairs = state.queued_work
        self.num_requests += sign
        self.num_tokens += sign * num_tokens
        self.num_pairs += sign * num_pairs

    def add(self, other: QueuedWork, sign: int) -> None:
        """Count the work of several in (1) or out (-1)."""
        self.num_requests += sign * other.num_requests
        self.num_tokens += sign * other.num_tokens
        self.num_pairs += sign * other.num_pairs


class _Bucket(QueuedWork):
    """Some requests in a row, and the sums of their work."""

    __slots__ = ("items", "last_key")

    def __init__(self, items: list[RequestState]) -> None:
        super().__init__()
        self.items = items
        self.last_key: tuple[float, ...] = items[-1].sort_key if items else ()
        for state in items:
            self.count(state, 1)


class RankedQueue(QueuedWork):
    """Requests by ascending `sort_key`, in buckets of some hundred, and the sums of their work.

    No operation looks at all of them: those at the head cost O(1), others the number of buckets and the
    length of one.
    """

    __slots__ = ("buckets",)

    def __init__(self) -> None:
        super().__init__()
        self.buckets = [_Bucket([])]
        """None of them is empty, unless it is the only one."""

    def first(self, most: int) -> list[RequestState]:
        """Return the first requests, at most so many."""
        return list(islice(chain.from_iterable(map(_items, self.buckets)), most))

    def below(self, rank: float) -> QueuedWork:
        """Return the work of the requests of a lower rank, counted from the nearer end."""
        below, buckets = QueuedWork(), self.buckets
        index = bisect_left(buckets, (rank,), key=_last_key)
        if 2 * index <= len(buckets):
            for bucket in buckets[:index]:
                below.add(bucket, 1)
        else:
            below.add(self, 1)
            for bucket in buckets[index:]:
                below.add(bucket, -1)
        if index < len(buckets):
            items = buckets[index].items
            for state in items[: bisect_left(items, (rank,), key=sort_key)]:
                below.count(state, 1)
        return below

    def push(self, state: RequestState) -> None:
        """Put a request at its place."""
        self.count(state, 1)
        buckets, key = self.buckets, state.sort_key
        index = min(bisect_left(buckets, key, key=_last_key), len(buckets) - 1)
        bucket = buckets[index]
        insort(bucket.items, state, key=sort_key)
        bucket.count(state, 1)
        bucket.last_key = max(bucket.last_key, key)
        if len(bucket.items) > _MOST_IN_BUCKET:
            middle = len(bucket.items) // 2
            buckets[index : index + 1] = [_Bucket(bucket.items[:middle]), _Bucket(bucket.items[middle:])]

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it is."""
        self.count(state, -1)
        buckets = self.buckets
        index = bisect_left(buckets, state.sort_key, key=_last_key)
        bucket = buckets[index]
        place = bisect_left(bucket.items, state.sort_key, key=sort_key)
        assert bucket.items.pop(place) is state, "sort keys are unique"
        bucket.count(state, -1)
        if bucket.items:
            bucket.last_key = bucket.items[-1].sort_key
        elif len(buckets) > 1:
            del buckets[index]


class WaitingQueue:
    """Requests that wait, by ascending `sort_key`, the first part of which is a rank.

    Attributes
    ----------
    length : how many they are.
    num_prompt_tokens : of all of them.
    ranked : those before best effort.
    best_effort : those from `BEST_EFFORT_RANK` on.
    """

    def __init__(self) -> None:
        self.ranked, self.best_effort = RankedQueue(), RankedQueue()
        self.length = self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[RequestState]:
        return chain.from_iterable(map(_items, chain(self.ranked.buckets, self.best_effort.buckets)))

    def peek(self, offset: int = 0) -> RequestState | None:
        """Return the request `offset` places behind the head, or None."""
        return next(islice(self, offset, None), None)

    def push(self, state: RequestState) -> None:
        """Let a request wait at its place."""
        num_cached = state.num_hit_tokens
        num_tokens = state.num_tokens - num_cached
        state.queued_work = (num_tokens, num_tokens * (num_cached + 0.5 * num_tokens))
        self.length += 1
        self.num_prompt_tokens += state.num_prompt_tokens
        (self.ranked if state.sort_key[0] < BEST_EFFORT_RANK else self.best_effort).push(state)

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it is."""
        self.length -= 1
        self.num_prompt_tokens -= state.num_prompt_tokens
        (self.ranked if state.sort_key[0] < BEST_EFFORT_RANK else self.best_effort).remove(state)


RunningList = list[RequestState]
"""Requests in the batch, by ascending `sort_key`; the last one is the first to be preempted."""
