"""The highest rate that keeps a share, on a grid of rates that all searches have in common.

Rates are powers of `RATE_STEP`, named by their exponents, so that a run for one objective or share answers
the others' questions about that rate too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


@dataclass(frozen=True, slots=True)
class Known:
    """What earlier runs say: at least one rate up to `kept` keeps the share, `missed` and above do not."""

    kept: int | None = None
    missed: int | None = None


def known_from(answers: Mapping[int, bool]) -> Known:
    """Return the bracket that some answers leave: the highest rate that keeps, the next that does not."""
    kept = max((index for index, keeps in answers.items() if keeps), default=None)
    above = [i for i, keeps in answers.items() if not keeps and (kept is None or i > kept)]
    return Known(kept, min(above, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Which rates a search may try, and how precise it is."""

    low: int
    high: int
    precision: int = 1
    """Exponents between the ends of the final bracket."""


def search_grid(keeps: Callable[[int], bool], *, start: int, grid: Grid, known: Known | None = None) -> Found:
    """Find the highest index that keeps a share.

    Parameters
    ----------
    keeps : judges a rate's index; answers of one search need not be monotone, and then one of the places
        where they change is found.
    start : where to look first.
    known : earlier answers, which are not asked for again.
    """
    bracket = known or Known()

    def ask(index: int) -> bool:
        if bracket.kept is not None and index <= bracket.kept:
            return True
        if bracket.missed is not None and index >= bracket.missed:
            return False
        return keeps(index)

    low = grid.low if bracket.kept is None else bracket.kept
    high = grid.high if bracket.missed is None else bracket.missed
    at = min(max(start, low), high)
    stride = FIRST_STRIDE
    if ask(at):
        while True:
            if at == grid.high:
                return Found(grid.high, is_bounded=False)
            above = min(at + stride, high)
            if not ask(above):
                return Found(_bisect(ask, at, above, grid.precision))
            at, stride = above, stride * 2
    while at > grid.low:
        below = max(at - stride, low)
        if ask(below):
            return Found(_bisect(ask, below, at, grid.precision))
        at, stride = below, stride * 2
    return Found(None)


def _bisect(keeps: Callable[[int], bool], kept: int, missed: int, precision: int) -> int:
    while missed - kept > precision:
        middle = (kept + missed) // 2
        if keeps(middle):
            kept = middle
        else:
            missed = middle
    return kept
