"""What this machine sustains, measured in this process with the threads that the engine has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from .floor import MachineRates

READ_BYTES = 512 * 2**20
"""Larger than any cache."""
PRODUCTS = ((2048, 2048, 2048), (512, 576, 1536), (512, 1536, 576))
"""Rows, inputs and outputs; the best rate counts."""
SECONDS_EACH = 0.4
SETTLE_SECONDS = 0.2
"""Torch's threads wait awake for a while after an operator, and would be in the way of the next step."""


class LimitsMeter:
    """Measures again and again, with the same arrays.

    Parameters
    ----------
    dtype : of the products.
    num_threads : of torch while it measures; the engine may leave it fewer.
    """

    def __init__(self, dtype: torch.dtype, num_threads: int) -> None:
        self._num_threads = num_threads
        # NumPy asks for huge pages where torch does not, which is worth some bandwidth.
        self._numbers = torch.from_numpy(np.ones(READ_BYTES // 4, np.float32))
        self._products = [
            (torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype))
            for rows, inputs, outputs in PRODUCTS
        ]

    def measure(self) -> MachineRates:
        """Return the medians of read bandwidth and of the best product's rate."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            return self._measure()
        finally:
            torch.set_num_threads(before)
            time.sleep(SETTLE_SECONDS)

    @torch.inference_mode()
    def _measure(self) -> MachineRates:
        read = _median_seconds(self._numbers.sum)
        rates = [
            2 * x.shape[0] * x.shape[1] * w.shape[0] / _median_seconds(partial(torch.mm, x, w.T))
            for x, w in self._products
        ]
        return MachineRates(read=self._numbers.nbytes / read, multiply=max(rates))


def _median_seconds(run: Callable[[], Any]) -> float:
    run()
    times: list[float] = []
    while sum(times) < SECONDS_EACH or len(times) < 5:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
