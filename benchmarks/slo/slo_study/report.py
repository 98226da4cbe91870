"""The page of the study: bars, means over cells, and the capacities of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.criteria import CRITERIA, Curve, Score, rate_at
from benchmarks.harness.intervals import Interval, geometric_mean, interval_text, ratio_interval
from benchmarks.harness.pages import markdown_table
from benchmarks.slo.slo_study.cells import (
    CELLS,
    FAMILIES,
    MIXES,
    OLD_CELLS,
    SIMPLE,
    STATIC,
    STUDIED,
    SUBJECT,
    Cell,
)
from benchmarks.slo.slo_study.scored import Scored, curves
from benchmarks.slo.slo_study.tasks import ONLY_SHARES, SHARES

LEAST = 0.97
"""A cell whose interval lies wholly below this is one in which the subject is worse."""
NOTE = """
Made by `python -m benchmarks.slo.study run`, then `report --write`, both with `--tag`, the version that is
studied. Simulated replicas (uncalibrated roofline step times, as in `onbeat simulate`; every request declares
exactly its output length). A load
lasts: at least 4,000 requests and ten minutes of arrivals are measured after a warm-up that is thrown away
(two minutes, or 15 % of what is measured where that is more), and of what arrives at most 2 % is left over,
in requests and in prompt tokens (late and unfinished in the last quarter less the second, over the arrivals
in between; "any queue": attainment alone).
A capacity lies between two rates at most 10 % apart (worst decile and tail: 22 %), one of
which keeps the criterion, read off a straight line over the logarithm of the rate (of the share's odds).
Intervals are Student's t of the logarithms of ratios of pairs: equal requests, seed by seed, or, of means of
one seed, cell by cell. Families (`static`, `static+triage`, `edf+triage`: budgets of 256 to 8,192) count by
the best of them in each cell, criterion and seed; after the first seed only the two best go on. On traces a
seed is where the window starts, with its own times squeezed to the rate; a window that comes to the trace's
end goes on at its start, without shared prefixes, so that windows of the code trace overlap. Requests that an
idle machine with an empty prefix cache could not serve in time count neither way; those that do not fit the
context are not offered. A capacity of less than a tenth of where others lie is taken as that tenth; where
neither of two policies has more, they are not compared.
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """What the policy is held to: a geometric mean over cells of ratios to a rival."""

    rival: str
    criterion: str
    least: float
    cells: str = "all"


BARS = (
    Bar(STATIC, "90 %", 1.4),
    Bar(STATIC, "99 %", 1.2),
    Bar(STATIC, "90 %", 1.7, "class mix"),
    Bar(STATIC, "worst decile", 1.12),
    Bar(SIMPLE, "90 %", 1.0),
    Bar(SIMPLE, "99 %", 1.0),
)
GROUPS: dict[str, Callable[[Cell], bool]] = {
    "all": lambda _cell: True,
    "old grid": lambda cell: cell in OLD_CELLS,
    "new cells": lambda cell: cell not in OLD_CELLS,
    "class mix": lambda cell: cell.slo in MIXES,
    "gap mode": lambda cell: cell.mode == "gap",
}


class Study:
    """Capacities and their ratios, from runs.

    Parameters
    ----------
    subject : the policy that is compared with all others.
    """

    def __init__(self, runs: Sequence[Scored], subject: str = SUBJECT) -> None:
        self.subject = subject
        self.runs = runs
        self.curves = curves(runs)
        self.cells = sorted({each.run.cell for each in runs})
        self.seeds = sorted({each.run.seed for each in runs})
        present = {each.run.policy for each in runs}
        named = [name for name in STUDIED if present & set(members_of(name))]
        family = {member for names in FAMILIES.values() for member in names}
        self.policies = named + sorted(present - set(named) - family)

    def capacity(self, cell: Cell, policy: str, criterion: str, seed: int) -> float | None:
        """Return the capacity, of a family that of the best; None where it is not known."""
        if policy in ONLY_SHARES and criterion not in SHARES:
            return None  # some rates were run, but not those that would show it
        rule = CRITERIA[criterion]
        curves_ = [self.curves.get((cell, name, seed)) for name in members_of(policy)]
        known = [curve for curve in curves_ if curve]
        rates = [curve.capacity(rule) for curve in known]
        found = [rate for rate in rates if rate is not None]
        if found:
            return max(found)
        # Nothing was kept down to where the search gave up; a search that goes on has kept something.
        if known and all(not curve.bracket(rule).kept for curve in known) and _gave_up(known):
            return min(rate_at(min(curve)) for curve in known)
        return None

    def best_member(self, cell: Cell, policy: str, criterion: str) -> str | None:
        """Return which of a family is the best in most seeds."""
        votes: list[str] = []
        for seed in self.seeds:
            rates = {name: self.capacity(cell, name, criterion, seed) for name in members_of(policy)}
            known = {name: rate for name, rate in rates.items() if rate is not None}
            votes += [max(known, key=lambda name: known[name])] if known else []
        return max(votes, key=votes.count) if votes else None

    def ratio(self, cell: Cell, rival: str, criterion: str) -> tuple[Interval, int] | None:
        """Return the subject's capacity over a rival's and in how many seeds; None where there is no pair."""
        pairs = [pair for seed in self.seeds if (pair := self.pair(cell, rival, criterion, seed))]
        if not pairs:
            return None
        return ratio_interval([own for own, _ in pairs], [other for _, other in pairs]), len(pairs)

    def pair(self, cell: Cell, rival: str, criterion: str, seed: int) -> tuple[float, float] | None:
        """Return the subject's capacity and a rival's, None where there is nothing to compare.

        Where neither keeps the criterion at any rate that was looked at, there is none: how far down the two
        searches went says nothing.
        """
        policies = (self.subject, rival)
        own, other = (self.capacity(cell, policy, criterion, seed) for policy in policies)
        is_kept = any(self._keeps(cell, policy, criterion, seed) for policy in policies)
        return (own, other) if is_kept and own is not None and other is not None else None

    def _keeps(self, cell: Cell, policy: str, criterion: str, seed: int) -> bool:
        rule = CRITERIA[criterion]
        curves_ = [self.curves.get((cell, name, seed)) for name in members_of(policy)]
        return any(curve.bracket(rule).kept is not None for curve in curves_ if curve)

    def ratios(self, rival: str, criterion: str, group: str) -> list[tuple[Cell, Interval, int]]:
        """Return the ratios of the cells of a group."""
        found = ((cell, self.ratio(cell, rival, criterion)) for cell in self.cells if GROUPS[group](cell))
        return [(cell, *ratio) for cell, ratio in found if ratio is not None]

    def mean(self, rival: str, criterion: str, group: str) -> tuple[Interval, int] | None:
        """Return the geometric mean over cells, with its interval, and the number of cells.

        The interval is over the seeds; where all have but one, over the cells.
        """
        by_cell = self.ratios(rival, criterion, group)
        if not by_cell:
            return None
        cells = [cell for cell, _, _ in by_cell]
        of_cells = [interval.mean for _, interval, _ in by_cell]
        middle = geometric_mean(of_cells)
        of_seeds = []
        for seed in self.seeds:
            pairs = [self.pair(cell, rival, criterion, seed) for cell in cells]
            if None not in pairs:
                of_seeds.append(geometric_mean([own / other for own, other in filter(None, pairs)]))
        found = of_seeds if len(of_seeds) > 1 else of_cells
        spread = ratio_interval(found, [1.0] * len(found))
        return Interval(middle, spread.low, spread.high), len(cells)


def _gave_up(known: Iterable[Curve]) -> bool:
    return any(max(curve) - min(curve) >= 10 for curve in known)


def members_of(policy: str) -> tuple[str, ...]:
    """Return the policies of a family without asking whether they exist: lines may be older than a policy."""
    return FAMILIES.get(policy, (policy,))


def markdown(study: Study, *, date: str, remark: str = "") -> str:
    """Return the whole page."""
    static = FAMILIES[STATIC]
    runs = {
        (each.cell.group if each.policy in static else each.cell, each.policy, each.seed, each.index)
        for each, _, _ in study.runs
    }
    seconds = sum(each.seconds for each in study.runs)
    counts = [f"`{name}` {_seeds_of(study, name)}" for name in study.policies]
    parts = [
        "# Capacity within latency objectives, of loads that last",
        f"{date}. {NOTE.strip()}",
        f"{len(study.cells)} of {len(CELLS)} cells; {len(runs)} runs, {seconds / 3600:.1f} hours of a core; "
        f"seeds (cells with at least so many): {'; '.join(counts)}.",
        *([remark] if remark else []),
        "## Bars",
        markdown_table(["bar", "measured", "cells", "verdict"], [*_bars(study)]),
        *_worse(study),
        "## Geometric means over cells",
        *_means(study),
        "## Who pays",
        *_who_pays(study),
    ]
    for criterion in CRITERIA:
        parts += [f"## Cells: {criterion}", _cells(study, criterion)]
    return "\n\n".join(parts) + "\n"


def _seeds_of(study: Study, policy: str) -> str:
    numbers = [
        sum(study.capacity(cell, policy, "90 %", seed) is not None for seed in study.seeds)
        for cell in study.cells
    ]
    steps = [
        f"{sum(n >= least for n in numbers)} with {least}" for least in range(1, max(numbers, default=0) + 1)
    ]
    return ", ".join(steps) or "none"


def _bars(study: Study) -> Iterator[list[str]]:
    for bar in BARS:
        found = study.mean(bar.rival, bar.criterion, bar.cells)
        name = f"{bar.criterion}, {bar.cells}: at least {bar.least:g} times `{bar.rival}`"
        if found is None:
            yield [name, "-", "0", "not measured"]
            continue
        interval, count = found
        yield [
            name,
            interval_text(interval),
            str(count),
            "held" if interval.mean >= bar.least else "**not held**",
        ]


def _worse(study: Study) -> Iterator[str]:
    for rival in [name for name in study.policies if name != study.subject]:
        worse = [
            f"{cell}, {criterion} ({interval_text(interval)})"
            for criterion in CRITERIA
            for cell, interval, count in study.ratios(rival, criterion, "all")
            if count > 1 and interval.high < LEAST
        ]
        single = [
            interval.mean < LEAST
            for criterion in CRITERIA
            for _, interval, count in study.ratios(rival, criterion, "all")
            if count == 1
        ]
        more = f"; of {len(single)} with one seed {sum(single)} are below" if any(single) else ""
        shown = "; ".join(worse) or "none"
        yield f"Cells whose interval against `{rival}` lies wholly below {LEAST}: {shown}{more}."


def _means(study: Study) -> Iterator[str]:
    for group in GROUPS:
        rows = []
        for rival in study.policies:
            if rival == study.subject:
                continue
            means = [study.mean(rival, criterion, group) for criterion in CRITERIA]
            if any(means):
                rows.append(
                    [f"`{rival}`", *("-" if m is None else f"{interval_text(m[0])} ({m[1]})" for m in means)]
                )
        if rows:
            yield f"{group}:\n\n" + markdown_table([f"`{study.subject}` over", *CRITERIA], rows)


def _who_pays(study: Study) -> Iterator[str]:
    """Yield who is good and who waits longest at the subject's own capacity at 90 %."""
    yield (
        f"Means over cells and seeds at the rates next below `{study.subject}`'s capacity at 90 %, of each "
        f"rival beside those of `{study.subject}` under the same loads (of a family the best budget, where "
        "it ran to its end at that rate): share of good requests by decile of prompt length, shortest first, "
        "and the longest TTFT of each decile, s (mean of the runs' longest)."
    )
    rivals = [name for name in study.policies if name != study.subject]
    pairs: dict[str, list[tuple[Score, Score]]] = {}
    for (cell, name, seed), curve in study.curves.items():
        if name != study.subject or (kept := curve.bracket(CRITERIA["90 %"]).kept) is None:
            continue
        own = curve[kept]
        if len(own.deciles) != 10:
            continue
        for rival in rivals:
            scores = [
                found[kept]
                for member in members_of(rival)
                if (found := study.curves.get((cell, member, seed))) and kept in found
            ]
            scores = [score for score in scores if not score.is_lost and len(score.deciles) == 10]
            if scores:
                pairs.setdefault(rival, []).append((own, max(scores, key=lambda score: score.good)))
    rows = []
    for rival, both in pairs.items():
        for what, digits, of in (("good", 3, "deciles"), ("longest, s", 1, "longest")):
            for name, place in ((study.subject, 0), (rival, 1)):
                means = np.mean([getattr(pair[place], of) for pair in both], 0)
                rows.append([f"`{name}`", what, str(len(both)), *(f"{x:.{digits}f}" for x in means)])
    yield markdown_table(["policy", "", "runs", *(str(decile) for decile in range(1, 11))], rows)


def _cells(study: Study, criterion: str) -> str:
    rivals = [name for name in study.policies if name != study.subject]
    header = ["cell", "seeds", f"`{study.subject}`, requests/s", *(f"over `{name}`" for name in rivals)]
    rows = []
    for cell in study.cells:
        rates = [study.capacity(cell, study.subject, criterion, seed) for seed in study.seeds]
        own = [rate for rate in rates if rate is not None]
        ratios = []
        for rival in rivals:
            ratio = study.ratio(cell, rival, criterion)
            best = study.best_member(cell, rival, criterion) if rival in FAMILIES else None
            budget = f" ({best.rpartition('-')[2]})" if best else ""
            ratios.append("-" if ratio is None else f"{interval_text(ratio[0])}{budget}")
        rows.append([str(cell), str(len(own)), f"{geometric_mean(own):.2f}" if own else "-", *ratios])
    return markdown_table(header, rows)
