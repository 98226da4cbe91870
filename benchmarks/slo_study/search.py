"""Which rates to run: as few as show where each criterion is lost."""

from __future__ import annotations

from collections.abc import Callable

from slo_study.criteria import CRITERIA, Criterion, Curve, index_near, rate_at
from slo_study.trial import Question, Runner

FIRST_STRIDE = 3
"""Exponents to the first neighbour that is tried; then it doubles."""
DEEPEST = 48
"""Exponents (a tenth of the rate) below the start at which a search gives up: nothing that is compared is so
far apart."""

Ask = Callable[[int], None]
"""Runs a rate, which puts its scores into curves."""


def search(curve: Curve, criterion: Criterion, ask: Ask, *, start: int, least: int | None = None) -> None:
    """Run rates until a criterion's capacity can be read off.

    Parameters
    ----------
    start : where to look first.
    least : what makes the search worth going on; where this rate does not keep the criterion, nothing below
        it is looked at.
    """
    lowest = start - DEEPEST if least is None else least
    stride = FIRST_STRIDE
    while not (bracket := curve.bracket(criterion)).is_narrow:
        kept, missed = bracket.kept, bracket.missed
        if missed is not None and missed <= lowest:
            return
        if kept is None and missed is None:
            ask(max(start, lowest))
        elif missed is None:
            assert kept is not None
            ask(start if kept < start else kept + stride)
            stride = stride if kept < start else stride * 2
        elif kept is None:
            ask(max(lowest, start if missed > start else missed - stride))
            stride = stride if missed > start else stride * 2
        else:
            ask(_between(curve, criterion, kept, missed))


def _between(curve: Curve, criterion: Criterion, kept: int, missed: int) -> int:
    """Return the exponent to look at between two: just below the expected crossing, no end's neighbour."""
    width = missed - kept
    if width <= 3 or curve[missed].is_lost:  # of a run that was ended, the share is but a bound
        return (kept + missed) // 2
    expected = round(curve.crossing(criterion, kept, missed)) - 1
    return min(max(expected, kept + 2), missed - 2)


def find_capacity(
    runner: Runner, question: Question, criterion: str, *, start: float, seed: int = 0
) -> float:
    """Return a capacity, requests per second; 0 where nothing down to a tenth of `start` keeps the criterion.

    Parameters
    ----------
    start : where to look first, requests per second.
    """
    curve = Curve()

    def ask(index: int) -> None:
        curve[index] = runner.run(rate_at(index), seed, [question])[question]

    search(curve, CRITERIA[criterion], ask, start=index_near(start))
    return curve.capacity(CRITERIA[criterion]) or 0.0
