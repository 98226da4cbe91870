"""Measures what this CPU sustains, with numpy alone, in under two seconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from onbeat.core.errors import ConfigError

_READ_BYTES = 128 * 2**20  # well beyond the caches
_MATRIX_SIZE = 1024
_BUDGET_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class CPULimits:
    """Measured limits of the processor, with the threads that numpy's linear algebra uses."""

    memory_bandwidth: float
    """Bytes per second of reading an array that no cache holds."""
    peak_flops: float
    """Operations per second of a float32 matrix product."""


def measure_cpu() -> CPULimits:
    """Measure read bandwidth and the rate of a matrix product: the best of what fits in about 1 s.

    The best and not the mean: another program can only take time away.
    """
    values = np.ones(_READ_BYTES // 4, dtype=np.float32)
    left = np.ones((_MATRIX_SIZE, _MATRIX_SIZE), dtype=np.float32)
    out = np.empty_like(left)
    # A dot product reads both operands once; one array twice would be read from cache the second time.
    half = len(values) // 2
    read = _shortest(lambda: np.dot(values[:half], values[half:]))
    product = _shortest(lambda: np.matmul(left, left, out=out))
    return CPULimits(memory_bandwidth=_READ_BYTES / read, peak_flops=2 * _MATRIX_SIZE**3 / product)


def _shortest(work: Callable[[], object]) -> float:
    """Seconds of the quickest of several runs; the first, which warms up, does not count."""
    work()
    start = perf_counter()
    best = float("inf")
    while perf_counter() - start < _BUDGET_SECONDS:
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
