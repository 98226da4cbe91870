"""How much work arrives: the rate of requests, and the time that one takes."""

from __future__ import annotations

import math

from onbeat.core.errors import ConfigError

_SHORTEST_WATCH = 0.1
"""Share of the time constant that has to pass before the time watched is taken at its word."""


class LoadEstimate:
    """Exponentially weighted estimates over the recent past; each call costs O(1).

    An arrival t seconds ago weighs exp(-t / T), where T is the time constant. The rate is the sum of these
    weights over T, which falls by itself without arrivals. The mean service time is an average with the
    same weights, and stays as it is meanwhile.

    Bias at the start: the sum would need several T to fill up, so it is divided by the integral of the
    weights over the time watched, T (1 - exp(-w / T)) with w = now - first arrival. The first arrival opens
    the watch and is not counted, since it could not have been missed; with Poisson arrivals the estimate at
    a given time is then without bias from the start. Until w reaches a tenth of T it is taken to be that
    tenth, so that two arrivals in a row are no flood; the rate is underestimated for that long.

    The service time is the time that a request takes of the replica, its share of the steps that it is
    batched in, and not the time from its first token to its last.

    Parameters
    ----------
    time_constant : seconds in which the weight of an arrival falls to 1 / e.
    """

    __slots__ = (
        "_first",
        "_last",
        "_mean_service",
        "_num_recent",
        "_time_constant",
        "_weight",
    )

    def __init__(self, time_constant: float = 30.0) -> None:
        if not 0 < time_constant < math.inf:
            raise ConfigError(f"the time constant of the load must be positive, seconds: {time_constant}")
        self._time_constant = time_constant
        self._first: float | None = None
        self._last = 0.0
        self._num_recent = 0.0
        """Weighted arrivals after the first, as of `_last`."""
        self._weight = 0.0
        """Weighted arrivals, the first included, as of `_last`."""
        self._mean_service = 0.0

    def on_arrival(self, now: float, service_seconds: float) -> None:
        """Count an arrival.

        Parameters
        ----------
        now : seconds; one that lies before the last arrival counts as being at that time.
        service_seconds : time that the request will take of the replica, as predicted.
        """
        if self._first is None:
            self._first = self._last = now
        else:
            decay = self._decay(now)
            self._num_recent = self._num_recent * decay + 1
            self._weight *= decay
            self._last = max(now, self._last)
        self._weight += 1
        self._mean_service += (service_seconds - self._mean_service) / self._weight

    def arrival_rate(self, now: float) -> float:
        """Return requests per second; 0 until the second arrival."""
        if self._first is None:
            return 0.0
        watched = max((now - self._first) / self._time_constant, _SHORTEST_WATCH)
        return self._num_recent * self._decay(now) / (-math.expm1(-watched) * self._time_constant)

    @property
    def mean_service(self) -> float:
        """Mean service time, seconds; 0 before the first arrival."""
        return self._mean_service

    def utilisation(self, now: float) -> float:
        """Return arrival rate x mean service time: at 1 and above the queue grows without end."""
        return self.arrival_rate(now) * self._mean_service

    def _decay(self, now: float) -> float:
        """Return what is left at `now` of a weight as of the last arrival."""
        return math.exp(min(self._last - now, 0.0) / self._time_constant)
