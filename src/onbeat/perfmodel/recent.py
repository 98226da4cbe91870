"""What the last steps say of a step-time model: how far it is off, as quantiles, and an alarm."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_REFRESH_EVERY = 32
"""Steps between two looks at the window: a quantile moves slowly, and sorting takes time."""


class OnlineQuantile:
    """Quantiles of measured / predicted over the last steps.

    Parameters
    ----------
    window : steps that are remembered.
    ready_after : steps that must have been seen; before that, whoever asks relies on what was known before.
    """

    __slots__ = ("_factors", "_has_looked", "_num_left", "_ratios", "_ready_after", "_window")

    def __init__(self, *, window: int = 512, ready_after: int = 64) -> None:
        self._window = window
        # Those since the last look, too: the window is cut out and sorted for those who ask, if anybody does.
        self._ratios: deque[float] = deque(maxlen=window + _REFRESH_EVERY)
        self._ready_after = ready_after
        self._num_left = ready_after
        self._has_looked = False
        self._factors: dict[float, float] = {}

    def observe(self, ratio: float) -> None:
        """Count one step's measured / predicted time; positive and finite."""
        self._ratios.append(ratio)
        self._num_left -= 1
        if self._num_left <= 0:
            self._num_left = _REFRESH_EVERY
            self._has_looked = True
            self._factors.clear()

    def observe_all(self, ratios: Sequence[float]) -> None:
        """Count the ratios of several steps, in their order."""
        first = 0
        while len(ratios) - first >= self._num_left > 0:  # a look at the window comes between them
            first += self._num_left
            self._ratios.extend(ratios[first - self._num_left : first - 1])
            self._num_left = 1
            self.observe(ratios[first - 1])
        self._ratios.extend(ratios[first:])
        self._num_left -= len(ratios) - first

    @property
    def greatest(self) -> float:
        """The greatest ratio that is remembered; 0 where none is."""
        return max(self._ratios, default=0.0)

    def forget(self) -> None:
        """Begin anew: the steps so far say nothing of those to come."""
        self._ratios.clear()
        self._has_looked = False
        self._factors.clear()
        self._num_left = self._ready_after

    def factor(self, q: float) -> float | None:
        """Return the q-quantile, by the nearest rank; None until enough steps were seen."""
        if not self._has_looked:
            return None
        found = self._factors.get(q)
        if found is None:
            end = len(self._ratios) - (_REFRESH_EVERY - self._num_left)
            seen = sorted(list(self._ratios)[max(0, end - self._window) : end])
            found = self._factors[q] = seen[min(int(q * len(seen)), len(seen) - 1)]
        return found


@dataclass(frozen=True, slots=True)
class Drift:
    """Whether the model still describes the machine."""

    is_alarming: bool
    ratio: float
    """Typical measured / predicted of recent steps, online correction left out."""
    num_steps: int
    """Steps seen so far."""


class DriftAlarm:
    """Watches measured / predicted over all steps; on and off at different levels, lest it flicker.

    Parameters
    ----------
    on : typical ratio, either way, at which the alarm comes on.
    off : the ratio below which it goes off again.
    memory : steps over which the mean forgets, and that must be seen before the first alarm.
    """

    __slots__ = ("_is_alarming", "_mean", "_memory", "_num_steps", "_off", "_on")

    def __init__(self, *, on: float = 1.3, off: float = 1.15, memory: int = 64) -> None:
        self._on = math.log(on)
        self._off = math.log(off)
        self._memory = memory
        self._mean = 0.0
        self._num_steps = 0
        self._is_alarming = False

    def observe(self, ratio: float) -> None:
        """Count one step's measured / predicted."""
        self._num_steps = num_steps = self._num_steps + 1
        left = math.log(ratio) - self._mean
        if abs(left) > _LOG_LIMIT:
            # A stall of a second is not drift: one step weighs as a factor of four beside the others at most.
            left = math.copysign(_LOG_LIMIT, left)
        self._mean += left / (num_steps if num_steps < self._memory else self._memory)
        if self._is_alarming:
            self._is_alarming = abs(self._mean) >= self._off
        elif self._num_steps >= self._memory:
            self._is_alarming = abs(self._mean) >= self._on

    @property
    def state(self) -> Drift:
        """What has been seen so far."""
        return Drift(self._is_alarming, math.exp(self._mean), self._num_steps)


_LOG_LIMIT = math.log(4)
