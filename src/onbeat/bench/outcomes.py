"""Numbers of a run with objectives that its latencies do not show: refusals, verdicts, groups of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from onbeat.bench.record import RequestRecord, Status
from onbeat.metrics.attainment import good_requests, has_objectives
from onbeat.metrics.summary import SummaryOptions, describe, percentile, summarise, ttft

Seconds = Sequence[float]


def outcome_keys(records: Sequence[RequestRecord], summary: dict[str, Any], options: SummaryOptions) -> None:
    """Tell refused, expired and failed requests apart, in a summary and in its classes."""
    summary |= _of_some(records, summary, options)
    for name, own in summary["classes"].items():
        members = [record for record in records if record.request_class == name]
        own |= _of_some(members, own, options)


def _of_some(
    records: Sequence[RequestRecord], summary: dict[str, Any], options: SummaryOptions
) -> dict[str, Any]:
    counts = Counter(record.status for record in records)
    admitted = len(records) - counts[Status.REJECTED]
    good = summary.get("good")
    refused = [record for record in records if record.status is Status.REJECTED]
    expired = [record for record in records if record.status is Status.EXPIRED]
    return {
        "failed": counts[Status.FAILED],
        "expired": counts[Status.EXPIRED],
        "admitted": admitted,
        "attainment_admitted": None if good is None or not admitted else good / admitted,
        **_described([record.response_time for record in refused], "rejection", options),
        **_described([record.response_time for record in expired], "expiry", options),
    }


def refusal_keys(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return what the server said to those that it refused: the TTFT it predicted, when to come again."""
    refused = [record for record in records if record.status in {Status.REJECTED, Status.EXPIRED}]
    predicted = [record.predicted_ttft for record in refused if record.predicted_ttft is not None]
    retry = [record.retry_after for record in refused if record.retry_after is not None]
    return {
        "median_rejected_predicted_ttft_ms": _median_ms(predicted),
        "median_retry_after_ms": _median_ms(retry),
    }


def verdict_keys(records: Sequence[RequestRecord], options: SummaryOptions) -> dict[str, Any] | None:
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
    return {
        "requests": len(scored),
        "agreement": _share(good == met for good, met in pairs),
        "met": _share(met for _, met in pairs),
        "only_client_good": sum(good and not met for good, met in pairs),
        "only_server_met": sum(met and not good for good, met in pairs),
        "relegated": sum(verdict.is_relegated for _, verdict in scored),
        "median_client_ttft_ms": _median_ms([client for client, _ in both]),
        "median_server_ttft_ms": _median_ms([server for _, server in both]),
        "median_ttft_difference_ms": _median_ms([client - server for client, server in both]),
        "median_predicted_ttft_error": percentile(predicted, 50) if predicted else None,
    }


def group_keys(
    records: Sequence[RequestRecord], *, duration: float, options: SummaryOptions
) -> dict[str, dict[str, Any]]:
    """Return counts, attainment and latencies of each group of prompts; {} where there are none."""
    names = sorted({record.group for record in records if record.group is not None})
    return {
        name: summarise(
            [record for record in records if record.group == name], duration=duration, options=options
        )
        | {"classes": {}}
        for name in names
    }


def _described(values: Seconds, name: str, options: SummaryOptions) -> dict[str, float | None]:
    return describe(np.array(values, dtype=np.float64), name, options.percentiles)


def _median_ms(values: Seconds) -> float | None:
    return percentile(values, 50) * 1e3 if values else None


def _share(flags: Any) -> float | None:
    values = list(flags)
    return sum(values) / len(values) if values else None
