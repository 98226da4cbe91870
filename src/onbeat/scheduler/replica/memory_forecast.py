"""The most KV that running requests will need at once, from how long each of them still goes on.

All running requests grow by a token a step, and each frees all it holds when it ends. Sorted by remaining
tokens, the longest first, the first i of them are alive when the i-th is about to end, and each has grown by
the i-th one's remaining tokens:

    peak = max over i of (held_1 + ... + held_i) + i * remaining_i

Nothing higher lies between two ends, since held KV only grows there. A request that skips steps ends later
than the others expect; its share is then underestimated by the steps skipped.

Tokens here are KV slots. Where they come in blocks, a request holds up to block_size - 1 slots more than its
tokens: round `held` up to whole blocks and keep one spare block for each request.

References
----------
Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025. There the remaining
tokens are sampled from the history of lengths; here the caller gives a quantile (`lengths.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, count
from operator import add, itemgetter, mul, neg

_REMAINING = itemgetter(1)


class MemoryForecast:
    """The peak of a set of requests, and what one more would make of it.

    Building costs O(n log n), asking about a newcomer O(log n), taking it in O(n).

    Parameters
    ----------
    rows : (tokens held, tokens still to come) of each request.
    """

    __slots__ = ("_falling", "_highest_after", "_highest_before", "_rows", "_sum_held")

    def __init__(self, rows: Iterable[tuple[int, int]] = ()) -> None:
        self._rows = sorted(rows, key=_REMAINING, reverse=True)
        self._rebuild()

    @property
    def peak_tokens(self) -> int:
        """The most KV slots in use at once; 0 without requests."""
        return self._highest_before[-1]

    def peak_with(self, held_tokens: int, remaining_tokens: int) -> int:
        """Return the peak if one more request joined now."""
        # Those that end later are not moved by it; at each later end it is one more that has grown.
        index = bisect_right(self._falling, -remaining_tokens)
        own = self._sum_held[index] + held_tokens + (index + 1) * remaining_tokens
        after = self._highest_after[index] + held_tokens
        return max(self._highest_before[index], own, after)

    def add(self, held_tokens: int, remaining_tokens: int) -> None:
        """Take one more request in."""
        index = bisect_right(self._falling, -remaining_tokens)
        self._rows.insert(index, (held_tokens, remaining_tokens))
        self._rebuild()

    def _rebuild(self) -> None:
        remaining = [row[1] for row in self._rows]
        self._falling = list(map(neg, remaining))
        self._sum_held = list(accumulate([row[0] for row in self._rows], initial=0))
        at_ends = list(map(add, self._sum_held[1:], map(mul, count(1), remaining)))
        self._highest_before = _running_max(at_ends)
        """Peak over the ends of the first i requests."""
        self._highest_after = _running_max(map(add, reversed(at_ends), reversed(remaining)))[::-1]
        """Peak over the ends after the first i, each with what one more request has grown by then."""


def peak_tokens(rows: Iterable[tuple[int, int]]) -> int:
    """Return the most KV slots that requests will hold at once.

    Parameters
    ----------
    rows : (tokens held, tokens still to come) of each request, in any order.
    """
    peak = sum_held = 0
    for num_alive, (held, remaining) in enumerate(sorted(rows, key=_REMAINING, reverse=True), start=1):
        sum_held += held
        at_end = sum_held + num_alive * remaining
        if at_end > peak:
            peak = at_end
    return peak


def fits(rows: Sequence[tuple[int, int]], newcomer: tuple[int, int], capacity: int) -> bool:
    """Return whether the peak with one more request stays within the capacity.

    Two sums settle most cases: what all would hold if each kept its KV to the last end, and what they hold
    at once now.

    Parameters
    ----------
    rows : (tokens held, tokens still to come) of the running requests.
    newcomer : the same of the one that asks.
    capacity : KV slots in all.
    """
    sum_held = newcomer[0] + sum([held for held, _ in rows])
    if sum_held > capacity:
        return False
    if sum_held + newcomer[1] + sum([remaining for _, remaining in rows]) <= capacity:
        return True
    return peak_tokens([*rows, newcomer]) <= capacity


def _running_max(values: Iterable[int]) -> list[int]:
    """Return the largest of the first i values for i = 0, 1, ...; 0 of none."""
    highest = 0
    result = [0]
    for value in values:
        if value > highest:
            highest = value
        result.append(highest)
    return result
