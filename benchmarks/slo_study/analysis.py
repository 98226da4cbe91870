"""From lines of results to what is said of a cell: capacities, whether it binds, ratios of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from onbeat.planner.paired import Interval, geometric_mean, mean_interval, ratio_interval
from slo_study.cells import BOUND, STATIC_POLICIES, Cell
from slo_study.store import Line

LEAST_RATE = 0.01
"""Stands for a capacity of 0 in means of logarithms: below the lowest rate of the searches."""
BINDING = (0.05, 0.95)
REGRESSION = 0.98


@dataclass(frozen=True, slots=True)
class Ratio:
    """One policy's capacity over another's in a cell, by pairs of equal requests."""

    interval: Interval | None
    """None where no pair has two capacities above 0."""
    num_pairs: int
    num_won: int
    """Pairs in which only the other has no capacity at all; they are not in the interval."""
    num_lost: int
    """Pairs in which only this one has none."""

    @property
    def is_regression(self) -> bool:
        """Whether the interval lies wholly below what passes for equal, or pairs were lost."""
        below = self.interval is not None and self.interval.high < REGRESSION
        return below or self.num_lost > self.num_won


class CellResults:
    """What is known of one cell at one share."""

    def __init__(self, cell: Cell, share: str, lines: Iterable[Line]) -> None:
        self.cell = cell
        self.share = share
        self._lines: dict[str, dict[tuple[int, int], Line]] = {}
        for line in lines:
            own = self._lines.setdefault(line.policy, {})
            own[line.seed, line.num_requests + line.num_skipped] = line

    @property
    def policies(self) -> list[str]:
        return list(self._lines)

    def any_line(self) -> Line:
        """Return a line, for what does not depend on the policy."""
        return next(iter(next(iter(self._lines.values())).values()))

    def lines(self, policy: str) -> list[Line]:
        return list(self._lines.get(policy, {}).values())

    def capacities(self, policy: str) -> list[float]:
        return [line.capacity[self.share] for line in self.lines(policy)]

    def interval(self, policy: str) -> Interval | None:
        rates = self.capacities(policy)
        return mean_interval(rates) if rates else None

    def level(self, policy: str) -> float:
        """Return the geometric mean of the capacities."""
        return geometric_mean([max(rate, LEAST_RATE) for rate in self.capacities(policy)])

    def best_of(self, names: Iterable[str]) -> str | None:
        """Return the policy with the highest level; None where none of them was run."""
        return max((name for name in names if self.capacities(name)), key=self.level, default=None)

    def best_static(self) -> str | None:
        """Return the best of the hand-tuned policies; None where none was run."""
        return self.best_of(STATIC_POLICIES)

    def tightness(self) -> float | None:
        """Return the best hand-tuned policy's capacity over its own within loose objectives."""
        best = self.best_static()
        lines = [line for line in self.lines(best) if line.loose] if best else []
        if not lines:
            return None
        tight = geometric_mean([max(line.long[self.share], LEAST_RATE) for line in lines])
        loose = geometric_mean([max(line.loose[self.share], LEAST_RATE) for line in lines])
        # A rate that stands for 0 says nothing but that the objectives cannot be kept.
        return 0.0 if tight <= LEAST_RATE else tight / loose

    @property
    def binds(self) -> bool:
        tightness = self.tightness()
        return tightness is not None and BINDING[0] <= tightness <= BINDING[1]

    def ratio(self, policy: str, other: str) -> Ratio:
        ours, theirs = self._lines.get(policy, {}), self._lines.get(other, {})
        pairs = [
            (ours[key].capacity[self.share], theirs[key].capacity[self.share])
            for key in ours
            if key in theirs
        ]
        both = [(a, b) for a, b in pairs if a > 0 and b > 0]
        return Ratio(
            interval=ratio_interval([a for a, _ in both], [b for _, b in both]) if both else None,
            num_pairs=len(pairs),
            num_won=sum(a > 0 and b == 0 for a, b in pairs),
            num_lost=sum(a == 0 and b > 0 for a, b in pairs),
        )

    def closeness(self, policy: str, *, sustained: bool) -> float | None:
        """Return the capacity over the bound, as a geometric mean over the seeds where both are above 0."""
        ours, bounds = self._lines.get(policy, {}), self._lines.get(BOUND, {})
        shares = []
        for key in ours:
            if key in bounds:
                bound = (bounds[key].long if sustained else bounds[key].capacity)[self.share]
                rate = ours[key].capacity[self.share]
                if rate > 0 and bound > 0:
                    shares.append(rate / bound)
        return geometric_mean(shares) if shares else None

    def above_bound(self) -> list[Line]:
        """Return the lines that pass the bound, which none may."""
        bounds = self._lines.get(BOUND, {})
        return [
            line
            for policy, lines in self._lines.items()
            for key, line in lines.items()
            if policy != BOUND
            and key in bounds
            and line.capacity[self.share] > bounds[key].capacity[self.share] * 1.001
        ]


def collect(lines: Sequence[Line], share: str, *, tag: str | None = None) -> list[CellResults]:
    """Return the cells that have results, in order; of repeated searches the latest counts.

    Parameters
    ----------
    tag : leave out planning policies of other versions; None takes all.
    """
    latest: dict[object, Line] = {}
    for line in lines:
        if tag is None or line.tag in ("", tag):
            latest[line.key] = line
    cells = sorted({line.cell for line in latest.values()})
    return [
        CellResults(cell, share, [line for line in latest.values() if line.cell == cell]) for cell in cells
    ]


def best_everywhere(cells: Sequence[CellResults]) -> str | None:
    """Return the one hand-tuned policy that loses least against the best of each cell, over all cells."""
    totals = {}
    for policy in STATIC_POLICIES:
        if cells and all(cell.capacities(policy) for cell in cells):
            totals[policy] = geometric_mean(
                [cell.level(policy) / cell.level(cell.best_static() or policy) for cell in cells]
            )
    return max(totals, key=lambda name: totals[name], default=None)


def mean_ratio(ratios: Iterable[Ratio]) -> tuple[float, int]:
    """Return the geometric mean over cells and how many there are; NaN of none."""
    means = [each.interval.mean for each in ratios if each.interval is not None and each.interval.mean < inf]
    return (geometric_mean(means), len(means)) if means else (float("nan"), 0)
