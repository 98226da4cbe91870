"""The requests of a seed: a window of a recorded trace, or a draw from its lengths."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.workload.arrivals import poisson_arrivals
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.trace import Trace, read_trace

_FILES = {
    "poisson": "azure2023_conv.csv.gz",
    "azure-code": "azure2023_code.csv.gz",
    "azure-conv": "azure2023_conv.csv.gz",
    "mooncake": "mooncake_fast25_conversation_trace.csv.gz",
    "mooncake-ticks": "mooncake_fast25_conversation_trace.csv.gz",
}
_GOLDEN = 0.6180339887498949
"""Its multiples spread over the unit interval however many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadKey:
    """Names the requests of one seed."""

    workload: str
    seed: int
    num_requests: int
    max_model_len: int


@lru_cache(maxsize=8)
def make_load(key: LoadKey) -> OfferedLoad:
    """Return the requests of a seed, without objectives; those that do not fit the context are left out.

    On a trace the seed is a start offset, and the window's own times stay, to be squeezed to a rate. On
    `poisson` it draws lengths (with replacement) and arrivals. Mooncake's clock ticks every 3 s, so that some
    ten requests share each time: `mooncake` spreads them over the tick, `mooncake-ticks` leaves them
    together, and then no rate takes them apart.
    """
    trace = _read(key.workload)
    if key.workload == "poisson":
        rng = np.random.default_rng([key.seed, 1])
        rows = rng.integers(len(trace), size=key.num_requests)
        arrivals = poisson_arrivals(key.num_requests, rate=1.0, rng=rng)
    else:
        if key.num_requests > len(trace):
            raise ConfigError(
                f"{key.workload} has {len(trace)} requests, {key.num_requests} were asked for; ask for fewer"
            )
        start = int((key.seed + 1) * _GOLDEN % 1.0 * (len(trace) - key.num_requests))
        rows = np.arange(start, start + key.num_requests)
        assert trace.times is not None
        arrivals = trace.times[rows] - trace.times[start]
        if key.workload == "mooncake":
            arrivals = spread_ticks(arrivals, np.random.default_rng([key.seed, 2]))
    chosen = trace.take(rows)
    load = OfferedLoad(
        name=key.workload,
        arrivals=arrivals,
        num_prompt_tokens=np.maximum(1, chosen.num_prompt_tokens),
        num_output_tokens=np.maximum(1, chosen.num_output_tokens),
        block_ids=chosen.block_ids,
        block_size=chosen.block_size,
    )
    fitting = load.check_lengths(key.max_model_len, overlong="skip")
    assert fitting.arrivals is not None
    return replace(fitting, arrivals=fitting.arrivals - fitting.arrivals[0])


def spread_ticks(times: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Return times of which equal ones are spread at random over the time to the next one."""
    ticks, counts = np.unique(times, return_counts=True)
    lengths = np.append(np.diff(ticks), np.median(np.diff(ticks)) if len(ticks) > 1 else 0.0)
    return np.sort(times + rng.random(len(times)) * np.repeat(lengths, counts))


@lru_cache(maxsize=8)
def _read(workload: str) -> Trace:
    shared = os.environ.get("ONBEAT_SHARED")
    if not shared:
        raise ConfigError("the traces' folder is needed: set ONBEAT_SHARED (traces lie under data/traces)")
    return read_trace(Path(shared) / "data" / "traces" / _FILES[workload])
