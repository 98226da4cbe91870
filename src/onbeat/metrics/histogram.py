"""A histogram that costs an appended value: a server may observe ten thousand gaps a second."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate

REQUEST_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Upper bounds of buckets; so are the next."""
GAP_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
HOST_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
LAG_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
TOKENS = tuple(float(2**power) for power in range(18))
ERROR_RATIOS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
DRAFT_LENGTHS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0)
ROWS = tuple(float(2**power) for power in range(11))
TTFT_SECONDS = (
    *(0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9),
    *(1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.5, 15.0, 20.0, 30.0, 60.0, 120.0),
)
TBT_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05, 0.06, 0.07),
    *(0.08, 0.09, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 2.5, 5.0, 10.0),
)
"""Both lie close around the objectives that are usual, where it matters on which side a value falls."""
SLACK_SECONDS = (
    *(-1.0, -0.5, -0.2, -0.1, -0.05, -0.02, -0.01, 0.0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Below 0 is late."""


AT_ONCE = 256
"""Values that wait to be counted: together they take a third of the time that each would take alone."""


class Histogram:
    """Counts of values per bucket, as Prometheus defines them. One event loop writes and reads them.

    Values are counted when somebody reads, or when there are `AT_ONCE`.

    Parameters
    ----------
    bounds : upper bounds of the buckets, ascending, each inclusive; one more bucket takes the rest.
    """

    __slots__ = ("_counted", "_new", "_sum", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._sum = 0.0
        self._counted = [0] * (len(self.bounds) + 1)
        self._new: list[float] = []

    def observe(self, value: float) -> None:
        """Count one value."""
        self._new.append(value)
        if len(self._new) >= AT_ONCE:
            self._settle()

    def observe_many(self, values: Iterable[float]) -> None:
        """Count values."""
        self._new += values
        if len(self._new) >= AT_ONCE:
            self._settle()

    def add(self, counts: Sequence[int], total: float) -> None:
        """Count what another histogram of the same bounds has: values in each bucket, and their sum."""
        self._counted = [own + other for own, other in zip(self._counted, counts, strict=True)]
        self._sum += total

    def _settle(self) -> None:
        """Count the values that wait for it."""
        ordered = sorted(self._new)
        self._new.clear()
        self._sum += sum(ordered)
        below = 0
        for bucket, bound in enumerate(self.bounds):
            up_to = bisect_right(ordered, bound, below)
            self._counted[bucket] += up_to - below
            below = up_to
        self._counted[-1] += len(ordered) - below

    @property
    def _counts(self) -> list[int]:
        self._settle()
        return self._counted

    @property
    def sum(self) -> float:
        """Of the values."""
        return self._sum + sum(self._new)

    @property
    def count(self) -> int:
        """Values seen."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, values up to it), the last one for `+Inf`."""
        return list(zip(_words(self.bounds), map(float, accumulate(self._counts)), strict=True))

    def as_dict(self) -> dict[str, object]:
        """Return the bounds, the values in each bucket, one more than bounds, and the sum of all."""
        return {"bounds": self.bounds, "counts": self._counts, "sum": self.sum}


@cache
def _words(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(str, map(float, bounds)), "+Inf")
