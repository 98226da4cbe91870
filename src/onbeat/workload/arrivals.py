"""When requests arrive, and how many tokens they bring and ask for.

Arrivals are offsets in seconds from the start of a run.

A closed loop has no arrivals of its own (a request is sent when an earlier one ends): it is `None`
wherever offsets are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.options import changed, option

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

    def draw(self, num_requests: int, rng: np.random.Generator) -> TokenCounts:
        location = math.log(self.mean) - self.sigma**2 / 2
        drawn = rng.lognormal(location, self.sigma, size=num_requests)
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64)


Offsets = NDArray[np.float64]
ArrivalKind = Literal["poisson", "gamma", "constant", "steps", "replay"]

_load = partial(option, group="load")


def gamma_arrivals(
    num_requests: int, *, rate: float, rng: np.random.Generator, burstiness: float = 1.0
) -> Offsets:
    """Return arrivals with gamma-distributed gaps.

    Gaps have mean 1 / rate and coefficient of variation 1 / sqrt(burstiness): 1 is a Poisson process,
    below 1 arrivals bunch, above 1 they even out. The sequence is rescaled so that the last arrival falls
    at num_requests / rate: two runs of one rate then offer exactly the same load.

    Parameters
    ----------
    rate : requests per second, finite.
    burstiness : shape of the gamma distribution.
    """
    gaps = rng.gamma(shape=burstiness, scale=1 / (rate * burstiness), size=num_requests)
    return _rescale(np.cumsum(gaps), num_requests / rate)


def constant_arrivals(num_requests: int, *, rate: float) -> Offsets:
    """Return evenly spaced arrivals, the last at num_requests / rate."""
    return np.arange(1, num_requests + 1) / rate


@dataclass(frozen=True, slots=True)
class RateStep:
    """A request rate that holds for some time.

    Raises
    ------
    ConfigError : a negative rate, or no time.
    """

    rate: float
    """Requests per second; 0 is a pause."""
    seconds: float

    def __post_init__(self) -> None:
        if not (0 <= self.rate < inf and 0 < self.seconds < inf):
            raise ConfigError(
                f"a step is {self.rate:g}:{self.seconds:g}; it must have a rate of at least 0 and some "
                "seconds, both finite"
            )


def step_arrivals(
    num_requests: int, *, steps: Sequence[RateStep], burstiness: float, rng: np.random.Generator
) -> Offsets:
    """Return arrivals whose rate changes in steps; after the last step the first one follows.

    Arrivals of rate 1 are stretched in time until the expected count of the steps up to each is its own.
    """
    counts = np.array([step.rate * step.seconds for step in steps])
    per_cycle = float(counts.sum())
    if not per_cycle:
        raise ConfigError("the rates of all steps are 0, so no request would ever come; give one above 0")
    ends = np.cumsum([step.seconds for step in steps])
    expected = np.cumsum(rng.gamma(shape=burstiness, scale=1 / burstiness, size=num_requests))
    cycles, within = np.divmod(expected, per_cycle)
    inside = np.interp(within, np.cumsum(np.append(0.0, counts)), np.append(0.0, ends))
    return np.asarray(cycles * ends[-1] + inside)


def replay_arrivals(times: ArrayLike, *, rate_scale: float = 1.0) -> Offsets:
    """Return recorded arrivals from the first one on, at `rate_scale` times their rate.

    Parameters
    ----------
    times : seconds, in any order; at least one.
    """
    ordered: Offsets = np.sort(np.asarray(times, dtype=np.float64))
    offsets: Offsets = (ordered - ordered[0]) / rate_scale
    return offsets


def _rescale(offsets: Offsets, end: float) -> Offsets:
    # A tiny burstiness can round every gap to 0; then there is nothing to stretch.
    if not offsets.size or offsets[-1] <= 0:
        return offsets
    return np.multiply(offsets, end / float(offsets[-1]))


class Timing(NamedTuple):
    """How arrivals spread."""

    kind: ArrivalKind
    rate: float
    """Requests per second; infinite: the recorded rate of `replay`, that of `steps`, and else all at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When requests come.

    Raises
    ------
    ConfigError : settings that do not go together, or that would have no effect.
    """

    DEFAULT_RATE: ClassVar[float] = 1.0
    """Requests per second where nothing sets a rate; where it is infinite, such a rate is none: a request is
    sent as soon as there is a slot for it."""

    request_rate: float | None = _load(
        None,
        metavar="R",
        above=0,
        help="requests/s; inf = all at once (default: a trace's own times; a closed loop with "
        "--max-concurrency; else 1, and inf to a server)",
    )
    max_concurrency: int | None = _load(None, metavar="N", at_least=1, help="most requests open at once")
    arrivals: ArrivalKind | None = _load(
        None,
        help="process of arrivals: constant, poisson, steps (--rate-steps); gamma: the default, Poisson at "
        "--burstiness 1; replay: a trace's own times, stretched to --request-rate if given",
    )
    burstiness: float = _load(
        1.0, above=0, below=inf, help="shape of the gamma distribution of gaps; below 1 is burstier"
    )
    rate_steps: str | None = _load(
        None, metavar="R:S,...", help="rates, each with its seconds; the list repeats; 0:S pauses"
    )
    rate_scale: float = _load(
        1.0, metavar="X", above=0, below=inf, help="replay at X times the recorded rate"
    )

    @property
    def has_times(self) -> bool:
        """Whether the requests may have recorded times: they are the default."""
        return False

    @property
    def timing(self) -> Timing | None:
        """How arrivals spread; None where each request waits for an earlier one to end.

        Of a trace it is known once the load is `named`.
        """
        kind, rate = self._kind, self.request_rate
        if kind is None and rate is None:
            if self.max_concurrency is not None:
                return None
            kind = "replay" if self.has_times else None
        kind = kind or "gamma"
        if rate is None:
            rate = inf if kind in {"replay", "steps"} else self.DEFAULT_RATE
        is_never = not isfinite(rate) and rate == self.DEFAULT_RATE and kind in {"gamma", "poisson"}
        return None if is_never else Timing(kind, rate)

    @property
    def _kind(self) -> ArrivalKind | None:
        return "steps" if self.arrivals is None and self.rate_steps is not None else self.arrivals

    def _check_kind(self) -> None:
        timing = self.timing
        for each in changed(self):
            kinds = _SPREADING.get(each.name)
            if timing is None and kinds is not None:
                raise ConfigError(
                    f"{each.flag} spreads arrivals; without a rate there are none, only the next request "
                    "when one ends (a closed loop): give --request-rate too"
                )
            if timing is not None and timing.kind not in (kinds or (timing.kind,)):
                raise ConfigError(
                    f"{each.flag} is for --arrivals {' or '.join(kinds or ())}; this run's are {timing.kind}"
                )
        if timing is None:
            return
        kind, rate = timing
        if kind == "constant" and not isfinite(rate):
            raise ConfigError("--arrivals constant needs a finite --request-rate")
        if kind == "replay" and isfinite(rate) and self.rate_scale != 1.0:
            raise ConfigError("--rate-scale and --request-rate both set the rate of a replay: leave one out")
        if kind == "steps" and self.rate_steps is None:
            raise ConfigError("--arrivals steps needs rates: give --rate-steps RATE:SECONDS,...")
        if kind == "steps" and isfinite(rate):
            raise ConfigError("--request-rate sets the rate too: leave out --rate-steps or --request-rate")

    def offsets(
        self, num_requests: int, *, seed: int, times: NDArray[np.float64] | None = None
    ) -> Offsets | None:
        """Return arrivals, seconds from the start of the run, ascending; None in a closed loop.

        Parameters
        ----------
        times : recorded ones; None where there are none.
        """
        if self.timing is None:
            return None
        (kind, rate), rng = self.timing, np.random.default_rng([seed, 1])
        if kind == "replay":
            return self._replayed(times, rate)
        if kind == "steps":
            steps = read_steps(self.rate_steps or "")
            return step_arrivals(num_requests, steps=steps, burstiness=self.burstiness, rng=rng)
        if not isfinite(rate):
            return np.zeros(num_requests)
        if kind == "constant":
            return constant_arrivals(num_requests, rate=rate)
        return gamma_arrivals(num_requests, rate=rate, burstiness=self.burstiness, rng=rng)

    def _replayed(self, times: NDArray[np.float64] | None, rate: float) -> Offsets:
        if times is None:
            raise ConfigError("the data set has no arrival times to replay: give --request-rate")
        recorded = replay_arrivals(times)
        if not isfinite(rate):
            return recorded / self.rate_scale
        if recorded[-1] <= 0:
            raise ConfigError("all recorded requests arrive at once: there is no rate to scale")
        return recorded * (len(recorded) / rate / float(recorded[-1]))


_SPREADING: dict[str, tuple[str, ...]] = {
    "rate_scale": ("replay",),
    "burstiness": ("gamma", "steps"),
    "rate_steps": ("steps",),
}
"""Settings of arrivals, and the kinds that have them."""


def read_steps(text: str) -> tuple[RateStep, ...]:
    """Read rates, each with its seconds.

    Raises
    ------
    ConfigError : it is written otherwise.
    """
    steps = []
    for item in text.split(","):
        rate, _, seconds = item.partition(":")
        try:
            steps.append(RateStep(float(rate), float(seconds)))
        except ValueError:
            raise ConfigError(
                f"--rate-steps takes RATE:SECONDS,... such as 2:60,8:30, got {item!r}"
            ) from None
    return tuple(steps)
