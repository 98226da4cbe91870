r"""From measured requests to the numbers people quote: latency percentiles, throughput, goodput.

Symbols, for one request with arrival $a$ and deliveries (sets of tokens that arrived together) at
$t_1 \le t_2 \le \dots \le t_m$, of $n$ output tokens in all:

=======  ============================================  =============================================
symbol   definition                                    key in results
=======  ============================================  =============================================
TTFT     $t_1 - a$                                     ``ttft``
TBT      every gap $t_{k+1} - t_k$, pooled             ``itl`` (the name other load tools give it)
TPOT     $(t_m - t_1) / (n - 1)$, one per request      ``tpot``; left out where $n \le 1$
E2E      $t_m - a$                                     ``e2el``
=======  ============================================  =============================================

Times are seconds inside; keys that end in ``_ms`` are milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onbeat.core.errors import ConfigError

Array = NDArray[np.float64]

METRICS = ("ttft", "tpot", "itl", "e2el")
OBJECTIVES = ("ttft", "tpot", "tbt", "e2el")


class MeasuredRequest(Protocol):
    """One offered request as `summarise` sees it, live or simulated."""

    @property
    def arrival(self) -> float:
        """Where TTFT and E2E start, seconds."""
        ...

    @property
    def sent(self) -> float:
        """When it left the client, seconds; `arrival` where nothing holds it back."""
        ...

    @property
    def delivery_times(self) -> Sequence[float]:
        """When each delivery arrived, seconds, on the clock of `arrival`, ascending."""
        ...

    @property
    def end(self) -> float:
        """When the request ended, however it did, seconds."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def is_completed(self) -> bool:
        """Whether the whole answer came. Only completed requests have latencies."""
        ...

    @property
    def is_rejected(self) -> bool:
        """Whether the server refused the request for want of capacity."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryOptions:
    """What `summarise` computes."""

    metrics: tuple[str, ...] = METRICS
    """Those that get percentiles; mean, median, deviation and maximum are there for all."""
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    objectives: Mapping[str, float] | None = None
    """Seconds for any of `OBJECTIVES`; a request is good if it meets all of them."""

    def __post_init__(self) -> None:
        for p in self.percentiles:
            if not 0 <= p <= 100:
                raise ConfigError(f"a percentile must lie in [0, 100], got {p:g}")
        for name, seconds in (self.objectives or {}).items():
            if name not in OBJECTIVES:
                raise ConfigError(f"unknown objective {name!r}; known are {', '.join(OBJECTIVES)}")
            if not seconds > 0:
                raise ConfigError(f"objective {name} must be above 0, got {seconds * 1e3:g} ms")


def percentile(values: ArrayLike, p: float) -> float:
    """Return the p-th percentile by linear interpolation between order statistics.

    Parameters
    ----------
    values : one-dimensional, at least one value, in any order.
    p : in [0, 100].
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if not ordered.size:
        raise ValueError("the percentile of no values is not defined")
    position = (ordered.size - 1) * p / 100
    low = math.floor(position)
    high = min(low + 1, ordered.size - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (position - low))


def ttft(request: MeasuredRequest) -> float:
    """Return the time from arrival to the first delivery, seconds."""
    return request.delivery_times[0] - request.arrival


def e2e(request: MeasuredRequest) -> float:
    """Return the time from arrival to the last delivery, seconds."""
    return request.delivery_times[-1] - request.arrival


def gaps(request: MeasuredRequest) -> Array:
    """Return the gaps between deliveries (TBT), seconds."""
    return np.diff(np.asarray(request.delivery_times, dtype=np.float64))


def tpot(request: MeasuredRequest) -> float | None:
    """Return the mean time per output token after the first, seconds; None for a single token."""
    if request.num_output_tokens <= 1:
        return None
    times = request.delivery_times
    return (times[-1] - times[0]) / (request.num_output_tokens - 1)


def collect_samples(requests: Sequence[MeasuredRequest]) -> dict[str, Array]:
    """Return every value of each metric over the completed requests, seconds; `itl` pools all gaps."""
    done = [request for request in requests if request.is_completed]
    tpots = [value for value in map(tpot, done) if value is not None]
    return {
        "ttft": np.array([ttft(request) for request in done]),
        "tpot": np.array(tpots),
        "itl": np.concatenate([gaps(request) for request in done]) if done else np.empty(0),
        "e2el": np.array([e2e(request) for request in done]),
    }


def percentile_name(p: float) -> str:
    """Return how result keys spell a percentile: 99 -> p99, 99.9 -> p99.9."""
    return f"p{p:g}"


def describe(values: Array, name: str, percentiles: Sequence[float]) -> dict[str, float | None]:
    """Return mean, median, standard deviation, maximum and percentiles under result keys, in milliseconds.

    Parameters
    ----------
    values : seconds; with no values every entry is None.
    name : the metric, as result keys spell it.
    """
    statistics: dict[str, Callable[[Array], float]] = {
        "mean": lambda v: float(v.mean()),
        "median": partial(percentile, p=50),
        "std": lambda v: float(v.std()),
        "max": lambda v: float(v.max()),
    }
    statistics |= {percentile_name(p): partial(percentile, p=p) for p in percentiles}
    return {
        f"{statistic}_{name}_ms": compute(values) * 1e3 if values.size else None
        for statistic, compute in statistics.items()
    }


