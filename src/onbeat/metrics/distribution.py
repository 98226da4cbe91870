"""Values of one metric as the few numbers that people quote, and how far chance moves these."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onbeat.core.extras import require

Array = NDArray[np.float64]

CHUNK_VALUES = 1 << 20
LEVEL = 0.95
"""Confidence of intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Statistics of the values of one metric, milliseconds; all are None where there was no value."""

    mean_ms: float | None
    median_ms: float | None
    std_ms: float | None
    """Standard deviation of the values themselves, not an estimate from a sample."""
    max_ms: float | None
    percentiles_ms: Mapping[str, float | None] = field(default_factory=dict)
    """By name (`percentile_name`), those that were asked for."""

    @property
    def statistics_ms(self) -> dict[str, float | None]:
        """Every statistic by its name: `mean`, `median`, `std`, `max`, then the percentiles."""
        return {
            "mean": self.mean_ms,
            "median": self.median_ms,
            "std": self.std_ms,
            "max": self.max_ms,
            **self.percentiles_ms,
        }


def describe(values: Array, percentiles: Sequence[float] = (), *, overwrite: bool = False) -> Distribution:
    """Return the statistics of values.

    Parameters
    ----------
    values : seconds; with no values every statistic is None.
    percentiles : each in [0, 100].
    overwrite : reorder `values` in place instead of copying them.
    """
    names = [percentile_name(p) for p in percentiles]
    if not values.size:
        nothing = dict.fromkeys(names)
        return Distribution(mean_ms=None, median_ms=None, std_ms=None, max_ms=None, percentiles_ms=nothing)
    median, *others = (value * 1e3 for value in quantiles(values, [50, *percentiles], overwrite=overwrite))
    return Distribution(
        mean_ms=float(values.mean()) * 1e3,
        median_ms=median,
        std_ms=_standard_deviation(values) * 1e3,
        max_ms=float(values.max()) * 1e3,
        percentiles_ms=dict(zip(names, others, strict=True)),
    )


def student_half_width(values: ArrayLike) -> float:
    """Return half the width of the interval of the mean of independent values at `LEVEL`, by Student's t.

    Parameters
    ----------
    values : at least two.
    """
    stdtrit = require("scipy.special", extra="plan", purpose="an interval of confidence").stdtrit
    values = np.asarray(values, dtype=np.float64)
    count = values.size
    return float(stdtrit(count - 1, (1 + LEVEL) / 2)) * float(np.std(values, ddof=1)) / math.sqrt(count)


def percentile(values: ArrayLike, p: float) -> float:
    """Return the p-th percentile by linear interpolation between order statistics.

    Parameters
    ----------
    values : one-dimensional, at least one value, in any order.
    p : in [0, 100].
    """
    return quantiles(np.array(values, dtype=np.float64), [p], overwrite=True)[0]


def quantiles(values: Array, percentiles: Sequence[float], *, overwrite: bool = False) -> list[float]:
    """Return several percentiles as `percentile` defines them.

    Parameters
    ----------
    overwrite : reorder `values` in place: no copy, whatever their size.
    """
    if not values.size:
        raise ValueError("the percentile of no values is not defined")
    ordered = values if overwrite else values.copy()
    positions = np.asarray(percentiles, dtype=np.float64) * (ordered.size - 1) / 100
    low = np.floor(positions).astype(np.int64)
    high = np.minimum(low + 1, ordered.size - 1)
    ordered.partition(np.unique(np.concatenate([low, high])))
    found = ordered[low] + (ordered[high] - ordered[low]) * (positions - low)
    return [float(value) for value in found]


def percentile_name(p: float) -> str:
    """Return how result keys spell a percentile: 99 -> p99, 99.9 -> p99.9."""
    return f"p{p:g}"


def _standard_deviation(values: Array) -> float:
    """Return the standard deviation without an array of deviations as large as the values."""
    mean = values.mean()
    squares = sum(
        float(np.square(values[start : start + CHUNK_VALUES] - mean).sum())
        for start in range(0, values.size, CHUNK_VALUES)
    )
    return math.sqrt(squares / values.size)


def bootstrap_draws(
    groups: Sequence[Array],
    statistics: Callable[[Array], float | Sequence[float]],
    rng: np.random.Generator,
    *,
    num_resamples: int = 1000,
) -> Array:
    """Return the statistics of pooled values in each of `num_resamples` resamples.

    Whole groups are drawn again, not single values: the gaps of one request depend on each other, so a
    request's gaps are one group. For one value a request, pass arrays of length one.

    Parameters
    ----------
    groups : at least one non-empty array.
    statistics : maps pooled values to one number, or to several, which then lie beside each other.

    References
    ----------
    Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 8 and 13.
    """
    sizes = np.array([len(group) for group in groups])
    if not sizes.sum():
        raise ValueError("a bootstrap needs at least one value")
    pooled = np.concatenate(list(groups))
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    draws = []
    for _ in range(num_resamples):
        chosen = rng.integers(len(groups), size=len(groups))
        while not sizes[chosen].sum():  # every drawn group is empty: possible when most requests have no gap
            chosen = rng.integers(len(groups), size=len(groups))
        draws.append(statistics(pooled[_ranges(starts[chosen], sizes[chosen])]))
    return np.array(draws, dtype=np.float64)


def _ranges(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the index ranges [start, start + size)."""
    offsets = np.repeat(starts - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes)
    return offsets + np.arange(sizes.sum())
