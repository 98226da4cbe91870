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

    __slots__ = ("_factors", "_num_left", "_ratios", "_ready_after", "_seen")

    def __init__(self, *, window: int = 512, ready_after: int = 64) -> None:
        self._ratios: deque[float] = deque(maxlen=window)
        self._ready_after = ready_after
        self._num_left = ready_after
        self._seen: list[float] = []
        """The window as of the last look; empty before the first."""
        self._factors: dict[float, float] = {}

    def observe(self, ratio: float) -> None:
        """Count one step's measured / predicted time; positive and finite."""
        self._ratios.append(ratio)
        self._num_left -= 1
        if self._num_left <= 0:
            self._num_left = _REFRESH_EVERY
            self._seen = list(self._ratios)  # sorted for those who ask, if anybody does
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
        self._seen.clear()
        self._factors.clear()
        self._num_left = self._ready_after

    def factor(self, q: float) -> float | None:
        """Return the q-quantile, by the nearest rank; None until enough steps were seen."""
        if not self._seen:
            return None
        found = self._factors.get(q)
        if found is None:
            index = min(int(q * len(self._seen)), len(self._seen) - 1)
            found = self._factors[q] = sorted(self._seen)[index]
        return found
