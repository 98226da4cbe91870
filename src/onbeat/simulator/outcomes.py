"""What became of the requests of a simulated run, beside their latencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from onbeat.core.request import FinishReason
from onbeat.metrics.record import RequestRecord


def add_outcomes(
    summary: dict[str, Any], records: Sequence[RequestRecord], is_infeasible: Callable[[RequestRecord], bool]
) -> None:
    """Tell rejected, expired, relegated, failed and infeasible requests apart, in a summary and its classes.

    Parameters
    ----------
    summary : of `metrics.summary.summarise`; keys are those of `onbeat bench serve`.
    is_infeasible : whether even an idle machine would miss a request's objectives.
    """
    summary |= _of_some(summary, records, is_infeasible)
    for name, own in summary["classes"].items():
        own |= _of_some(own, [record for record in records if record.request_class == name], is_infeasible)


def _of_some(
    summary: dict[str, Any], records: Sequence[RequestRecord], is_infeasible: Callable[[RequestRecord], bool]
) -> dict[str, Any]:
    num_expired = sum(record.finish_reason == FinishReason.EXPIRED for record in records)
    num_admitted = summary["offered"] - summary["rejected"]
    num_good = summary.get("good")
    return {
        "expired": num_expired,
        "failed": summary["offered"] - summary["completed"] - summary["rejected"] - num_expired,
        "relegated": sum(record.is_relegated for record in records),
        "admitted": num_admitted,
        "attainment_admitted": None if num_good is None or not num_admitted else num_good / num_admitted,
        "hopeless": None if num_good is None else sum(map(is_infeasible, records)),
        "median_predicted_ttft_error": _median_prediction_error(records),
    }


def _median_prediction_error(records: Sequence[RequestRecord]) -> float | None:
    """Return the median of |predicted - actual| / actual TTFT; None where nothing was predicted."""
    errors = [
        abs(record.predicted_ttft - record.ttft) / record.ttft
        for record in records
        if record.predicted_ttft is not None and record.ttft
    ]
    return median(errors) if errors else None
