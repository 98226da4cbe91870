"""When requests arrive: offsets in seconds from the start of a run.

A closed loop has no arrivals of its own (a request is sent when an earlier one ends): it is `None`
wherever offsets are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onbeat.core.errors import ConfigError

Offsets = NDArray[np.float64]
RampShape = Literal["linear", "exponential"]


def gamma_arrivals(num_requests: int, *, rate: float, burstiness: float, rng: np.random.Generator) -> Offsets:
    """Return arrivals with gamma-distributed gaps.

    Gaps have mean 1 / rate and coefficient of variation 1 / sqrt(burstiness): 1 is a Poisson process,
    below 1 arrivals bunch, above 1 they even out. The sequence is rescaled so that the last arrival falls
    at num_requests / rate: two runs of one rate then offer exactly the same load.

    Parameters
    ----------
    rate : requests per second, finite.
    burstiness : shape of the gamma distribution.
    """
    _require_positive("request rate", rate)
    _require_positive("burstiness", burstiness)
    gaps = rng.gamma(shape=burstiness, scale=1 / (rate * burstiness), size=num_requests)
    return _rescale(np.cumsum(gaps), num_requests / rate)


def poisson_arrivals(num_requests: int, *, rate: float, rng: np.random.Generator) -> Offsets:
    """Return arrivals of a Poisson process, rescaled as `gamma_arrivals`."""
    return gamma_arrivals(num_requests, rate=rate, burstiness=1.0, rng=rng)


def constant_arrivals(num_requests: int, *, rate: float) -> Offsets:
    """Return evenly spaced arrivals, the last at num_requests / rate."""
    _require_positive("request rate", rate)
    return np.arange(1, num_requests + 1) / rate


def burst_arrivals(
    num_requests: int, *, rate: float, on_seconds: float, off_seconds: float, rng: np.random.Generator
) -> Offsets:
    """Return arrivals that come in bursts: Poisson for `on_seconds`, then nothing for `off_seconds`.

    The busy phases are as much faster as makes the mean `rate`. Time without arrivals is cut out first:
    what is left is a Poisson process, rescaled as `gamma_arrivals`.
    """
    _require_positive("length of a burst", on_seconds)
    _require_positive("time between bursts", off_seconds)
    _require_positive("request rate", rate)
    period = on_seconds + off_seconds
    busy = poisson_arrivals(num_requests, rate=rate * period / on_seconds, rng=rng)
    return np.asarray(busy + np.floor(busy / on_seconds) * off_seconds)


@dataclass(frozen=True, slots=True)
class RateStep:
    """A request rate that holds for some time.

    Raises
    ------
    ConfigError : a negative rate, or no time.
    """

    rate: float
    """Requests per second; 0 is a pause."""
    seconds: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.rate) and self.rate >= 0):
            raise ConfigError(f"the rate of a step must be a finite number of at least 0, got {self.rate:g}")
        _require_positive("length of a step", self.seconds)


def step_arrivals(
    num_requests: int, *, steps: Sequence[RateStep], burstiness: float, rng: np.random.Generator
) -> Offsets:
    """Return arrivals whose rate changes in steps; after the last step the first one follows.

    Arrivals of rate 1 are stretched in time until the expected count of the steps up to each is its own.
    """
    _require_positive("burstiness", burstiness)
    counts = np.array([step.rate * step.seconds for step in steps])
    per_cycle = float(counts.sum())
    _require_positive("expected number of requests in all rate steps", per_cycle)
    ends = np.cumsum([step.seconds for step in steps])
    expected = np.cumsum(rng.gamma(shape=burstiness, scale=1 / burstiness, size=num_requests))
    cycles, within = np.divmod(expected, per_cycle)
    inside = np.interp(within, np.cumsum(np.append(0.0, counts)), np.append(0.0, ends))
    return np.asarray(cycles * ends[-1] + inside)


def ramp_arrivals(
    num_requests: int,
    *,
    start_rate: float,
    end_rate: float,
    shape: RampShape,
    burstiness: float,
    rng: np.random.Generator,
) -> Offsets:
    """Return arrivals whose rate moves from `start_rate` to `end_rate` over the requests.

    Request i of n arrives at rate start + (end - start) i/n (linear) or start (end/start)^(i/n)
    (exponential). There is no rescaling: the length of the run follows from the rates.
    """
    for name, value in (("ramp-up start", start_rate), ("ramp-up end", end_rate), ("burstiness", burstiness)):
        _require_positive(name, value)
    progress = np.arange(num_requests) / max(1, num_requests)
    if shape == "linear":
        rates = start_rate + (end_rate - start_rate) * progress
    else:
        rates = start_rate * (end_rate / start_rate) ** progress
    return np.cumsum(rng.gamma(shape=burstiness, scale=1 / burstiness, size=num_requests) / rates)


def replay_arrivals(times: ArrayLike, *, rate_scale: float = 1.0) -> Offsets:
    """Return recorded arrivals from the first one on, at `rate_scale` times their rate.

    Parameters
    ----------
    times : seconds, in any order; at least one.
    """
    _require_positive("rate scale", rate_scale)
    ordered: Offsets = np.sort(np.asarray(times, dtype=np.float64))
    offsets: Offsets = (ordered - ordered[0]) / rate_scale
    return offsets


def _rescale(offsets: Offsets, end: float) -> Offsets:
    # A tiny burstiness can round every gap to 0; then there is nothing to stretch.
    if not offsets.size or offsets[-1] <= 0:
        return offsets
    return np.multiply(offsets, end / float(offsets[-1]))


def _require_positive(name: str, value: float) -> None:
    if not (np.isfinite(value) and value > 0):
        raise ConfigError(f"the {name} must be a finite number above 0, got {value:g}")
