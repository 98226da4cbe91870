"""Tables of measured values, read between their points and beyond them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import log2

import numpy as np
from numpy.typing import NDArray

_MOST_KNOTS = 96
_LEAST_CONSTANT = 1e-3


class PiecewiseLinear:
    """A function of one size, linear between measured sizes.

    Below the smallest size it is constant. Beyond the largest it goes on with the mean slope of the upper
    half of the sizes (one step between two noisy points is no slope), and never falls.

    Parameters
    ----------
    sizes : in any order; values of equal sizes are replaced by their median. At least one.
    values : one a size.
    """

    __slots__ = ("_last", "_slopes", "_tail", "_values", "sizes")

    def __init__(self, sizes: Sequence[float], values: Sequence[float]) -> None:
        places, y = _median_by(np.asarray(sizes, dtype=float)[:, None], np.asarray(values, dtype=float))
        x = places[:, 0]
        middle = min(int(np.searchsorted(x, x[-1] / 2)), max(len(x) - 2, 0))
        tail = (y[-1] - y[middle]) / (x[-1] - x[middle]) if len(x) > 1 else 0.0
        self.sizes: list[float] = x.tolist()
        self._values: list[float] = y.tolist()
        self._slopes: list[float] = (np.diff(y) / np.diff(x)).tolist()
        self._tail = max(0.0, float(tail))
        self._last = len(x) - 1

    def __call__(self, size: float) -> float:
        index = bisect_right(self.sizes, size) - 1
        if index < 0:
            return self._values[0]
        slope = self._slopes[index] if index < self._last else self._tail
        return self._values[index] + slope * (size - self.sizes[index])


class Surface:
    """A function of two sizes: a sum of physical terms, times a correction that is read from a table.

    The terms are 1, x, y and the joint term x (y + share x). Their coefficients are not negative and the
    correction stays constant outside the measured rectangle, so that there the function grows as the terms
    do: it never falls and never ends. Inside, the correction is interpolated in the logarithms of the sizes:
    kernels change their ways at powers of two.

    Parameters
    ----------
    x, y : sizes of the measurements, at least 0; values of equal places are replaced by their median. [N]
    values : positive. [N]
    share : of x in the joint term: 0 where every x meets every y, 0.5 where an x meets half of the x too.
    """

    __slots__ = ("_coefficients", "_ratios", "_x_knots", "_y_knots")

    def __init__(
        self, x: Sequence[float], y: Sequence[float], values: Sequence[float], share: float = 0.0
    ) -> None:
        places, medians = _median_by(
            np.column_stack([np.asarray(x, dtype=float), np.asarray(y, dtype=float)]),
            np.asarray(values, dtype=float),
        )
        joint = places[:, 0] * (places[:, 1] + share * places[:, 0])
        terms = np.column_stack([np.ones(len(places)), places, joint])
        coefficients = _fit_terms(terms, medians)
        log_places = np.log2(places + 1)
        knots_x, knots_y = _knots(log_places[:, 0]), _knots(log_places[:, 1])
        log_ratios = _on_grid(log_places, np.log(medians / (terms @ coefficients)), knots_x, knots_y)
        constant, per_x, per_y, per_joint = coefficients.tolist()
        self._coefficients: tuple[float, ...] = constant, per_x, per_y, per_joint, share
        self._x_knots: list[float] = knots_x.tolist()
        self._y_knots: list[float] = knots_y.tolist()
        self._ratios: list[list[float]] = np.exp(log_ratios).tolist()

    def __call__(self, x: float, y: float) -> float:
        # Written flat: a simulator comes here in every step.
        constant, per_x, per_y, per_joint, share = self._coefficients
        base = constant + per_x * x + per_y * y + per_joint * x * (y + share * x)
        knots, place = self._x_knots, log2(x + 1)
        i = bisect_right(knots, place, 1, len(knots) - 1) - 1
        u = (place - knots[i]) / (knots[i + 1] - knots[i])
        u = 0.0 if u < 0 else 1.0 if u > 1 else u
        knots, place = self._y_knots, log2(y + 1)
        j = bisect_right(knots, place, 1, len(knots) - 1) - 1
        v = (place - knots[j]) / (knots[j + 1] - knots[j])
        v = 0.0 if v < 0 else 1.0 if v > 1 else v
        row, next_row = self._ratios[i], self._ratios[i + 1]
        low = row[j] + (row[j + 1] - row[j]) * v
        high = next_row[j] + (next_row[j + 1] - next_row[j]) * v
        return base * (low + (high - low) * u)


def _median_by(
    places: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the distinct places in ascending order and the median of the values at each."""
    distinct, ids = np.unique(places, axis=0, return_inverse=True)
    order = np.argsort(ids.ravel(), kind="stable")
    starts = np.searchsorted(ids.ravel()[order], np.arange(1, len(distinct)))
    return distinct, np.array([np.median(group) for group in np.split(values[order], starts)])


def _fit_terms(terms: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.optimize import nnls  # slow to import, and few commands read tables

    scale = terms.max(axis=0)
    scale[scale == 0] = 1.0
    coefficients, _ = nnls(terms / scale / values[:, None], np.ones(len(values)))
    found = np.asarray(coefficients / scale, dtype=np.float64)
    # A base of zero somewhere would leave nothing to correct there.
    found[0] = max(found[0], _LEAST_CONSTANT * values.min())
    return found


def _knots(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return up to `_MOST_KNOTS` of the distinct values, evenly in rank; at least two, which make a cell."""
    distinct = np.unique(values)
    if len(distinct) == 1:
        return np.array([distinct[0], distinct[0] + 1])
    ranks = np.unique(np.linspace(0, len(distinct) - 1, _MOST_KNOTS).round().astype(int))
    return np.asarray(distinct[ranks], dtype=np.float64)


def _on_grid(
    places: NDArray[np.float64],
    values: NDArray[np.float64],
    knots_x: NDArray[np.float64],
    knots_y: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Interpolate scattered values to a grid, [x, y]; outside their hull the nearest one counts."""
    from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator  # slow to import, as above

    grid = np.stack(np.meshgrid(knots_x, knots_y, indexing="ij"), axis=-1)
    nearest = np.asarray(NearestNDInterpolator(places, values)(grid), dtype=np.float64)
    if np.linalg.matrix_rank(places - places[0]) < 2:
        return nearest
    linear = LinearNDInterpolator(places, values)(grid)
    return np.where(np.isnan(linear), nearest, linear)
