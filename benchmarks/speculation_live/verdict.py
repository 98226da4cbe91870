"""Ratios of the adaptive server to another one, each within a round, with bootstrap intervals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

OFF, ADAPTIVE = "off", "adaptive"
Metric = Literal["output_throughput", "mean_tpot_ms"]
METRICS: tuple[Metric, ...] = ("output_throughput", "mean_tpot_ms")
MORE_IS_BETTER = {"output_throughput": True, "mean_tpot_ms": False}
NUM_RESAMPLES = 10_000
LEVEL = 0.95

ASKED_TPOT_RATIO = 1.6
"""Off over adaptive, editing tasks one at a time."""
ASKED_REACH, ASKED_MEDIAN = 0.98, 0.95
"""Against the better of off and the best fixed length: what the interval reaches, and the least median."""

DISTURBED_SHARE = 0.1
"""Of all cores: where others, the machine's host included, took more during a run, it tells little of the
server."""

FEWEST_ROUNDS, SETTLED_WIDTH = 5, 0.08
"""A load is measured no further once both intervals are so narrow, after so many rounds at least."""

Run = Mapping[str, Any]


class Cell(NamedTuple):
    """A load: which tasks, how many at a time."""

    task_set: str
    concurrency: int


class Interval(NamedTuple):
    """A median with the bootstrap interval of it."""

    median: float
    low: float
    high: float

    def text(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"

    @property
    def keeps_up(self) -> bool:
        """Whether the adaptive server is as good as the other one, as far as can be told."""
        return self.high >= ASKED_REACH and self.median >= ASKED_MEDIAN


def undisturbed(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of those rounds of a cell in which others left the processor to every server.

    What is left out depends on others alone, not on what came out; and ratios need all of a round.
    """
    disturbed = {_place(run) for run in runs if run["cpu"]["others"] > DISTURBED_SHARE}
    return [run for run in runs if _place(run) not in disturbed]


def _place(run: Run) -> tuple[str, int, int]:
    return run["task_set"], run["concurrency"], run["round"]


def by_round(runs: Sequence[Run], server: str, cell: Cell, metric: Metric) -> dict[int, float]:
    """Return a server's value in each round of a cell; rounds without one are left out."""
    return {
        run["round"]: float(run[metric])
        for run in runs
        if (run["server"], run["task_set"], run["concurrency"]) == (server, *cell) and run[metric] is not None
    }


def paired_ratios(runs: Sequence[Run], other: str, cell: Cell, metric: Metric) -> list[float]:
    """Return for each round how many times better the adaptive server was; below 1 it was worse."""
    ours, its = by_round(runs, ADAPTIVE, cell, metric), by_round(runs, other, cell, metric)
    rounds = sorted(ours.keys() & its.keys())
    if MORE_IS_BETTER[metric]:
        return [ours[index] / its[index] for index in rounds]
    return [its[index] / ours[index] for index in rounds]


def best_other(runs: Sequence[Run], cell: Cell, metric: Metric) -> str:
    """Return which of the other servers has the best median.

    It is chosen from the very runs that it is compared in, so chance is on its side.
    """
    medians: dict[str, float] = {
        server: statistics.median(values.values())
        for server in dict.fromkeys(run["server"] for run in runs)
        if server != ADAPTIVE and (values := by_round(runs, server, cell, metric))
    }
    sign = 1 if MORE_IS_BETTER[metric] else -1
    return max(medians, key=lambda server: sign * medians[server])


def median_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the median and its percentile bootstrap interval, rounds drawn with replacement."""
    given = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(len(given), size=(NUM_RESAMPLES, len(given)))
    medians = np.median(given[draws], axis=1)
    low, high = np.quantile(medians, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(np.median(given)), float(low), float(high))


def is_settled(runs: Sequence[Run], cell: Cell) -> bool:
    """Return whether more rounds of a cell would tell little.

    That depends on the width of the intervals, not on where they lie.

    Parameters
    ----------
    runs : those that count, see `undisturbed`.
    """
    if len(by_round(runs, ADAPTIVE, cell, "output_throughput")) < FEWEST_ROUNDS:
        return False
    found = [
        median_interval(paired_ratios(runs, best_other(runs, cell, metric), cell, metric))
        for metric in METRICS
    ]
    return all(interval.high - interval.low <= SETTLED_WIDTH for interval in found)


def cells_of(runs: Sequence[Run]) -> list[Cell]:
    """Return the cells of some runs, in their order."""
    return list(dict.fromkeys(Cell(run["task_set"], run["concurrency"]) for run in runs))
