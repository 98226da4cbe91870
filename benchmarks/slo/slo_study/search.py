"""Which rates to run: as few as show where each criterion is missed."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.harness.criteria import Criterion, Curve

FIRST_STRIDE = 3
"""Exponents to the first neighbour that is tried; later ones are further and further apart."""
CLOSE_STRIDE = 2
"""Where the same policy's capacity in this cell is known of another seed."""
DEEPEST = 48
"""Exponents (a tenth of the rate) below the start at which a search gives up: nothing that is compared is so
far apart."""

Ask = Callable[[int], None]
"""Runs a rate, which puts its scores into curves."""


def search(
    curve: Curve,
    criterion: Criterion,
    ask: Ask,
    *,
    start: int,
    stride: int = FIRST_STRIDE,
    least: int | None = None,
) -> None:
    """Run rates until a criterion's capacity can be read off.

    Parameters
    ----------
    start : where to look first.
    stride : exponents to the first neighbour.
    least : what makes the search worth going on; where this rate does not keep the criterion, nothing below
        it is looked at.
    """
    lowest = start - DEEPEST if least is None else least
    while not (bracket := curve.bracket(criterion)).is_narrow:
        kept, missed = bracket.kept, bracket.missed
        if missed is not None and missed <= lowest:
            return
        if kept is not None and missed is not None:
            ask(_between(curve, criterion, kept, missed))
            continue
        if kept is None and (missed is None or missed > start):
            ask(max(start, lowest))
        elif missed is None and kept is not None and kept < start:
            ask(start)
        else:
            ask(max(lowest, missed - stride) if missed is not None else (kept or 0) + stride)
            stride += 1 + stride // 2


def _between(curve: Curve, criterion: Criterion, kept: int, missed: int) -> int:
    """Return the exponent to look at between two: just below the expected crossing, no end's neighbour."""
    width = missed - kept
    if width <= 3 or curve[missed].is_lost:  # of a run that was ended, the share is but a bound
        return (kept + missed) // 2
    expected = round(curve.crossing(criterion, kept, missed)) - 1
    return min(max(expected, kept + 2), missed - 2)
