"""Numbers of a run with objectives that its latencies do not show: refusals, verdicts, groups of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onbeat.bench.record import RequestRecord, Status
from onbeat.metrics.attainment import good_requests, has_objectives
from onbeat.metrics.distribution import Distribution, describe, percentile
from onbeat.metrics.summary import RunSummary, SummaryOptions, summarise, ttft

Seconds = Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTimes:
    """How long callers waited for an answer that served them not."""

    rejection: Distribution
    """Of the requests that were refused."""
    expiry: Distribution
    """Of those that were ended in the server's queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalAdvice:
    """What the server said to those that it refused or gave up; None where it said nothing."""

    median_predicted_ttft: float | None
    """Seconds."""
    median_retry_after: float | None
    """When to come again, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictSummary:
    """The server's own score of completed requests with objectives beside the client's."""

    num_requests: int
    agreement: float | None
    """Share of the requests on which both say the same."""
    met: float | None
    """Share that the server says it served in time."""
    num_only_client_good: int
    num_only_server_met: int
    num_relegated: int
    median_client_ttft: float | None
    """Of the requests whose TTFT the server tells, seconds."""
    median_server_ttft: float | None
    """Seconds."""
    median_ttft_difference: float | None
    """Client less server, seconds."""
    median_predicted_ttft_error: float | None
    """Median of |predicted - actual| / actual, by the server's clock."""


def response_times(records: Sequence[RequestRecord], options: SummaryOptions) -> ResponseTimes:
    """Return how long refused and expired requests took."""

    def times(status: Status) -> Distribution:
        seconds = [record.response_time for record in records if record.status is status]
        return describe(np.array(seconds, dtype=np.float64), options.percentiles)

    return ResponseTimes(rejection=times(Status.REJECTED), expiry=times(Status.EXPIRED))


def refusal_advice(records: Sequence[RequestRecord]) -> RefusalAdvice:
    """Return what the server said to those that it refused: the TTFT it predicted, when to come again."""
    refused = [record for record in records if record.status in {Status.REJECTED, Status.EXPIRED}]
    predicted = [record.predicted_ttft for record in refused if record.predicted_ttft is not None]
    retry = [record.retry_after for record in refused if record.retry_after is not None]
    return RefusalAdvice(median_predicted_ttft=_median(predicted), median_retry_after=_median(retry))


def compare_verdicts(records: Sequence[RequestRecord], options: SummaryOptions) -> VerdictSummary | None:
    """Compare the server's own score of each request with the client's; None where it gave none.

    Only completed requests with objectives are compared: of others both say the same.
    """
    scored = [
        (record, record.verdict)
        for record in records
        if record.verdict is not None and record.is_completed and has_objectives(record)
    ]
    if not scored:
        return None
    own = good_requests([record for record, _ in scored], mode=options.slo_mode).tolist()
    pairs = [
        (good, verdict.is_met)
        for good, (_, verdict) in zip(own, scored, strict=True)
        if verdict.is_met is not None
    ]
    both = [(ttft(record), verdict.ttft) for record, verdict in scored if verdict.ttft is not None]
    predicted = [
        abs(verdict.predicted_ttft - verdict.ttft) / verdict.ttft
        for _, verdict in scored
        if verdict.predicted_ttft is not None and verdict.ttft
    ]
    return VerdictSummary(
        num_requests=len(scored),
        agreement=_share(good == met for good, met in pairs),
        met=_share(met for _, met in pairs),
        num_only_client_good=sum(good and not met for good, met in pairs),
        num_only_server_met=sum(met and not good for good, met in pairs),
        num_relegated=sum(verdict.is_relegated for _, verdict in scored),
        median_client_ttft=_median([client for client, _ in both]),
        median_server_ttft=_median([server for _, server in both]),
        median_ttft_difference=_median([client - server for client, server in both]),
        median_predicted_ttft_error=_median(predicted),
    )


def summarise_groups(
    records: Sequence[RequestRecord], *, duration: float, options: SummaryOptions
) -> dict[str, RunSummary]:
    """Return the numbers of each group of prompts by its name; {} where there are none.

    Parameters
    ----------
    duration : of the run, seconds.
    """
    names = sorted({record.group for record in records if record.group is not None})
    return {
        name: summarise(
            [record for record in records if record.group == name], duration=duration, options=options
        )
        for name in names
    }


def _median(values: Seconds) -> float | None:
    return percentile(values, 50) if values else None


def _share(flags: Iterable[bool]) -> float | None:
    values = list(flags)
    return sum(values) / len(values) if values else None
