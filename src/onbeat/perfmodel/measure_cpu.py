"""Measures what this CPU sustains, with numpy alone, in under two seconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.product_rates import ROW_COUNTS, ProductRates, product_rates

_READ_BYTES = 128 * 2**20  # well beyond the caches
_MATRIX_SIZE = 1024
_BUDGET_SECONDS = 0.5
_ROWS_SECONDS = 0.04
"""For the products of each number of rows."""


@dataclass(frozen=True, slots=True)
class CPULimits:
    """Measured limits of the processor, with the threads that numpy's linear algebra uses."""

    memory_bandwidth: float
    """Bytes per second of reading an array that no cache holds."""
    peak_flops: float
    """Operations per second of a float32 matrix product."""
    product_rates: ProductRates
    """The same by the product's rows."""


def measure_cpu() -> CPULimits:
    """Measure read bandwidth and the rates of matrix products: the best of what fits in about 1.5 s.

    The best and not the mean: another program can only take time away.
    """
    values = np.ones(_READ_BYTES // 4, dtype=np.float32)
    left = np.ones((_MATRIX_SIZE, _MATRIX_SIZE), dtype=np.float32)
    out = np.empty_like(left)
    # A dot product reads both operands once; one array twice would be read from cache the second time.
    half = len(values) // 2
    read = _shortest(lambda: np.dot(values[:half], values[half:]))
    product = _shortest(lambda: np.matmul(left, left, out=out))
    by_rows = {
        rows: _shortest(partial(np.matmul, left[:rows], left, out=out[:rows]), _ROWS_SECONDS)
        for rows in ROW_COUNTS
    }
    bandwidth, flops_per_row = _READ_BYTES / read, 2.0 * _MATRIX_SIZE**2
    peak = max(_MATRIX_SIZE / product, *(rows / seconds for rows, seconds in by_rows.items())) * flops_per_row
    return CPULimits(
        memory_bandwidth=bandwidth,
        peak_flops=peak,
        product_rates=product_rates(
            by_rows, flops_per_row=flops_per_row, reading_seconds=left.nbytes / bandwidth, peak=peak
        ),
    )


def _shortest(work: Callable[[], object], budget: float = _BUDGET_SECONDS) -> float:
    """Seconds of the quickest of several runs; the first, which warms up, does not count."""
    work()
    start = perf_counter()
    best = float("inf")
    while perf_counter() - start < budget:
        begin = perf_counter()
        work()
        best = min(best, perf_counter() - begin)
    return best


def memory_bytes_of_machine() -> float:
    """Return the machine's main memory, bytes.

    Raises
    ------
    ConfigError : the operating system does not tell.
    """
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError) as error:
        raise ConfigError("the operating system does not tell its memory size") from error
