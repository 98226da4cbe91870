"""When the requests of a load are sent."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onbeat.bench.bench_config import LoadConfig
from onbeat.workload.arrivals import ramp_arrivals


def schedule(
    load: LoadConfig, num_requests: int, rng: np.random.Generator, *, times: NDArray[np.float64] | None = None
) -> NDArray[np.float64] | None:
    """Return the arrival offsets of a load in seconds; None in a closed loop.

    Parameters
    ----------
    num_requests : or jobs.
    times : recorded ones; None where there are none.

    Raises
    ------
    ConfigError : a replay of a data set without times.
    """
    if load.ramp is not None:
        return ramp_arrivals(
            num_requests,
            start_rate=load.ramp.start_rate,
            end_rate=load.ramp.end_rate,
            shape=load.ramp.shape,
            burstiness=load.burstiness,
            rng=rng,
        )
    if not load.is_scheduled:
        return None
    return load.arrival_plan().offsets(num_requests, rng=rng, times=times)
