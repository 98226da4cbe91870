"""A switch with two levels, so that a load near one of them does not flip it at every request."""

from __future__ import annotations

from onbeat.core.errors import ConfigError


class Hysteresis:
    """On from the upper level on, off below the lower one; in between it stays as it was.

    Refusing by one level oscillates: what is refused lowers the load, a moment later all are let in again
    (Qin et al., "Mooncake", FAST 2025, section on overload).

    Parameters
    ----------
    enter : ratio at which it comes on.
    leave : ratio below which it goes off; at most `enter`.
    """

    __slots__ = ("_enter", "_leave", "is_on")

    def __init__(self, enter: float = 0.95, leave: float = 0.8) -> None:
        if not leave <= enter:
            raise ConfigError(f"hysteresis must be left at or below where it is entered: {enter=}, {leave=}")
        self._enter = enter
        self._leave = leave
        self.is_on = False

    def update(self, ratio: float) -> bool:
        """Take the newest ratio of load to capacity; return whether the switch is on now."""
        self.is_on = ratio >= (self._leave if self.is_on else self._enter)
        return self.is_on
