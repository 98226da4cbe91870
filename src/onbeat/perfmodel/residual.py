"""How far measured steps lie from the predicted ones: what turns a mean into a quantile."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import NormalDist

from onbeat.core.errors import ConfigError


class ResidualModel:
    """The distribution of measured / predicted step time.

    Parameters
    ----------
    ratios : measured / predicted of steps that the fit has not seen; positive and finite.
    """

    __slots__ = ("_factors", "_log_sigma", "ratios")

    def __init__(self, ratios: Iterable[float]) -> None:
        self.ratios: tuple[float, ...] = tuple(sorted(ratios))
        if not self.ratios:
            raise ConfigError("a residual model needs at least one held-back step; got none")
        if not (self.ratios[0] > 0 and all(math.isfinite(ratio) for ratio in self.ratios)):
            raise ConfigError(f"ratios of measured to predicted step time must be positive: {self.ratios}")
        self._log_sigma: float | None = None
        self._factors: dict[float, float] = {}

    @classmethod
    def log_normal(cls, sigma: float) -> ResidualModel:
        """Return the residuals of a model that nothing has been measured for.

        Parameters
        ----------
        sigma : standard deviation of the log of measured / predicted; 0 makes every quantile the mean.
        """
        residual = cls((1.0,))
        residual._log_sigma = sigma
        return residual

    def factor(self, q: float) -> float:
        """Return the q-quantile of measured / predicted.

        Between the n ordered ratios it is interpolated at (n + 1) q: the k-th of n ratios is exceeded by a
        new one with probability (n + 1 - k) / (n + 1), so that few points give wide quantiles, not narrow
        ones. Beyond the last ratio it is the last.
        """
        found = self._factors.get(q)
        if found is None:
            found = self._factors[q] = self._quantile(q)
        return found

    def _quantile(self, q: float) -> float:
        if not 0 < q < 1:
            raise ConfigError(f"a quantile of the step time must lie between 0 and 1, both excluded: {q}")
        if self._log_sigma is not None:
            return math.exp(self._log_sigma * NormalDist().inv_cdf(q))
        position = min(max((len(self.ratios) + 1) * q - 1, 0.0), len(self.ratios) - 1.0)
        index = min(int(position), len(self.ratios) - 2)
        if index < 0:
            return self.ratios[0]
        low, high = self.ratios[index], self.ratios[index + 1]
        return low + (high - low) * (position - index)
