"""Ratios of paired measurements: both sides ran on the same requests, so what they share cancels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, log

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.metrics.distribution import student_half_width


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its confidence interval; without end where there is a single value."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values with Student's t interval.

    Raises
    ------
    ConfigError : no values.
    """
    if not values:
        raise ConfigError("an interval needs at least one value, got none")
    mean = float(np.mean(values))
    if len(values) == 1:
        return Interval(mean, -inf, inf)
    half = student_half_width(values)
    return Interval(mean, mean - half, mean + half)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Return the geometric mean of the ratios of pairs, with the interval of their logarithms.

    Parameters
    ----------
    numerators, denominators : one pair an experiment, all above 0.

    Raises
    ------
    ConfigError : different numbers of values, none, or one that is not above 0.
    """
    if len(numerators) != len(denominators):
        raise ConfigError(f"{len(numerators)} values cannot be paired with {len(denominators)}")
    if not all(value > 0 for value in (*numerators, *denominators)):
        raise ConfigError("ratios need values above 0: leave out pairs in which a side has none")
    logs = [log(a / b) for a, b in zip(numerators, denominators, strict=True)]
    found = mean_interval(logs)
    return Interval(exp(found.mean), exp(found.low), inf if found.high == inf else exp(found.high))


def geometric_mean(values: Sequence[float]) -> float:
    """Return the n-th root of the product of values above 0.

    Raises
    ------
    ConfigError : no values, or one that is not above 0.
    """
    if not values or not all(value > 0 for value in values):
        raise ConfigError(f"a geometric mean needs values above 0, got {list(values)}")
    return exp(sum(map(log, values)) / len(values))


def interval_text(interval: Interval | None) -> str:
    """Return a mean of positive values with its interval, which one value alone does not have."""
    if interval is None:
        return "-"
    if not isfinite(interval.high):
        return f"{interval.mean:.2f}"
    return f"{interval.mean:.2f} [{max(0.0, interval.low):.2f}, {interval.high:.2f}]"
