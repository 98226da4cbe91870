"""The highest rate that keeps an objective: a bracket, then bisection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from onbeat.core.options import check, option
from onbeat.metrics.distribution import student_half_width
from onbeat.planner.objectives import Verdict

Judge = Callable[[float], Verdict]
"""Runs the load at a rate (requests per second) and judges it. May raise `Stopped`."""


class Stopped(Exception):
    """The search was asked to end; what it has found so far stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """How precise a search is, and where it gives up."""

    tolerance: float = option(
        0.025,
        group="capacity",
        metavar="SHARE",
        above=0,
        below=1,
        help="stop the search at a bracket of this width",
    )
    """As a share of its lower end."""
    growth: float = 2.0
    """Factor between the rates that look for the bracket."""
    max_growths: int = 12
    """A load that still keeps the objective after so many steps does not saturate."""
    idle_share: float = 1 / 4096
    """Share of the start rate at which requests meet no others."""

    def __post_init__(self) -> None:
        check(self, SearchOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of the load."""

    rate: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """Where the capacity lies, requests per second."""

    low: float
    """The highest rate that kept the objective; 0 where none did."""
    high: float
    """The lowest rate above it that missed it; infinite where none did."""
    trials: tuple[Trial, ...]
    is_finished: bool
    """False where the search was stopped early; the ends are true all the same."""

    @property
    def is_infeasible(self) -> bool:
        """Whether requests miss the objective even alone."""
        return self.is_finished and self.low == 0

    @property
    def limit(self) -> Verdict:
        """What binds: the verdict on the rate at the upper end, which missed the objective."""
        missed = [trial.verdict for trial in self.trials if trial.rate == self.high]
        return missed[-1] if missed else Verdict(is_met=True, reason="nothing missed the objective")


def search_rate(
    judge: Judge,
    *,
    start: float,
    options: SearchOptions | None = None,
    low: float = 0.0,
    high: float = inf,
    on_trial: Callable[[Trial], None] | None = None,
) -> Bracket:
    """Find the highest rate that keeps an objective.

    The bracket grows from `start`, upwards while the objective is kept, downwards while it is missed; if the
    start misses it, requests that meet no others are tried next, so that a hopeless case costs two runs.
    Then the bracket is halved until it is narrow enough. A judge that is not monotone yields one of the rates
    where its answer changes.

    Parameters
    ----------
    judge : deterministic; runs the load at a rate.
    start : requests per second, above 0; the nearer to the capacity, the fewer runs.
    low, high : rates of which it is known that they keep the objective and miss it; they are not run.
    on_trial : hears of each run.
    """
    search = _Search(judge, options or SearchOptions(), on_trial)
    search.low, search.high = low, high
    is_finished = True
    try:
        if low == 0 or high == inf:
            search.bracket(start)
        search.bisect()
    except Stopped:
        is_finished = False
    return Bracket(low=search.low, high=search.high, trials=tuple(search.trials), is_finished=is_finished)


class _Search:
    def __init__(
        self, judge: Judge, options: SearchOptions, on_trial: Callable[[Trial], None] | None
    ) -> None:
        self._judge = judge
        self._options = options
        self._on_trial = on_trial
        self.low = 0.0
        self.high = inf
        self.trials: list[Trial] = []

    def bracket(self, start: float) -> None:
        if start < self.high and self._is_met(start):
            self._grow(start)
        elif self.low > 0 or self._is_met(start * self._options.idle_share):
            self._shrink(start)

    def bisect(self) -> None:
        """Halve a bracket that has two ends."""
        if self.low == 0 or self.high == inf:
            return
        while self.high - self.low > self._options.tolerance * self.low:
            self._is_met((self.low + self.high) / 2)

    def _grow(self, start: float) -> None:
        factor = self._options.growth
        for _ in range(self._options.max_growths):
            if start * factor >= self.high or not self._is_met(start * factor):
                return
            factor *= self._options.growth

    def _shrink(self, start: float) -> None:
        factor = self._options.growth
        rate = start / factor
        while rate > self.low and not self._is_met(rate):
            factor *= factor  # a start far too high is left in few runs
            rate /= factor

    def _is_met(self, rate: float) -> bool:
        verdict = self._judge(rate)
        trial = Trial(rate=rate, verdict=verdict)
        self.trials.append(trial)
        if verdict.is_met:
            self.low = max(self.low, rate)
        else:
            self.high = min(self.high, rate)
        if self._on_trial is not None:
            self._on_trial(trial)
        return verdict.is_met


def rate_interval(brackets: Sequence[Bracket]) -> tuple[float, tuple[float, float]]:
    """Return the mean capacity and its interval.

    The mean is that of the lower ends: rates that were seen to work. With one repeat the interval is its
    bracket. With more, Student's t widens the mean lower end downwards and the mean upper end upwards, so
    that the interval covers both the spread between repeats and the width of the brackets.

    Parameters
    ----------
    brackets : one a repeat, at least one.
    """
    lows = np.array([bracket.low for bracket in brackets])
    highs = np.array([bracket.high for bracket in brackets])
    rate = float(lows.mean())
    if len(brackets) == 1 or not np.isfinite(highs).all():
        return rate, (float(lows.min()), float(highs.max()))
    low = rate - student_half_width(lows)
    high = float(highs.mean()) + student_half_width(highs)
    return rate, (max(0.0, low), high)
