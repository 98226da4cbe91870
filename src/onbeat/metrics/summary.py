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
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLOMode, slo_mode_option
from onbeat.metrics.attainment import Attainment, JudgedRequests, has_objectives, judge
from onbeat.metrics.breakdown import breakdown_keys
from onbeat.metrics.measured import MeasuredRequest as MeasuredRequest
from onbeat.metrics.measured import delivery_chunks
from onbeat.metrics.samples import grouped_samples

SCHEMA_VERSION = 1
"""Of the keys of `summarise`."""

Array = NDArray[np.float64]

METRICS = ("ttft", "tpot", "itl", "e2el")
OBJECTIVES = ("ttft", "tpot", "tbt", "e2el")
CHUNK_VALUES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryOptions:
    """What `summarise` computes."""

    metrics: tuple[str, ...] = METRICS
    """Those that get percentiles; mean, median, deviation and maximum are there for all."""
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    objectives: Mapping[str, float] | None = None
    """Seconds for any of `OBJECTIVES`, the same for all requests; a good request meets all of them."""
    slo_mode: SLOMode = slo_mode_option()
    """How requests are held to the objectives that they carry themselves (see `attainment`)."""

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
    return quantiles(np.array(values, dtype=np.float64), [p], overwrite=True)[0]


def quantiles(values: Array, percentiles: Sequence[float], *, overwrite: bool = False) -> list[float]:
    """Return several percentiles as `percentile` defines them.

    Parameters
    ----------
    overwrite : reorder `values` in place: no copy, whatever their size.
    """
    if not values.size:
        raise ValueError("the percentile of no values is not defined")
    ordered = values if overwrite else values.copy()
    positions = np.asarray(percentiles, dtype=np.float64) * (ordered.size - 1) / 100
    low = np.floor(positions).astype(np.int64)
    high = np.minimum(low + 1, ordered.size - 1)
    ordered.partition(np.unique(np.concatenate([low, high])))
    found = ordered[low] + (ordered[high] - ordered[low]) * (positions - low)
    return [float(value) for value in found]


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
    return grouped_samples([[request for request in requests if request.is_completed]])[0]


def percentile_name(p: float) -> str:
    """Return how result keys spell a percentile: 99 -> p99, 99.9 -> p99.9."""
    return f"p{p:g}"


def describe(
    values: Array, name: str, percentiles: Sequence[float], *, overwrite: bool = False
) -> dict[str, float | None]:
    """Return mean, median, standard deviation, maximum and percentiles under result keys, in milliseconds.

    Parameters
    ----------
    values : seconds; with no values every entry is None.
    name : the metric, as result keys spell it.
    overwrite : reorder `values` in place instead of copying them.
    """
    spelled = [percentile_name(p) for p in percentiles]
    if not values.size:
        return {f"{statistic}_{name}_ms": None for statistic in ("mean", "median", "std", "max", *spelled)}
    median, *others = quantiles(values, [50, *percentiles], overwrite=overwrite)
    statistics = {
        "mean": float(values.mean()),
        "median": median,
        "std": _standard_deviation(values),
        "max": float(values.max()),
        **dict(zip(spelled, others, strict=True)),
    }
    return {f"{statistic}_{name}_ms": value * 1e3 for statistic, value in statistics.items()}


def _standard_deviation(values: Array) -> float:
    """Return the standard deviation without an array of deviations as large as the values."""
    mean = values.mean()
    squares = sum(
        float(np.square(values[start : start + CHUNK_VALUES] - mean).sum())
        for start in range(0, values.size, CHUNK_VALUES)
    )
    return math.sqrt(squares / values.size)


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
    times = np.array([r.sent for r in requests] + [r.end for r in requests])
    changes = np.repeat(np.array([1, -1]), len(requests))
    # A request that ends at the instant another is sent has made room for it: ends sort first.
    return int(changes[np.lexsort((changes, times))].cumsum().max(initial=0))


