"""How far steps lie from their prediction of late: quantiles of the newest ratios."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

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
