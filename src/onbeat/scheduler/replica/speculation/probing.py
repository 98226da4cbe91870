"""A draft now and then for a row that has none, so that a change of its acceptance is noticed."""

from __future__ import annotations

from onbeat.scheduler.replica.speculation.acceptance import RequestRate

_SHARE = 0.005
"""Of the time, that probes may lose at most."""
_PAUSE = 16
"""Deliveries of a request between two probes."""


class Probing:
    """Picks whom to probe, and keeps account of the time that this loses."""

    def __init__(self) -> None:
        self._credit = 0.0
        """Seconds."""

    def wants(self, rate: RequestRate) -> bool:
        """Whether a request has gone without drafts for so long that nobody knows how it would do."""
        return rate.num_idle >= _PAUSE

    def earn(self, seconds: float) -> None:
        """Count a step's time; what is saved never exceeds a step."""
        self._credit = min(self._credit + _SHARE * seconds, max(self._credit, seconds))

    def pay(self, seconds: float) -> bool:
        """Take what a probe is expected to lose from what was earned; False where it does not suffice."""
        if seconds > self._credit:
            return False
        self._credit -= seconds
        return True
