"""What this device reaches at best, measured: the denominators of MBU and MFU, and the rates of products."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from onbeat.engine.device import wait_for
from onbeat.engine.forward import RowProducts
from onbeat.engine.torch_types import device_of
from onbeat.perfmodel.product_rates import ROW_COUNTS, best_rates, product_rates
from onbeat.perfmodel.profile import MachineLimits

_READ_BYTES = {"cpu": 2**27, "cuda": 2**31}
"""Several times the largest cache, so that every pass reads memory."""
_MATRIX_SIZES = {"cpu": 1024, "cuda": 8192}
_SECONDS_EACH = 0.1
_MIN_RUNS = 5
_ROUNDS = 3
"""Over all numbers of rows: what else the machine does comes and goes."""
_ROWS_SECONDS = 0.01
"""For the products of each number of rows, in a round."""
_LONGEST_PRODUCT = 0.1
"""Seconds of a product from which on those of more rows are taken to cost in proportion."""


def measure_limits(device: torch.device, dtype: torch.dtype, dtype_name: str) -> MachineLimits:
    """Measure read bandwidth and the rate of a square matrix product, with the threads that torch has now.

    Takes a fraction of a second. The best of several runs counts and not their mean: another program can
    only take time away.

    Parameters
    ----------
    dtype, dtype_name : of the product; the name is the key in the result.
    """
    values = torch.ones(_READ_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    size = _MATRIX_SIZES[device.type]
    left = torch.ones(size, size, dtype=dtype, device=device)
    with torch.inference_mode():
        read = _shortest(lambda: torch.amax(values), device)
        product = _shortest(lambda: torch.mm(left, left), device)
    return MachineLimits(
        memory_bandwidth=values.nbytes / read, peak_flops={dtype_name: 2 * size**3 / product}
    )


def with_product_rates(limits: MachineLimits, products: RowProducts, dtype_name: str) -> MachineLimits:
    """Return the limits with the rates of an engine's own products, by their rows.

    Takes half a second. Where these reach more than the limits' rate, that is the limit.

    Parameters
    ----------
    products : closed here.
    """
    try:
        seconds = {num_rows: products.run(num_rows) for num_rows in _counts_in_time(products)}
        for num_rows in (*seconds,) * _ROUNDS:
            seconds[num_rows] = min(seconds[num_rows], _shortest_product(products, num_rows))
    finally:
        products.close()
    own = products.flops_per_row * max(num_rows / value for num_rows, value in seconds.items())
    peak = max(limits.peak_flops[dtype_name], own)
    rates = product_rates(
        seconds,
        flops_per_row=products.flops_per_row,
        reading_seconds=products.num_bytes / limits.memory_bandwidth,
        peak=peak,
    )
    return replace(limits, peak_flops={**limits.peak_flops, dtype_name: peak}, product_rates=rates)


def _shortest_product(products: RowProducts, num_rows: int) -> float:
    """Return the seconds of the quickest of some runs."""
    best = products.run(num_rows)
    deadline = time.perf_counter() + _ROWS_SECONDS
    while time.perf_counter() < deadline:
        best = min(best, products.run(num_rows))
    return best


def _counts_in_time(products: RowProducts) -> Iterator[int]:
    """Yield numbers of rows, up to the first whose product, which is run to warm up, takes long."""
    for num_rows in ROW_COUNTS:
        yield num_rows
        if products.run(num_rows) > _LONGEST_PRODUCT:
            return


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Give torch some threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def best_limits(first: MachineLimits, second: MachineLimits) -> MachineLimits:
    """Return the higher of two measurements, each limit by itself; both are of the same number formats."""
    return MachineLimits(
        memory_bandwidth=max(first.memory_bandwidth, second.memory_bandwidth),
        peak_flops={name: max(rate, second.peak_flops[name]) for name, rate in first.peak_flops.items()},
        product_rates=best_rates(first.product_rates, second.product_rates),
    )


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the quickest of several runs; the first, which warms up, does not count."""
    work()
    best, num_runs = float("inf"), 0
    deadline = time.perf_counter() + _SECONDS_EACH
    while num_runs < _MIN_RUNS or time.perf_counter() < deadline:
        wait_for(device_of(device))
        start = time.perf_counter()
        work()
        wait_for(device_of(device))
        best = min(best, time.perf_counter() - start)
        num_runs += 1
    return best
