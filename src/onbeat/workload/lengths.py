"""How many tokens requests bring and ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError

TokenCounts = NDArray[np.int64]
MOST_TOKENS = 2**24
"""Of a prompt or an output: more than any model takes, and few enough for tables of them."""


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, num_requests: int, rng: np.random.Generator) -> TokenCounts:
        """Return one count per request, each at least 1."""


@dataclass(frozen=True, slots=True)
class UniformLength:
    """Whole numbers, uniform in [mean (1 - range_ratio), mean (1 + range_ratio)], both ends included.

    A ratio of 0 gives every request the same length.
    """

    mean: int
    range_ratio: float

    def __post_init__(self) -> None:
        check_length(self.mean)
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"the range ratio must lie in [0, 1), got {self.range_ratio:g}")

    def draw(self, num_requests: int, rng: np.random.Generator) -> TokenCounts:
        low = max(1, math.floor(self.mean * (1 - self.range_ratio)))
        high = max(low, math.ceil(self.mean * (1 + self.range_ratio)))
        return rng.integers(low, high, size=num_requests, endpoint=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalLength:
    """Log-normal with the given mean (before clipping): the shape of human conversations."""

    mean: float
    sigma: float
    """Standard deviation of the logarithm."""
    low: int = 1
    high: int = 1 << 20

    def __post_init__(self) -> None:
        check_length(self.low)
        check_length(self.mean)
        if not self.low <= self.mean <= self.high:
            raise ConfigError(f"the mean length {self.mean:g} must lie in [{self.low}, {self.high}]")

    def draw(self, num_requests: int, rng: np.random.Generator) -> TokenCounts:
        location = math.log(self.mean) - self.sigma**2 / 2
        drawn = rng.lognormal(location, self.sigma, size=num_requests)
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64)


def check_length(num_tokens: float) -> None:
    """Raise ConfigError unless a prompt or an output can be so long."""
    if num_tokens < 1:
        raise ConfigError(f"a length must be at least 1 token, got {num_tokens}")
    if num_tokens > MOST_TOKENS:
        raise ConfigError(f"a length must be at most {MOST_TOKENS:,} tokens, got {num_tokens:,}")
