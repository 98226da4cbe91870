"""A draft now and then for a row that has none, so that a change of its acceptance is noticed."""

from __future__ import annotations

_SHARE = 0.005
"""Of the time, that probes may lose at most."""
PAUSE = 16
"""Deliveries of a request between two probes."""


class Probing:
    """Keeps account of the time that probes lose."""

    def __init__(self) -> None:
        self._credit = 0.0
        """Seconds."""

    def earn(self, seconds: float) -> None:
        """Count a step's time; what is saved never exceeds a step."""
        self._credit = min(self._credit + _SHARE * seconds, max(self._credit, seconds))

    def pay(self, seconds: float) -> bool:
        """Take what a probe is expected to lose from what was earned; False where it does not suffice."""
        if seconds > self._credit:
            return False
        self._credit -= seconds
        return True
