"""As many replicas as keep the free KV memory in a band (Sun et al., "Llumnix", OSDI 2024)."""

from __future__ import annotations

from math import inf

from onbeat.scheduler.cluster.comparators.virtual_usage import freeness
from onbeat.scheduler.cluster.scaling_policy import FleetLoad, ScalingPolicy, Wanted

LOW, HIGH = 10.0, 60.0
"""The band of the paper's released code, in blocks for each running request."""
_BAND_SECONDS = 10.0
"""For which the mean has to be outside before anything is done: the interval of that code."""


class FreenessScaling(ScalingPolicy):
    """Adds a replica where the mean freeness is below a band for a while, and takes one away above it.

    A replica's freeness is that for requests of usual priority, without headroom: steps that its batch has
    until memory is full, in blocks.
    """

    def __init__(self, low: float = LOW, high: float = HIGH) -> None:
        self._low, self._high = low, high
        self._below = self._above = inf
        """Since when the mean has been there."""

    def look(self, fleet: FleetLoad, now: float) -> Wanted:
        """Return one more or one less, where it is time."""
        num = fleet.num_expected
        if not fleet.loads or fleet.num_ready < num:
            self._below = self._above = inf
            return Wanted(num)
        mean = sum(freeness(load) for load, _ in fleet.loads) / len(fleet.loads)
        self._below = min(self._below, now) if mean < self._low else inf
        self._above = min(self._above, now) if mean > self._high else inf
        if now - self._below >= _BAND_SECONDS:
            self._below = inf
            return Wanted(num + 1, "freeness")
        is_last = num == 1 and fleet.num_open > 0
        if now - self._above >= _BAND_SECONDS and not is_last:
            self._above = inf
            return Wanted(num - 1, "freeness")
        return Wanted(num)
