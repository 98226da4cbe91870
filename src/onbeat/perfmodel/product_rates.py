"""At which rate matrix products of so many rows compute: few rows may run by other instructions than many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onbeat.typed import Positive, Size

ROW_COUNTS = tuple(2**power for power in range(10))
"""Rows of the products that are measured; one of more rows computes at the rate of the last."""

ProductRates = tuple[tuple[Size, Positive], ...]
"""(rows, operations per second), rows ascending."""

SMOOTHNESS = 3.0
"""That of the roofline's soft maximum, of which the arithmetic is one part: `(a^p + b^p)^(1/p)`."""


def product_rates(
    seconds: Mapping[int, float], *, flops_per_row: float, reading_seconds: float, peak: float
) -> ProductRates:
    """Return the rates of arithmetic alone, such that no product takes less time than one of fewer rows.

    Measured times are too long where something else had the processor, never too short. So what is less
    counts: the time of more rows, of which fewer could be made by padding; and that of fewer rows as often as
    it takes to make more of them.

    Parameters
    ----------
    seconds : measured, by number of rows.
    flops_per_row : operations of a product for each row.
    reading_seconds : what reading the weights takes where no cache holds them; the time of one row tells.
    peak : the rate that none exceeds, operations per second.
    """
    rows = sorted(seconds)
    taken = np.array([seconds[num_rows] for num_rows in rows])
    least = np.array(rows) * (flops_per_row / peak)
    reading = reading_seconds if reading_seconds <= taken[0] else 0.0
    # What the soft maximum of both makes the measured time again.
    arithmetic = np.maximum(taken**SMOOTHNESS - reading**SMOOTHNESS, 0.0) ** (1 / SMOOTHNESS)
    per_row = np.minimum.accumulate(np.maximum(arithmetic, least) / rows)
    smooth = np.minimum.accumulate((per_row * rows)[::-1])[::-1]
    return tuple(
        (num_rows, num_rows * flops_per_row / float(value))
        for num_rows, value in zip(rows, smooth, strict=True)
    )


def best_rates(first: ProductRates, second: ProductRates) -> ProductRates:
    """Return the higher rate of two measurements, for each number of rows that one of them has."""
    found = dict(first)
    for num_rows, rate in second:
        found[num_rows] = max(rate, found.get(num_rows, 0.0))
    return tuple(sorted(found.items()))


def row_costs(rates: ProductRates, peak: float) -> Sequence[float]:
    """Return for 0, 1, ... rows how many rows at the peak rate take as long as these.

    Between the measured numbers of rows, time is linear on logarithmic scales; the last entry is that of the
    most rows measured, beyond which costs are proportional. Empty where nothing was measured.
    """
    if not rates:
        return ()
    knots = np.log([num_rows for num_rows, _ in rates])
    costs = np.log([num_rows * peak / rate for num_rows, rate in rates])
    rows = np.arange(1, rates[-1][0] + 1)
    return (0.0, *np.exp(np.interp(np.log(rows), knots, costs)).tolist())