def peak_output_rate(requests: Sequence[MeasuredRequest]) -> float:
    """Return the most output tokens that arrived within one second (fixed one-second bins).

    A request's tokens are spread evenly over its deliveries.
    """
    done = [r for r in requests if r.is_completed and len(r.delivery_times)]
    if not done:
        return 0.0
    start = min(request.delivery_times[0] for request in done)
    end = max(request.delivery_times[-1] for request in done)
    tokens = np.zeros(int(end - start) + 1)
    for chunk in delivery_chunks(done):
        shares = np.array([r.num_output_tokens for r in chunk.requests]) / chunk.counts
        seconds = (chunk.times - start).astype(np.int64)
        tokens += np.bincount(seconds, weights=np.repeat(shares, chunk.counts), minlength=tokens.size)
    return float(tokens.max())


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
    groups = _by_class(requests)
    total, by_class = grouped_samples([[r for r in group if r.is_completed] for group in groups.values()])
    result = {"schema_version": SCHEMA_VERSION, "duration": duration} | _counts(requests, duration)
    result |= {
        "request_goodput": None,
        "max_output_tokens_per_s": peak_output_rate(requests),
        "max_concurrent_requests": peak_concurrency(requests),
    }
    judged = judge(requests, mode=options.slo_mode)
    result |= _attainment(requests, judged.attainment(duration), options)
    result["classes"] = {
        name: _counts(group, duration)
        | _attainment(group, judged.of_class(name).attainment(duration), options)
        | _objectives_ms(group[0])
        | _latencies(samples, options)
        for (name, group), samples in zip(groups.items(), by_class, strict=True)
        if name is not None
    }
    result |= breakdown_keys(_scored(requests, judged, options))
    return result | _latencies(total, options)


def _by_class(requests: Sequence[MeasuredRequest]) -> dict[str | None, list[MeasuredRequest]]:
    groups: dict[str | None, list[MeasuredRequest]] = {}
    for request in requests:
        groups.setdefault(request.request_class, []).append(request)
    return dict(sorted(groups.items(), key=lambda item: item[0] or ""))


def _counts(requests: Sequence[MeasuredRequest], duration: float) -> dict[str, Any]:
    done = [request for request in requests if request.is_completed]
    num_rejected = sum(request.is_rejected for request in requests)
    num_prompt_tokens = sum(request.num_prompt_tokens for request in done)
    num_output_tokens = sum(request.num_output_tokens for request in done)
    return {
        "offered": len(requests),
        "completed": len(done),
        "failed": len(requests) - len(done) - num_rejected,
        "rejected": num_rejected,
        "total_input_tokens": num_prompt_tokens,
        "total_output_tokens": num_output_tokens,
        "request_throughput": len(done) / duration,
        "output_throughput": num_output_tokens / duration,
        "total_token_throughput": (num_prompt_tokens + num_output_tokens) / duration,
    }


def _attainment(
    requests: Sequence[MeasuredRequest], own: Attainment, options: SummaryOptions
) -> dict[str, Any]:
    """Return attainment and goodput: by the requests' own objectives, or by those of the options."""
    result: dict[str, Any] = {"attainment": own.attainment, "goodput": own.goodput}
    if own.num_offered:
        result |= own.as_dict() | {"slo_mode": options.slo_mode, "request_goodput": own.goodput}
    if options.objectives:
        num_good = sum(is_good(request, options.objectives) for request in requests)
        result["request_goodput"] = num_good / own.duration
        if not own.num_offered:
            result["goodput"] = num_good / own.duration
            result["attainment"] = num_good / len(requests) if requests else None
    return result


def _scored(
    requests: Sequence[MeasuredRequest], judged: JudgedRequests, options: SummaryOptions
) -> JudgedRequests:
    """Return the requests that attainment counts: those judged, else all by the objectives of the options."""
    if judged.requests or not options.objectives:
        return judged
    good = [is_good(request, options.objectives) for request in requests]
    return JudgedRequests(requests, np.array(good, dtype=np.bool_))


def _objectives_ms(request: MeasuredRequest) -> dict[str, Any]:
    if not has_objectives(request):
        return {}
    return {
        f"slo_{name}_ms": None if (limit := getattr(request.slo, name)) is None else limit * 1e3
        for name in ("ttft", "tbt", "e2e")
    }


def _latencies(samples: Mapping[str, Array], options: SummaryOptions) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, values in samples.items():
        percentiles = options.percentiles if name in options.metrics else ()
        result |= describe(values, name, percentiles, overwrite=True)
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
