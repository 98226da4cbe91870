"""When requests arrive: offsets in seconds from the start of a run.

A closed loop has no arrivals of its own (a request is sent when an earlier one ends): it is `None`
wherever offsets are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.options import changed, option

Offsets = NDArray[np.float64]
RampShape = Literal["linear", "exponential"]
ArrivalKind = Literal["poisson", "gamma", "constant", "burst", "steps", "replay"]

_load = partial(option, group="load")


def gamma_arrivals(num_requests: int, *, rate: float, burstiness: float, rng: np.random.Generator) -> Offsets:
    """Return arrivals with gamma-distributed gaps.

    Gaps have mean 1 / rate and coefficient of variation 1 / sqrt(burstiness): 1 is a Poisson process,
    below 1 arrivals bunch, above 1 they even out. The sequence is rescaled so that the last arrival falls
    at num_requests / rate: two runs of one rate then offer exactly the same load.

    Parameters
    ----------
    rate : requests per second, finite.
    burstiness : shape of the gamma distribution.
    """
    _require_positive("request rate", rate)
    _require_positive("burstiness", burstiness)
    gaps = rng.gamma(shape=burstiness, scale=1 / (rate * burstiness), size=num_requests)
    return _rescale(np.cumsum(gaps), num_requests / rate)


def poisson_arrivals(num_requests: int, *, rate: float, rng: np.random.Generator) -> Offsets:
    """Return arrivals of a Poisson process, rescaled as `gamma_arrivals`."""
    return gamma_arrivals(num_requests, rate=rate, burstiness=1.0, rng=rng)


def constant_arrivals(num_requests: int, *, rate: float) -> Offsets:
    """Return evenly spaced arrivals, the last at num_requests / rate."""
    _require_positive("request rate", rate)
    return np.arange(1, num_requests + 1) / rate


def burst_arrivals(
    num_requests: int, *, rate: float, on_seconds: float, off_seconds: float, rng: np.random.Generator
) -> Offsets:
    """Return arrivals that come in bursts: Poisson for `on_seconds`, then nothing for `off_seconds`.

    The busy phases are as much faster as makes the mean `rate`. Time without arrivals is cut out first:
    what is left is a Poisson process, rescaled as `gamma_arrivals`.
    """
    _require_positive("length of a burst", on_seconds)
    _require_positive("time between bursts", off_seconds)
    _require_positive("request rate", rate)
    period = on_seconds + off_seconds
    busy = poisson_arrivals(num_requests, rate=rate * period / on_seconds, rng=rng)
    return np.asarray(busy + np.floor(busy / on_seconds) * off_seconds)


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
        if not (np.isfinite(self.rate) and self.rate >= 0):
            raise ConfigError(f"the rate of a step must be a finite number of at least 0, got {self.rate:g}")
        _require_positive("length of a step", self.seconds)


def step_arrivals(
    num_requests: int, *, steps: Sequence[RateStep], burstiness: float, rng: np.random.Generator
) -> Offsets:
    """Return arrivals whose rate changes in steps; after the last step the first one follows.

    Arrivals of rate 1 are stretched in time until the expected count of the steps up to each is its own.
    """
    _require_positive("burstiness", burstiness)
    counts = np.array([step.rate * step.seconds for step in steps])
    per_cycle = float(counts.sum())
    _require_positive("expected number of requests in all rate steps", per_cycle)
    ends = np.cumsum([step.seconds for step in steps])
    expected = np.cumsum(rng.gamma(shape=burstiness, scale=1 / burstiness, size=num_requests))
    cycles, within = np.divmod(expected, per_cycle)
    inside = np.interp(within, np.cumsum(np.append(0.0, counts)), np.append(0.0, ends))
    return np.asarray(cycles * ends[-1] + inside)


def ramp_arrivals(
    num_requests: int,
    *,
    start_rate: float,
    end_rate: float,
    shape: RampShape,
    burstiness: float,
    rng: np.random.Generator,
) -> Offsets:
    """Return arrivals whose rate moves from `start_rate` to `end_rate` over the requests.

    Request i of n arrives at rate start + (end - start) i/n (linear) or start (end/start)^(i/n)
    (exponential). There is no rescaling: the length of the run follows from the rates.
    """
    for name, value in (("ramp-up start", start_rate), ("ramp-up end", end_rate), ("burstiness", burstiness)):
        _require_positive(name, value)
    progress = np.arange(num_requests) / max(1, num_requests)
    if shape == "linear":
        rates = start_rate + (end_rate - start_rate) * progress
    else:
        rates = start_rate * (end_rate / start_rate) ** progress
    return np.cumsum(rng.gamma(shape=burstiness, scale=1 / burstiness, size=num_requests) / rates)


def replay_arrivals(times: ArrayLike, *, rate_scale: float = 1.0) -> Offsets:
    """Return recorded arrivals from the first one on, at `rate_scale` times their rate.

    Parameters
    ----------
    times : seconds, in any order; at least one.
    """
    _require_positive("rate scale", rate_scale)
    ordered: Offsets = np.sort(np.asarray(times, dtype=np.float64))
    offsets: Offsets = (ordered - ordered[0]) / rate_scale
    return offsets


def _rescale(offsets: Offsets, end: float) -> Offsets:
    # A tiny burstiness can round every gap to 0; then there is nothing to stretch.
    if not offsets.size or offsets[-1] <= 0:
        return offsets
    return np.multiply(offsets, end / float(offsets[-1]))


def _require_positive(name: str, value: float) -> None:
    if not (np.isfinite(value) and value > 0):
        raise ConfigError(f"the {name} must be a finite number above 0, got {value:g}")


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
        help="requests/s; inf = all at once (default: a trace's own times; a closed loop with "
        "--max-concurrency; else 1, and inf to a server)",
    )
    max_concurrency: int | None = _load(None, metavar="N", at_least=1, help="most requests open at once")
    arrivals: ArrivalKind | None = _load(
        None,
        help="process of arrivals: constant, poisson, burst (on and off), steps (--rate-steps); gamma: the "
        "default, Poisson at --burstiness 1; replay: a trace's own times, stretched to --request-rate "
        "if given",
    )
    burstiness: float = _load(1.0, help="shape of the gamma distribution of gaps; below 1 is burstier")
    arrival_cv: float | None = _load(
        None, metavar="CV", help="the same as a coefficient of variation: 1/sqrt(shape)"
    )
    burst_on_sec: float = _load(5.0, metavar="S", help="busy phases of burst")
    burst_off_sec: float = _load(15.0, metavar="S", help="pauses of burst")
    rate_steps: str | None = _load(
        None, metavar="R:S,...", help="rates, each with its seconds; the list repeats"
    )
    rate_scale: float = _load(1.0, metavar="X", help="replay at X times the recorded rate")
    ramp_up_strategy: RampShape | None = _load(None, help="how the rate changes during the run")
    ramp_up_start_rps: float | None = _load(None, metavar="R", help="rate at the start, requests/s")
    ramp_up_end_rps: float | None = _load(None, metavar="R", help="rate at the end, requests/s")

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
        if self.ramp_up_strategy is not None:
            return Timing("gamma", inf)
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

    @property
    def shape(self) -> float:
        """Shape of the gamma distribution of gaps: 1 / (coefficient of variation)^2."""
        return self.burstiness if self.arrival_cv is None else self.arrival_cv**-2

    def __post_init__(self) -> None:
        if not (self.request_rate is None or self.request_rate > 0):
            raise ConfigError(f"--request-rate must be above 0 (or inf), got {self.request_rate:g}")
        if not (isfinite(self.rate_scale) and self.rate_scale > 0):
            raise ConfigError(f"--rate-scale must be a finite number above 0, got {self.rate_scale:g}")
        if self.arrival_cv is not None:
            if self.burstiness != 1.0:
                raise ConfigError("--arrival-cv and --burstiness say the same: leave one out")
            if not 1e-3 <= self.arrival_cv <= 1e3:
                raise ConfigError(f"--arrival-cv must be from 0.001 to 1,000, got {self.arrival_cv:g}")
        self._check_ramp()

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
        if kind in {"constant", "burst"} and not isfinite(rate):
            raise ConfigError(f"--arrivals {kind} needs a finite --request-rate")
        if kind == "replay" and isfinite(rate) and self.rate_scale != 1.0:
            raise ConfigError("--rate-scale and --request-rate both set the rate of a replay: leave one out")
        if kind == "steps" and self.rate_steps is None:
            raise ConfigError("--arrivals steps needs rates: give --rate-steps RATE:SECONDS,...")
        if kind == "steps" and isfinite(rate):
            raise ConfigError("--request-rate sets the rate too: leave out --rate-steps or --request-rate")

    @property
    def _ramp(self) -> tuple[RampShape | None, float | None, float | None]:
        return self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps

    def _check_ramp(self) -> None:
        given = [each is not None for each in self._ramp]
        if any(given) and not all(given):
            raise ConfigError(
                "--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together: give all or none"
            )
        if any(given) and (self.request_rate is not None or self._kind is not None):
            raise ConfigError(
                "--ramp-up-strategy sets the rate itself: leave out --request-rate and --arrivals"
            )

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
        shape, start, end = self._ramp
        if shape is not None and start is not None and end is not None:
            return ramp_arrivals(
                num_requests, start_rate=start, end_rate=end, shape=shape, burstiness=self.shape, rng=rng
            )
        if kind == "replay":
            return self._replayed(times, rate)
        if kind == "steps":
            steps = read_steps(self.rate_steps or "")
            return step_arrivals(num_requests, steps=steps, burstiness=self.shape, rng=rng)
        if not isfinite(rate):
            return np.zeros(num_requests)
        if kind == "constant":
            return constant_arrivals(num_requests, rate=rate)
        if kind == "burst":
            phases = {"on_seconds": self.burst_on_sec, "off_seconds": self.burst_off_sec}
            return burst_arrivals(num_requests, rate=rate, rng=rng, **phases)
        return gamma_arrivals(num_requests, rate=rate, burstiness=self.shape, rng=rng)

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
    "arrival_cv": ("gamma", "steps"),
    "burst_on_sec": ("burst",),
    "burst_off_sec": ("burst",),
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