def is_good(request: MeasuredRequest, objectives: Mapping[str, float]) -> bool:
    """Return whether a request met every objective; one that did not complete met none.

    `tbt` is held against the request's own 99th percentile of gaps, so that no stall hides among
    other requests' gaps; `tpot` against its mean. A single delivery has no gap to miss.

    References
    ----------
    Zhong et al., "DistServe", OSDI 2024 (goodput as the rate of requests within their objectives).
    """
    if not request.is_completed:
        return False
    own_gaps = gaps(request)
    measured = {
        "ttft": ttft(request),
        "e2el": e2e(request),
        "tpot": tpot(request) or 0.0,
        "tbt": percentile(own_gaps, 99) if own_gaps.size else 0.0,
    }
    return all(measured[name] <= limit for name, limit in objectives.items())


def peak_concurrency(requests: Sequence[MeasuredRequest]) -> int:
    """Return the most requests that were open (sent, not ended) at one time."""
    # A request that ends at the instant another is sent has made room for it: ends sort first.
    events = [(r.sent, 1) for r in requests] + [(r.end, -1) for r in requests]
    peak = running = 0
    for _, change in sorted(events):
        running += change
        peak = max(peak, running)
    return peak


def peak_output_rate(requests: Sequence[MeasuredRequest]) -> float:
    """Return the most output tokens that arrived within one second (fixed one-second bins).

    A request's tokens are spread evenly over its deliveries.
    """
    done = [request for request in requests if request.is_completed]
    if not done:
        return 0.0
    times = np.concatenate([np.asarray(r.delivery_times, dtype=np.float64) for r in done])
    weights = np.concatenate(
        [np.full(len(r.delivery_times), r.num_output_tokens / len(r.delivery_times)) for r in done]
    )
    bins = (times - times.min()).astype(np.int64)
    return float(np.bincount(bins, weights=weights).max())


def summarise(
    requests: Sequence[MeasuredRequest], *, duration: float, options: SummaryOptions | None = None
) -> dict[str, Any]:
    """Return counts, throughputs, goodput and the latency statistics of one run.

    Parameters
    ----------
    requests : every offered request. Failed and rejected ones give no latency and no throughput; they stay
        in attainment's denominator. Goodput, good requests per second, has no such denominator.
    duration : length of the measured interval, seconds, above 0.
    options : which metrics, percentiles and objectives.

    Returns
    -------
    Keys as `vllm bench serve` writes them, where it has them.
    """
    options = options or SummaryOptions()
    done = [request for request in requests if request.is_completed]
    num_rejected = sum(request.is_rejected for request in requests)
    num_prompt_tokens = sum(request.num_prompt_tokens for request in done)
    num_output_tokens = sum(request.num_output_tokens for request in done)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(requests) - len(done) - num_rejected,
        "rejected": num_rejected,
        "total_input_tokens": num_prompt_tokens,
        "total_output_tokens": num_output_tokens,
        "request_throughput": len(done) / duration,
        "request_goodput": None,
        "output_throughput": num_output_tokens / duration,
        "total_token_throughput": (num_prompt_tokens + num_output_tokens) / duration,
        "max_output_tokens_per_s": peak_output_rate(requests),
        "max_concurrent_requests": peak_concurrency(requests),
    }
    if options.objectives:
        num_good = sum(is_good(request, options.objectives) for request in requests)
        result["request_goodput"] = num_good / duration
        result["attainment"] = num_good / len(requests) if requests else None
    samples = collect_samples(requests)
    for name, values in samples.items():
        result |= describe(values, name, options.percentiles if name in options.metrics else ())
    return result


def bootstrap_interval(
    groups: Sequence[Array],
    statistic: Callable[[Array], float],
    rng: np.random.Generator,
    *,
    num_resamples: int = 1000,
    level: float = 0.95,
) -> tuple[float, float]:
    """Return a percentile bootstrap interval of a statistic of pooled values.

    Whole groups are drawn again, not single values: the gaps of one request depend on each other, so a
    request's gaps are one group. For one value a request, pass arrays of length one.

    Parameters
    ----------
    groups : at least one non-empty array.
    statistic : maps pooled values to one number.
    level : share of resamples inside the interval, in (0, 1).

    References
    ----------
    Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 8 and 13.
    """
    draws = bootstrap_draws(groups, statistic, rng, num_resamples=num_resamples)
    tail = (1 - level) / 2 * 100
    return percentile(draws, tail), percentile(draws, 100 - tail)


def bootstrap_draws(
    groups: Sequence[Array],
    statistic: Callable[[Array], float],
    rng: np.random.Generator,
    *,
    num_resamples: int = 1000,
) -> Array:
    """Return the statistic of `num_resamples` resamples (see `bootstrap_interval`)."""
    sizes = np.array([len(group) for group in groups])
    if not sizes.sum():
        raise ValueError("a bootstrap needs at least one value")
    pooled = np.concatenate(list(groups))
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    draws = np.empty(num_resamples)
    for i in range(num_resamples):
        chosen = rng.integers(len(groups), size=len(groups))
        while not sizes[chosen].sum():  # every drawn group is empty: possible when most requests have no gap
            chosen = rng.integers(len(groups), size=len(groups))
        draws[i] = statistic(pooled[_ranges(starts[chosen], sizes[chosen])])
    return draws


def _ranges(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the index ranges [start, start + size)."""
    offsets = np.repeat(starts - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes)
    return offsets + np.arange(sizes.sum())
