"""When an engine that gives signs of life, or gives none any more, is held to hang.

Time in which it wanted to run and could not does not count: a starved engine is slow, and starting it again
costs more than waiting for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from math import inf

from onbeat.core.protocols import EnginePulse

_MOST_PAUSES = 64
"""That are kept: older ones were before any step that still runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """When an engine is held to hang. It gives a sign of life twice a second, also while a step runs."""

    silence_seconds: float = 30.0
    """Longest time without a sign of life."""
    step_seconds: float = 30.0
    """A step may always take this long."""
    step_ratio: float = 100.0
    """Beyond that, it may take this many times what was predicted."""
    unpredicted_step_seconds: float = 600.0
    """What a step may take where nothing predicts."""


class OwnPauses:
    """When the watcher of an engine stood still itself: stopped, or starved. It has read nothing meanwhile.

    Parameters
    ----------
    longest : seconds between two looks of a watcher that did not.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._last = inf
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_MOST_PAUSES)

    def look(self, now: float) -> bool:
        """Note a look; return whether it came in time, so that what was said before has been read."""
        before, self._last = self._last, now
        if now - before < self._longest:
            return True
        self._pauses.append((before, now))
        return False

    def without(self, pulse: EnginePulse) -> EnginePulse:
        """Return a pulse as it would be without pauses: engines are often stopped with their watcher."""
        start = pulse.step_start
        return replace(
            pulse, time=self._later(pulse.time), step_start=None if start is None else self._later(start)
        )

    def _later(self, time: float) -> float:
        return time + sum(end - max(start, time) for start, end in self._pauses if end > time)


def find_hang(pulse: EnginePulse, limits: HangLimits, now: float) -> str | None:
    """Return what speaks for a hang of the engine with this pulse, or None."""
    besides = f", not counting {pulse.waited:.0f} s without a processor" if pulse.waited >= 1 else ""
    silence = now - pulse.time - pulse.waited
    if silence > limits.silence_seconds:
        return f"it has said nothing for {silence:.0f} s{besides}"
    if pulse.step_start is None:
        return None
    age = now - pulse.step_start - pulse.waited
    if pulse.step_predicted is None:
        is_long = age > limits.unpredicted_step_seconds
        return f"its step has run for {age:.0f} s{besides}" if is_long else None
    if age > max(limits.step_seconds, limits.step_ratio * pulse.step_predicted):
        return f"its step has run for {age:.0f} s instead of {pulse.step_predicted:.3g} s{besides}"
    return None
