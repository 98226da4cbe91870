"""How the requests of a run are spread over time, as one value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.workload.arrivals import (
    Offsets,
    RateStep,
    burst_arrivals,
    constant_arrivals,
    gamma_arrivals,
    poisson_arrivals,
    replay_arrivals,
    step_arrivals,
)

ArrivalKind = Literal["poisson", "gamma", "constant", "burst", "steps", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalPlan:
    """An open loop: requests come at their own times, whatever becomes of the others.

    Raises
    ------
    ConfigError : parameters that the kind does not have, or lacks.
    """

    kind: ArrivalKind = "gamma"
    rate: float = math.inf
    """Requests per second; infinity is the recorded rate of `replay`, and all at once for the others."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps: 1 / (coefficient of variation)^2."""
    rate_scale: float = 1.0
    """Speed-up of `replay`."""
    burst_on: float = 5.0
    """Seconds of each busy phase of `burst`."""
    burst_off: float = 15.0
    """Seconds without arrivals between two busy phases."""
    steps: tuple[RateStep, ...] = ()
    """Rates of `steps`, one after another and then again from the first."""

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"--request-rate must be above 0 (or inf), got {self.rate:g}")
        if self.burstiness != 1.0 and self.kind not in {"gamma", "steps"}:
            raise ConfigError(
                f"--burstiness shapes gamma arrivals and steps; --arrivals {self.kind} has none"
            )
        if self.kind in {"constant", "burst"} and math.isinf(self.rate):
            raise ConfigError(f"--arrivals {self.kind} needs a finite --request-rate")
        if not (math.isfinite(self.rate_scale) and self.rate_scale > 0):
            raise ConfigError(f"--rate-scale must be a finite number above 0, got {self.rate_scale:g}")
        if self.rate_scale != 1.0 and self.kind != "replay":
            raise ConfigError("--rate-scale is for replayed arrivals: give --trace, or change --request-rate")
        if self.kind == "replay" and math.isfinite(self.rate) and self.rate_scale != 1.0:
            raise ConfigError("--rate-scale and --request-rate both set the rate of a replay: leave one out")
        if (self.kind == "steps") != bool(self.steps):
            raise ConfigError("--arrivals steps and --rate-steps RATE:SECONDS,... go together: give both")
        if self.kind == "steps" and math.isfinite(self.rate):
            raise ConfigError("--rate-steps sets the rate itself: leave out --request-rate")

    def offsets(
        self, num_requests: int, *, rng: np.random.Generator, times: NDArray[np.float64] | None = None
    ) -> Offsets:
        """Return ascending arrivals, seconds from the start of the run.

        Parameters
        ----------
        times : recorded ones, for `replay`.

        Raises
        ------
        ConfigError : a replay without recorded times.
        """
        if self.kind == "replay":
            return self._replay(times)
        if self.kind == "steps":
            return step_arrivals(num_requests, steps=self.steps, burstiness=self.burstiness, rng=rng)
        if math.isinf(self.rate):
            return np.zeros(num_requests)
        if self.kind == "constant":
            return constant_arrivals(num_requests, rate=self.rate)
        if self.kind == "burst":
            return burst_arrivals(
                num_requests, rate=self.rate, on_seconds=self.burst_on, off_seconds=self.burst_off, rng=rng
            )
        if self.kind == "poisson":
            return poisson_arrivals(num_requests, rate=self.rate, rng=rng)
        return gamma_arrivals(num_requests, rate=self.rate, burstiness=self.burstiness, rng=rng)

    def _replay(self, times: NDArray[np.float64] | None) -> Offsets:
        if times is None:
            raise ConfigError("the data set has no arrival times to replay: give --request-rate")
        recorded = replay_arrivals(times)
        if math.isinf(self.rate):
            return recorded / self.rate_scale
        if recorded[-1] <= 0:
            raise ConfigError("all recorded requests arrive at once: there is no rate to scale")
        return recorded * (len(recorded) / self.rate / float(recorded[-1]))
