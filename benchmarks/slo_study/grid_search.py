"""The highest rate that keeps a share, on a grid of rates that all searches have in common.

Rates are powers of `RATE_STEP`, named by their exponents, so that a run for one objective or share answers
the others' questions about that rate too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

RATE_STEP = 1.01
"""Neighbouring rates differ by the precision of a capacity."""
FIRST_STRIDE = 7
"""Exponents to the first neighbour that is tried; then it doubles."""


def rate_at(index: int) -> float:
    """Return requests per second."""
    return float(RATE_STEP**index)


def index_near(rate: float) -> int:
    """Return the exponent nearest to a rate."""
    return round(log(rate) / log(RATE_STEP))


@dataclass(frozen=True, slots=True)
class Found:
    """Where the answer changes."""

    index: int | None
    """Of the highest rate that keeps the share; None where none on the grid does."""
    is_bounded: bool = True
    """False where even the grid's highest rate keeps it."""

    @property
    def rate(self) -> float:
        """Requests per second; 0 where none keeps the share."""
        return 0.0 if self.index is None else rate_at(self.index)


def search_grid(keeps: Callable[[int], bool], *, start: int, low: int, high: int) -> Found:
    """Find the highest index that keeps a share.

    Parameters
    ----------
    keeps : judges a rate's index; answers of one search need not be monotone, and then one of the places
        where they change is found.
    start : where to look first.
    low, high : ends of the grid.
    """
    at = min(max(start, low), high)
    stride = FIRST_STRIDE
    if keeps(at):
        while True:
            if at == high:
                return Found(high, is_bounded=False)
            above = min(at + stride, high)
            if not keeps(above):
                return Found(_bisect(keeps, at, above))
            at, stride = above, stride * 2
    while at > low:
        below = max(at - stride, low)
        if keeps(below):
            return Found(_bisect(keeps, below, at))
        at, stride = below, stride * 2
    return Found(None)


def _bisect(keeps: Callable[[int], bool], kept: int, missed: int) -> int:
    while missed - kept > 1:
        middle = (kept + missed) // 2
        if keeps(middle):
            kept = middle
        else:
            missed = middle
    return kept
