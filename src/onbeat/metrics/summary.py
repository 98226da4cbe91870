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

Times are seconds inside; fields and keys that end in ``_ms`` are milliseconds. `report.run` says under
which keys a summary is saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO, SLOMode
from onbeat.core.slo_options import slo_mode_option
from onbeat.metrics.attainment import Attainment, JudgedRequests, has_objectives, judge
from onbeat.metrics.breakdown import Breakdown, break_down
from onbeat.metrics.distribution import Array, Distribution, describe, percentile
from onbeat.metrics.measured import DeliveryChunk, delivery_chunks
from onbeat.metrics.measured import MeasuredRequest as MeasuredRequest

Samples = dict[str, NDArray[np.float64]]
"""Metric -> values in seconds: `ttft`, `tpot`, `itl` (all gaps), `e2el`."""
METRICS = ("ttft", "tpot", "itl", "e2el")
OBJECTIVES = ("ttft", "tpot", "tbt", "e2el")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many requests ended in which way, and the tokens of those that completed."""

    duration: float
    """Length of the measured interval, seconds."""
    num_offered: int
    num_completed: int
    num_rejected: int
    num_expired: int
    """Ended in a queue."""
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def num_failed(self) -> int:
        return self.num_offered - self.num_completed - self.num_rejected - self.num_expired

    @property
    def num_admitted(self) -> int:
        return self.num_offered - self.num_rejected

    @property
    def request_throughput(self) -> float:
        """Completed requests per second."""
        return self.num_completed / self.duration

    @property
    def output_throughput(self) -> float:
        """Output tokens of completed requests per second."""
        return self.num_output_tokens / self.duration

    @property
    def total_token_throughput(self) -> float:
        """Prompt and output tokens of completed requests per second."""
        return (self.num_prompt_tokens + self.num_output_tokens) / self.duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How many requests were good: by the objectives that they carry, else by those of the whole run."""

    own: Attainment
    """Of the requests that carry objectives; of none where none does."""
    slo_mode: SLOMode
    """How these were judged."""
    by_run: Attainment | None = None
    """Of all requests by the objectives of `SummaryOptions`; None where it has none."""
    objectives: Mapping[str, float] = field(default_factory=dict)
    """Those of `SummaryOptions`, seconds."""

    @property
    def num_good(self) -> int | None:
        """Good requests among those that carry objectives; None where none does."""
        return self.own.num_good if self.own.num_offered else None

    @property
    def attainment(self) -> float | None:
        """Share of the requests that are good; None where nothing was asked of them."""
        if self.own.num_offered or self.by_run is None:
            return self.own.attainment
        return self.by_run.attainment

    @property
    def goodput(self) -> float | None:
        """Good requests per second; None where nothing was asked of them."""
        return self.own.goodput if self.own.num_offered else self.request_goodput

    @property
    def request_goodput(self) -> float | None:
        """Good requests per second by the objectives of the run; where it has none, as `goodput`."""
        if self.by_run is not None:
            return self.by_run.num_good / self.by_run.duration
        return self.own.goodput


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """The numbers of some requests of a run."""

    counts: Counts
    score: Score
    latencies: Mapping[str, Distribution]
    """By metric, as `METRICS` names them."""

    @property
    def attainment_admitted(self) -> float | None:
        """Share of the requests that were not refused that are good; None without objectives of their own."""
        num_good, num_admitted = self.score.num_good, self.counts.num_admitted
        return None if num_good is None or not num_admitted else num_good / num_admitted


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSummary(GroupSummary):
    """The numbers of one class of objectives."""

    objectives: SLO | None
    """None where the class asks for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary(GroupSummary):
    """The numbers of a whole run."""

    max_output_tokens_per_s: float
    """Most output tokens that arrived within one second."""
    max_concurrent_requests: int
    classes: Mapping[str, ClassSummary]
    """By name; requests of no class are in none."""
    breakdown: Breakdown


@dataclass(frozen=True, slots=True)
class LatencyStatistic:
    """A number of a summary by name: the mean of TTFT, the 99th percentile of gaps."""

    metric: str
    """Of `METRICS`."""
    statistic: str
    """As `Distribution.statistics_ms` names it."""

    def of(self, summary: GroupSummary) -> float | None:
        """Return the value, milliseconds; None where it was not asked for or there is none."""
        return summary.latencies[self.metric].statistics_ms.get(self.statistic)


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


def mean_tpot(requests: Iterable[MeasuredRequest]) -> float | None:
    """Return the mean TPOT of the completed requests, seconds; None where none had two tokens."""
    values = [value for request in requests if request.is_completed and (value := tpot(request)) is not None]
    return float(np.mean(values)) if values else None


def collect_samples(requests: Sequence[MeasuredRequest]) -> dict[str, Array]:
    """Return every value of each metric over the completed requests, seconds; `itl` pools all gaps."""
    return grouped_samples([[request for request in requests if request.is_completed]])[0]


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
    tokens: Counter[float] = Counter()
    """By second, of those in which any came: a run may take ages."""
    for chunk in delivery_chunks(done):
        shares = np.array([r.num_output_tokens for r in chunk.requests]) / chunk.counts
        seconds, places = np.unique(np.floor(chunk.times - start), return_inverse=True)
        sums = np.bincount(places, weights=np.repeat(shares, chunk.counts))
        for second, num_tokens in zip(seconds.tolist(), sums.tolist(), strict=True):
            tokens[second] += num_tokens
    return float(max(tokens.values()))


def summarise(
    requests: Sequence[MeasuredRequest], *, duration: float, options: SummaryOptions | None = None
) -> RunSummary:
    """Return counts, throughputs, goodput and the latency statistics of one run.

    Parameters
    ----------
    requests : every offered request. Failed and rejected ones give no latency and no throughput; they stay
        in attainment's denominator. Goodput, good requests per second, has no such denominator.
    duration : length of the measured interval, seconds, above 0.
    options : which metrics, percentiles and objectives.
    """
    options = options or SummaryOptions()
    groups = _by_class(requests)
    total, by_class = grouped_samples([[r for r in group if r.is_completed] for group in groups.values()])
    judged = judge(requests, mode=options.slo_mode)
    classes = {
        name: ClassSummary(
            counts=_counts(group, duration),
            score=_score(group, judged.of_class(name).attainment(duration), options),
            latencies=_latencies(samples, options),
            objectives=group[0].slo if has_objectives(group[0]) else None,
        )
        for (name, group), samples in zip(groups.items(), by_class, strict=True)
        if name is not None
    }
    return RunSummary(
        counts=_counts(requests, duration),
        score=_score(requests, judged.attainment(duration), options),
        latencies=_latencies(total, options),
        max_output_tokens_per_s=peak_output_rate(requests),
        max_concurrent_requests=peak_concurrency(requests),
        classes=classes,
        breakdown=break_down(_scored(requests, judged, options)),
    )


def _by_class(requests: Sequence[MeasuredRequest]) -> dict[str | None, list[MeasuredRequest]]:
    groups: dict[str | None, list[MeasuredRequest]] = {}
    for request in requests:
        groups.setdefault(request.request_class, []).append(request)
    return dict(sorted(groups.items(), key=lambda item: item[0] or ""))


def _counts(requests: Sequence[MeasuredRequest], duration: float) -> Counts:
    done = [request for request in requests if request.is_completed]
    return Counts(
        duration=duration,
        num_offered=len(requests),
        num_completed=len(done),
        num_rejected=sum(request.is_rejected for request in requests),
        num_expired=sum(request.is_expired for request in requests),
        num_prompt_tokens=sum(request.num_prompt_tokens for request in done),
        num_output_tokens=sum(request.num_output_tokens for request in done),
    )


def _score(requests: Sequence[MeasuredRequest], own: Attainment, options: SummaryOptions) -> Score:
    by_run = None
    if options.objectives:
        num_good = sum(is_good(request, options.objectives) for request in requests)
        by_run = Attainment(num_offered=len(requests), num_good=num_good, duration=own.duration)
    return Score(own=own, slo_mode=options.slo_mode, by_run=by_run, objectives=options.objectives or {})


def _scored(
    requests: Sequence[MeasuredRequest], judged: JudgedRequests, options: SummaryOptions
) -> JudgedRequests:
    """Return the requests that attainment counts: those judged, else all by the objectives of the options."""
    if judged.requests or not options.objectives:
        return judged
    good = [is_good(request, options.objectives) for request in requests]
    return JudgedRequests(requests, np.array(good, dtype=np.bool_))


def _latencies(samples: Mapping[str, Array], options: SummaryOptions) -> dict[str, Distribution]:
    return {
        metric: describe(values, options.percentiles if metric in options.metrics else (), overwrite=True)
        for metric, values in samples.items()
    }


def grouped_samples(groups: Sequence[Sequence[MeasuredRequest]]) -> tuple[Samples, list[Samples]]:
    """Return the samples of all groups together, and those of each group as views into them.

    Parameters
    ----------
    groups : completed requests; those without a delivery give no sample.

    Notes
    -----
    The gaps of a large run fill gigabytes: they are stored once, grouped, so that the values of a group are a
    view of those of all.
    """
    pool = _allocate(groups)
    filled = dict.fromkeys(pool, 0)
    views: list[Samples] = []
    for group in groups:
        start = dict(filled)
        for chunk in delivery_chunks(group):
            for metric, values in _chunk_samples(chunk).items():
                pool[metric][filled[metric] : filled[metric] + len(values)] = values
                filled[metric] += len(values)
        views.append({metric: pool[metric][start[metric] : filled[metric]] for metric in pool})
    return pool, views


def _allocate(groups: Sequence[Sequence[MeasuredRequest]]) -> Samples:
    num_requests = num_tpots = num_gaps = 0
    for group in groups:
        for request in group:
            if count := len(request.delivery_times):
                num_requests += 1
                num_tpots += request.num_output_tokens > 1
                num_gaps += count - 1
    return {
        "ttft": np.empty(num_requests),
        "tpot": np.empty(num_tpots),
        "itl": np.empty(num_gaps),
        "e2el": np.empty(num_requests),
    }


def _chunk_samples(chunk: DeliveryChunk) -> Samples:
    count = len(chunk.requests)
    arrivals = np.fromiter((r.arrival for r in chunk.requests), dtype=np.float64, count=count)
    tokens = np.fromiter((r.num_output_tokens for r in chunk.requests), dtype=np.float64, count=count)
    first, last = chunk.first, chunk.last
    several = tokens > 1
    return {
        "ttft": first - arrivals,
        "tpot": (last - first)[several] / (tokens[several] - 1),
        "itl": chunk.gaps(),
        "e2el": last - arrivals,
    }
