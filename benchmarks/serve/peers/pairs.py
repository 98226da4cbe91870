"""Ratios of two servers, each taken within a round, since a machine's speed drifts between rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Run = Mapping[str, Any]


class Spread(NamedTuple):
    """Of a few values."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def by_round(runs: Sequence[Run], server: str, load: str, key: str) -> dict[int, float]:
    """Return a server's value of each round; rounds without one are left out.

    Parameters
    ----------
    key : of the run; `short.NAME` is that of its short prompts.
    """
    values: dict[int, float] = {}
    for run in runs:
        if run["server"] != server or run["load"] != load:
            continue
        outer, _, inner = key.partition(".")
        value = run[outer] if not inner else (run[outer] or {}).get(inner)
        if value is not None:
            values[run["round"]] = float(value)
    return values


def spread(values: Sequence[float]) -> Spread | None:
    """Return median, least and most; None of nothing."""
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def ratio(runs: Sequence[Run], ours: str, other: str, load: str, key: str) -> Spread | None:
    """Return our value over the other's, within each round that has both; a value of 0 gives no ratio."""
    own, its = by_round(runs, ours, load, key), by_round(runs, other, load, key)
    return spread([own[index] / its[index] for index in sorted(own) if its.get(index)])
