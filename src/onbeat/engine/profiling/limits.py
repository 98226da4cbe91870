"""What this device reaches at best, measured: the denominators of MBU and MFU, and the rates of products."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from onbeat.engine.device import DeviceConfig, free_memory, wait_for
from onbeat.engine.forward import RowProducts
from onbeat.perfmodel.device_spec import ROW_COUNTS, best_rates, product_rates
from onbeat.perfmodel.profile import MachineLimits

_READ_BYTES = 2**27
"""Several times the largest cache, so that every pass reads memory."""
_SECONDS_EACH = 0.1
_MIN_RUNS = 5
_ROUNDS = 3
"""Over all numbers of rows: what else the machine does comes and goes."""
_ROWS_SECONDS = 0.01
"""For the products of each number of rows, in a round."""
_LONGEST_PRODUCT = 0.1
"""Seconds of a product from which on those of more rows are taken to cost in proportion."""


def cpu_limits(num_threads: int, products: RowProducts, number_format: str) -> MachineLimits:
    """Measure read bandwidth, and the rates of an engine's own products by their rows.

    Takes three quarters of a second. The best of several runs counts and not their mean: another program can
    only take time away.

    Parameters
    ----------
    num_threads : that read together.
    products : closed here.
    number_format : of the products; the key in the result.
    """
    try:
        bandwidth = _read_bandwidth(num_threads)
        seconds = {num_rows: products.run(num_rows) for num_rows in _counts_in_time(products)}
        for num_rows in (*seconds,) * _ROUNDS:
            seconds[num_rows] = min(seconds[num_rows], _shortest_product(products, num_rows))
    finally:
        products.close()
    peak = products.flops_per_row * max(num_rows / value for num_rows, value in seconds.items())
    rates = product_rates(
        seconds,
        flops_per_row=products.flops_per_row,
        reading_seconds=products.num_bytes / bandwidth,
        peak=peak,
    )
    return MachineLimits(memory_bandwidth=bandwidth, peak_flops={number_format: peak}, product_rates=rates)


def gpu_limits(
    device: DeviceConfig,
    number_format: str,
    *,
    read_bytes: int = 2**31,
    matrix_size: int = 8192,
) -> MachineLimits:
    """Measure what a GPU without a data sheet reaches, in a fraction of a second.

    That is the read bandwidth, and the rate of a square matrix product.

    Parameters
    ----------
    number_format : of the product; the key in the result.
    read_bytes : several times the largest cache, so that every pass reads memory; less where memory is short.
    """
    import torch

    from onbeat.engine.torch.types import torch_device, torch_dtype

    where, dtype = torch_device(device.device), torch_dtype(device.dtype)
    read_bytes = min(read_bytes, free_memory(device.device).num_bytes // 4)
    values = torch.ones(read_bytes // 4, dtype=torch.float32, device=where)
    # Random: tensor cores multiply numbers that are all alike faster than those of a model.
    left = torch.empty(matrix_size, matrix_size, dtype=dtype, device=where).normal_()

    def seconds(work: Callable[[], object]) -> float:
        def done() -> None:
            work()
            wait_for(device.device)

        return shortest(done)

    with torch.inference_mode():
        read = seconds(lambda: torch.amax(values))
        product = seconds(lambda: torch.mm(left, left))
    return MachineLimits(
        memory_bandwidth=values.nbytes / read, peak_flops={number_format: 2 * matrix_size**3 / product}
    )


def _read_bandwidth(num_threads: int) -> float:
    """Return the bytes per second at which threads look for the largest number; NumPy lets go of the lock."""
    parts = np.array_split(np.ones(_READ_BYTES // 4, np.float32), num_threads)
    with ThreadPoolExecutor(num_threads) as threads:
        return _READ_BYTES / shortest(lambda: list(threads.map(np.max, parts)))


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


def best_limits(first: MachineLimits, second: MachineLimits) -> MachineLimits:
    """Return the higher of two measurements, each limit by itself; both are of the same number formats."""
    return MachineLimits(
        memory_bandwidth=max(first.memory_bandwidth, second.memory_bandwidth),
        peak_flops={name: max(rate, second.peak_flops[name]) for name, rate in first.peak_flops.items()},
        product_rates=best_rates(first.product_rates, second.product_rates),
    )


def shortest(work: Callable[[], object]) -> float:
    """Return the seconds of the quickest of several runs; the first, which warms up, does not count."""
    work()
    best, num_runs = float("inf"), 0
    deadline = time.perf_counter() + _SECONDS_EACH
    while num_runs < _MIN_RUNS or time.perf_counter() < deadline:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
        num_runs += 1
    return best
