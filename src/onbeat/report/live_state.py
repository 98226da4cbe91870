"""What a running server does, from looks at its `GET /state`. Times are seconds, by the server's clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LATENCY_SECONDS = 60.0
"""Classes and errors of predictions are over so long: the numbers of one row are all of one time."""
ANY = "*"
"""Stands for all values of a label."""
State = Mapping[str, Any]
"""An answer of `GET /state`."""


@dataclass(frozen=True, slots=True)
class Window:
    """The time from one look at a server to a later one."""

    old: State | None
    """None: the server's start, when all was 0."""
    new: State

    @property
    def uptime(self) -> float:
        """Since the server's start."""
        return max(float(self.new["unix_time"] - self.new["start_time"]), 1.0)

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.uptime if self.old is None else float(self.new["unix_time"] - self.old["unix_time"])

    def value(self, name: str, *labels: str) -> float | None:
        """Return a number at its end, or the sum of all with these labels; None of none."""
        return _total(self.new.get(name), labels)

    def delta(self, name: str, *labels: str) -> float | None:
        """Return by how much a number, or all with these labels, grew; None where there are none."""
        new = self.value(name, *labels)
        if new is None or self.old is None:
            return new
        return new - (_total(self.old.get(name), labels) or 0.0)

    def rate(self, name: str, *labels: str) -> float | None:
        """Return the growth per second."""
        return ratio(self.delta(name, *labels), self.seconds)

    def count(self, histogram: str, *labels: str) -> float:
        """Return how many values a histogram took in."""
        return sum(self._grown(histogram, labels)[1])

    def sum(self, histogram: str, *labels: str) -> float:
        """Return the sum of these values."""
        return self._grown(histogram, labels)[2]

    def mean(self, histogram: str) -> float | None:
        """Return their mean; None if it took none."""
        return ratio(self.sum(histogram), self.count(histogram))

    def quantile(self, histogram: str, q: float, *labels: str) -> float | None:
        """Return a quantile of them; None if it took none."""
        bounds, counts, _ = self._grown(histogram, labels)
        return quantile(bounds, counts, q)

    def attainment(self, slo_class: str = ANY) -> float | None:
        """Return the share of the requests judged in it that were good; None of none."""
        ended, left = (self.delta("slo_requests_total", slo_class, each) for each in (ANY, "abandoned"))
        return ratio(self.delta("slo_requests_total", slo_class, "good"), (ended or 0.0) - (left or 0.0))

    def _grown(self, name: str, labels: Sequence[str]) -> tuple[Sequence[float], Sequence[float], float]:
        new, old = _at(self.new.get(name), labels), _at((self.old or {}).get(name), labels)
        if not new or not old:
            return (new["bounds"], new["counts"], new["sum"]) if new else ((), (), 0.0)
        counts = [after - before for after, before in zip(new["counts"], old["counts"], strict=True)]
        return new["bounds"], counts, new["sum"] - old["sum"]


class StateHistory:
    """What was seen of one server; forgets it when the server has been started anew."""

    def __init__(self) -> None:
        self._seen: deque[State] = deque()

    def add(self, state: State) -> None:
        """Take in a look at the server."""
        if self._seen and self._seen[-1]["start_time"] != state["start_time"]:
            self._seen.clear()
        self._seen.append(state)
        while len(self._seen) > 2 and self._seen[1]["unix_time"] <= state["unix_time"] - LATENCY_SECONDS:
            self._seen.popleft()

    def window(self, seconds: float) -> Window:
        """Return the latest so many seconds, or as much as was seen; all its life if it was seen once."""
        new = self._seen[-1]
        if len(self._seen) == 1:
            return Window(None, new)
        since = new["unix_time"] - seconds
        return Window(next((s for s in reversed(self._seen) if s["unix_time"] <= since), self._seen[0]), new)


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return a share, or a mean; None where either is not known, or of nothing."""
    return None if part is None or not whole else part / whole


def quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float | None:
    """Estimate a quantile from buckets, evenly spread within each; None of no values.

    Parameters
    ----------
    bounds : upper bounds of the buckets, ascending.
    counts : values in each, and in one more that takes the rest.
    q : in [0, 1].

    Notes
    -----
    As Prometheus' `histogram_quantile`: the first bucket starts at 0 (or is its bound, below 0), and a value
    beyond the last bound is that bound.
    """
    rank = q * sum(counts)
    low, below = 0.0, 0.0
    if not any(counts):
        return None
    for bound, count in zip((*bounds, math.inf), counts, strict=True):
        if count > 0 and below + count >= rank:
            if math.isinf(bound) or bound <= low:
                return low if math.isinf(bound) else bound
            return low + (bound - low) * (rank - below) / count
        low, below = bound, below + count
    return low


def _at(tree: Any, labels: Sequence[str]) -> Any:
    for label in labels:
        tree = (tree or {}).get(label)
    return tree


def _total(tree: Any, labels: Sequence[str]) -> float | None:
    if not isinstance(tree, Mapping):
        return None if tree is None else float(tree)
    first, *rest = labels or (ANY,)
    known = [_total(each, rest) for key, each in tree.items() if first in (ANY, key)]
    found = [each for each in known if each is not None]
    return sum(found) if found else None
