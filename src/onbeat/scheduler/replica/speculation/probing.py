"""A draft now and then for a row that has none, so that a change of its acceptance is noticed."""

from __future__ import annotations

from math import inf

_SHARE = 0.005
"""Of the time, that probes may lose at most."""
PAUSE = 16
"""Deliveries of a request between two probes."""
MOST_PROBES = 8
"""Rows that are probed in one step."""


class Probing:
    """Keeps account of the time that probes lose."""

    def __init__(self) -> None:
        self._credit = 0.0
        """Seconds."""
        self._missed = 0.0
        """Seconds that were asked for in vain."""

    def earn(self, seconds: float) -> None:
        """Count a step's time; what is saved never exceeds a step."""
        self._credit = min(self._credit + _SHARE * seconds, max(self._credit, seconds))
        if self._credit >= seconds:
            self._missed = 0.0  # more is never saved, and the price may have fallen

    @property
    def may_pay(self) -> bool:
        """Whether there is as much as was last asked for in vain: weighing a probe takes time, too."""
        return self._credit >= self._missed

    def pay(self, seconds: float) -> bool:
        """Take what probes are expected to lose from what was earned; False where it does not suffice.

        Parameters
        ----------
        seconds : infinite where they do not fit into the step.
        """
        if seconds > self._credit:
            if seconds < inf:  # what no step has room for is not saved up for: the next one may have
                self._missed = seconds
            return False
        self._credit -= seconds
        self._missed = 0.0
        return True
