r"""Whether requests kept their objectives.

A request with arrival $a$, objectives ttft, tbt and e2e, and deliveries at $t_1 \le \dots \le t_m$ is
*good* if it completed, $t_1 - a \le$ ttft, $t_m - a \le$ e2e, and its tokens came in time, in one of two
senses:

``stream``
    At least 99 % of its tokens met their deadlines $D_k = \max(a + \mathrm{ttft}, t_1) + k\,\mathrm{tbt}$
    (k = 0 is the first): a stream that is ahead may use its slack, a stall cannot hide.
``gap``
    The 99th percentile (linear interpolation) of its own gaps between deliveries is at most tbt.

All tokens of one delivery arrive at its time. An objective that was not given is met. A request whose
answer is not streamed is held to ttft and e2e alone. Rejected, failed and expired requests are not good.
*Attainment* is the share of the offered requests with objectives that are good; *goodput* is good requests
per second.

References
----------
Zhong et al., "DistServe", OSDI 2024 (attainment and goodput); Liu et al., "Andes", 2024 (deadlines of the
tokens of a stream).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onbeat.core.slo import SLO, SLOMode
from onbeat.metrics.measured import DeliveryChunk, MeasuredRequest, delivery_chunks
from onbeat.metrics.record import RequestRecord

TOLERANCE = 1e-9
"""Seconds. Far below what clocks resolve: it keeps rounding from failing a token that is just in time."""
LATE_TOKENS_IN = 100
"""One token in so many may be late in `stream` mode."""
GAP_PERCENTILE = 99
USUAL_SHARE = 0.9
"""Of the requests, that are to be good where nobody says another share."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """How many requests with objectives were good."""

    num_offered: int
    num_good: int
    duration: float
    """Length of the measured interval, seconds."""

    @property
    def attainment(self) -> float | None:
        """Share of the offered requests that are good; None of none."""
        return self.num_good / self.num_offered if self.num_offered else None

    @property
    def goodput(self) -> float | None:
        """Good requests per second; None without requests that have objectives."""
        return self.num_good / self.duration if self.num_offered else None


@dataclass(frozen=True, slots=True)
class JudgedRequests:
    """Requests with objectives, and which of them are good."""

    requests: Sequence[MeasuredRequest]
    good: Flags
    """One for each of `requests`."""

    def attainment(self, duration: float) -> Attainment:
        """Return how many were good.

        Parameters
        ----------
        duration : length of the measured interval, seconds.
        """
        return Attainment(num_offered=len(self.requests), num_good=int(self.good.sum()), duration=duration)

    def of_class(self, name: str | None) -> JudgedRequests:
        """Return the requests of one class of objectives."""
        rows = [row for row, request in enumerate(self.requests) if request.request_class == name]
        return JudgedRequests([self.requests[row] for row in rows], self.good[rows])


def judge(requests: Sequence[MeasuredRequest], *, mode: SLOMode = "stream") -> JudgedRequests:
    """Judge all offered requests that have objectives.

    Raises
    ------
    ConfigError : an unknown mode.
    """
    judged = [request for request in requests if has_objectives(request)]
    return JudgedRequests(judged, good_requests(judged, mode=mode))


def has_objectives(request: MeasuredRequest) -> bool:
    """Return whether a request has an objective."""
    return request.slo is not None and not request.slo.is_empty


def good_requests(requests: Sequence[MeasuredRequest], *, mode: SLOMode = "stream") -> Flags:
    """Return for each request whether it is good; without objectives, whether it completed.

    A completed request that never delivered a token counts its end as its only delivery.
    """
    completed = np.fromiter((r.is_completed for r in requests), dtype=np.bool_, count=len(requests))
    good: Flags = np.zeros(len(requests), dtype=np.bool_)
    for row in np.flatnonzero(completed).tolist():
        if not len(requests[row].delivery_times):
            good[row] = _is_end_in_time(requests[row])
    for chunk in delivery_chunks(requests):
        good[chunk.rows] = _score(chunk, mode)
    return good & completed


def _is_end_in_time(request: MeasuredRequest) -> bool:
    slo = request.slo or SLO()
    elapsed = request.end - request.arrival
    return all(elapsed <= limit + TOLERANCE for limit in (slo.ttft, slo.e2e) if limit is not None)


def _score(chunk: DeliveryChunk, mode: SLOMode) -> Flags:
    num_requests = len(chunk.requests)
    arrivals = np.fromiter((r.arrival for r in chunk.requests), dtype=np.float64, count=num_requests)
    limits = np.fromiter(_limits(chunk.requests), dtype=np.dtype((np.float64, 3)), count=num_requests)
    ttft, tbt, e2e = limits.T
    good: Flags = chunk.first - arrivals <= ttft + TOLERANCE
    pairs = zip(chunk.requests, chunk.last.tolist(), strict=True)
    # A whole answer comes when all of it can be sent.
    ends = np.array([last if each.is_streamed else each.end for each, last in pairs])
    good &= ends - arrivals <= e2e + TOLERANCE
    if np.isfinite(tbt).any():
        if mode == "stream":
            first_deadline = np.where(
                np.isfinite(ttft), np.maximum(arrivals + ttft, chunk.first), chunk.first
            )
            good &= _keeps_deadlines(chunk, first_deadline, tbt)
        else:
            good &= _keeps_gaps(chunk, tbt)
    return good


def _limits(requests: Sequence[MeasuredRequest]) -> Iterator[tuple[float, float, float]]:
    """Yield ttft, tbt and e2e of each request; infinity where there is no objective."""
    nothing = SLO()
    for request in requests:
        slo = request.slo or nothing
        yield (
            math.inf if slo.ttft is None else slo.ttft,
            math.inf if slo.tbt is None or not request.is_streamed else slo.tbt,
            math.inf if slo.e2e is None else slo.e2e,
        )


def _keeps_deadlines(
    chunk: DeliveryChunk, first_deadline: NDArray[np.float64], tbt: NDArray[np.float64]
) -> Flags:
    sizes, starts = chunk.sizes(), chunk.starts
    ends = np.cumsum(sizes)
    num_before = ends[starts] - sizes[starts]  # tokens in the chunk before each request's own
    first_token = ends - sizes - np.repeat(num_before, chunk.counts)
    behind = chunk.times - np.repeat(first_deadline, chunk.counts) - TOLERANCE
    # Tokens of a delivery up to this index have deadlines before it.
    num_overdue = np.ceil(behind / np.repeat(tbt, chunk.counts))
    num_late = np.add.reduceat(np.clip(num_overdue - first_token, 0, sizes), starts)
    return np.asarray(num_late * LATE_TOKENS_IN <= np.add.reduceat(sizes, starts))


def _keeps_gaps(chunk: DeliveryChunk, tbt: NDArray[np.float64]) -> Flags:
    """Compare each request's P99 gap with its tbt, looking at order statistics only where it is close."""
    num_gaps = chunk.counts - 1
    is_long = chunk.gaps() > np.repeat(tbt + TOLERANCE, num_gaps)
    num_long = np.zeros(len(num_gaps), dtype=np.int64)
    has_gaps = num_gaps > 0
    gap_starts = np.cumsum(num_gaps) - num_gaps
    if has_gaps.any():
        num_long[has_gaps] = np.add.reduceat(is_long.astype(np.int64), gap_starts[has_gaps])
    # The percentile lies between the order statistics `low` and `high`.
    position = np.maximum(num_gaps - 1, 0) * GAP_PERCENTILE / 100
    low, high = np.floor(position).astype(np.int64), np.ceil(position).astype(np.int64)
    good: Flags = num_long <= np.maximum(num_gaps - 1 - high, 0)
    is_close = ~good & (num_long < num_gaps - low)
    for row in np.flatnonzero(is_close).tolist():
        own = np.diff(np.asarray(chunk.requests[row].delivery_times, dtype=np.float64))
        good[row] = float(np.percentile(own, GAP_PERCENTILE)) <= tbt[row] + TOLERANCE
    return good


def count_missed(records: Sequence[RequestRecord], *, mode: SLOMode) -> Counter[str]:
    """Return of the requests that were not good how many missed what.

    Returns
    -------
    By `refused` (they ended without a whole answer), `TTFT`, `E2E` or `TBT`, the first of these that is true.
    """
    judged = [record for record in records if has_objectives(record)]
    good = good_requests(judged, mode=mode)
    return Counter(_missed_by(record) for record, is_good in zip(judged, good, strict=True) if not is_good)


def _missed_by(record: RequestRecord) -> str:
    if not record.is_completed and not math.isnan(record.end):
        return "refused"
    slo = record.slo or SLO()
    if slo.ttft is not None and (record.ttft is None or record.ttft > slo.ttft + TOLERANCE):
        return "TTFT"
    return "E2E" if slo.e2e is not None and record.e2e > slo.e2e + TOLERANCE else "TBT"
