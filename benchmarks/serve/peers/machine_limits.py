"""What this machine can do at best, with torch: read bandwidth and matrix products.

Printed beside every comparison.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

REPEAT_SECONDS = 0.7


def measure_limits() -> dict[str, float]:
    """Return GB/s and GFLOP/s (medians), with torch's default threads."""
    numbers = torch.ones(64 * 2**20)  # 256 MiB: far larger than any cache
    limits = {"read_gb_per_s": numbers.nbytes / _median_seconds(numbers.sum) / 1e9}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
        seconds = _median_seconds(partial(torch.mm, a, b))
        limits[f"{str(dtype).removeprefix('torch.')}_gflop_per_s"] = 2 * 2048**3 / seconds / 1e9
    return {name: round(value, 1) for name, value in limits.items()}


def _median_seconds(run: Callable[[], Any]) -> float:
    run()
    times: list[float] = []
    while sum(times) < REPEAT_SECONDS or len(times) < 5:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    print(json.dumps(measure_limits()))
