"""Every value of each latency metric, in one array per metric.

The gaps of a large run fill gigabytes: they are stored once, grouped, so that the values of a group are a
view of those of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from onbeat.metrics.measured import DeliveryChunk, MeasuredRequest, delivery_chunks

Samples = dict[str, NDArray[np.float64]]
"""Metric -> values in seconds: `ttft`, `tpot`, `itl` (all gaps), `e2el`."""


def grouped_samples(groups: Sequence[Sequence[MeasuredRequest]]) -> tuple[Samples, list[Samples]]:
    """Return the samples of all groups together, and those of each group as views into them.

    Parameters
    ----------
    groups : completed requests; those without a delivery give no sample.
    """
    pool = _allocate(groups)
    filled = dict.fromkeys(pool, 0)
    views: list[Samples] = []
    for group in groups:
        start = dict(filled)
        for chunk in delivery_chunks(group):
            for metric, values in _chunk_samples(chunk).items():
                pool[metric][filled[metric] : filled[metric] + len(values)] = values
                filled[metric] += len(values)
        views.append({metric: pool[metric][start[metric] : filled[metric]] for metric in pool})
    return pool, views


def _allocate(groups: Sequence[Sequence[MeasuredRequest]]) -> Samples:
    num_requests = num_tpots = num_gaps = 0
    for group in groups:
        for request in group:
            if count := len(request.delivery_times):
                num_requests += 1
                num_tpots += request.num_output_tokens > 1
                num_gaps += count - 1
    return {
        "ttft": np.empty(num_requests),
        "tpot": np.empty(num_tpots),
        "itl": np.empty(num_gaps),
        "e2el": np.empty(num_requests),
    }


def _chunk_samples(chunk: DeliveryChunk) -> Samples:
    count = len(chunk.requests)
    arrivals = np.fromiter((r.arrival for r in chunk.requests), dtype=np.float64, count=count)
    tokens = np.fromiter((r.num_output_tokens for r in chunk.requests), dtype=np.float64, count=count)
    first, last = chunk.first, chunk.last
    several = tokens > 1
    return {
        "ttft": first - arrivals,
        "tpot": (last - first)[several] / (tokens[several] - 1),
        "itl": chunk.gaps(),
        "e2el": last - arrivals,
    }
