"""A histogram that costs a bisection per value: a server may observe ten thousand gaps a second."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence


class Histogram:
    """Counts of values per bucket, as Prometheus defines them. One event loop writes and reads them.

    Parameters
    ----------
    bounds : upper bounds of the buckets, ascending, each inclusive; one more bucket takes the rest.
    """

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_times(self, value: float, times: int) -> None:
        """Count one value so many times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_many(self, values: Iterable[float]) -> None:
        """Count values, for the price of sorting them."""
        ordered = sorted(values)
        self.sum += sum(ordered)
        below = 0
        for bucket, bound in enumerate(self.bounds):
            up_to = bisect_right(ordered, bound, below)
            self._counts[bucket] += up_to - below
            below = up_to
        self._counts[-1] += len(ordered) - below

    @property
    def count(self) -> int:
        """Values seen."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, values up to it), the last one for `+Inf`."""
        total = 0
        pairs = []
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            pairs.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return pairs
