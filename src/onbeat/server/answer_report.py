"""What an answer says of itself: the tokens that it took, and how its objectives were kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.core.slo import SLO, Fate, SLOMode
from onbeat.metrics.attainment import GAP_PERCENTILE, TOLERANCE, good_requests
from onbeat.metrics.record import RequestRecord
from onbeat.server.choices import Choice, ChoiceDelta
from onbeat.server.errors import milliseconds


def usage_of(choices: Sequence[Choice], delta: ChoiceDelta | None = None) -> dict[str, Any]:
    """Return the usage of choices: each prompt counts once, however many choices it has.

    Without speculation the prediction tokens are 0, as OpenAI's own answers have them.

    Parameters
    ----------
    choices : of one request.
    delta : of their only one, up to which its output counts; None counts all that there is.
    """
    counted: Sequence[Choice | ChoiceDelta] = choices if delta is None else [delta]
    first_choices = {choice.prompt_index: choice for choice in reversed(choices)}.values()
    num_prompt = sum(len(choice.request.prompt_token_ids) for choice in first_choices)
    num_cached = sum(choice.num_cached_tokens for choice in first_choices)
    num_output = sum(each.num_output_tokens for each in counted)
    num_drafted = sum(each.num_drafted_tokens for each in counted)
    num_accepted = sum(each.num_accepted_tokens for each in counted)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(each.num_reasoning_tokens for each in counted),
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_drafted - num_accepted,
        },
    }


def without_empty_details(usage: dict[str, Any]) -> dict[str, Any]:
    """Return a usage without the details of which all numbers are 0."""
    return {key: value for key, value in usage.items() if not isinstance(value, dict) or any(value.values())}


def slo_report(choice: Choice, mode: SLOMode) -> dict[str, Any] | None:
    """Return how a finished choice fared, as the `slo` object of an answer. None without objectives.

    Times are those at which deliveries were handed to the connection; what the network adds is not in them.

    Parameters
    ----------
    mode : what keeping a TBT objective means.
    """
    return None if choice.record is None else record_report(choice.record, mode)


def record_report(record: RequestRecord, mode: SLOMode) -> dict[str, Any] | None:
    """Return how a request fared whose record is complete. None without objectives.

    Parameters
    ----------
    mode : what keeping a TBT objective means.
    """
    slo = record.slo
    if slo is None or slo.is_empty:
        return None
    times = np.asarray(record.delivery_times, dtype=np.float64)
    gaps = np.diff(times)
    return unjudged_report(record) | {
        "tbt_p99_ms": milliseconds(float(np.percentile(gaps, GAP_PERCENTILE))) if len(gaps) else None,
        "token_attainment": _token_attainment(record, gaps, slo, mode),
        "met": bool(good_requests([record], mode=mode)[0]),
        "relegated": record.fate is Fate.RELEGATED,
    }


def unjudged_report(record: RequestRecord) -> dict[str, Any]:
    """Return the same of a request that was best effort from its arrival on, as its job was late by then."""
    return {
        "class": record.request_class,
        "ttft_ms": milliseconds(record.ttft),
        "engine_ttft_ms": milliseconds(record.engine_ttft),
        "tbt_p99_ms": None,
        "token_attainment": None,
        "met": False,
        "predicted_ttft_ms": milliseconds(record.predicted_ttft),
        "relegated": True,
    }


def worst_report(reports: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the `slo` object of an answer: that of its worst choice. None without any.

    The worst is the first by: objectives not met, fewer tokens in time, later first token.
    """
    return min(reports, key=_goodness, default=None)


def _goodness(report: dict[str, Any]) -> tuple[bool, float, float]:
    attained, ttft = report["token_attainment"], report["ttft_ms"]
    return report["met"], 1.0 if attained is None else attained, -(math.inf if ttft is None else ttft)


def _token_attainment(
    record: RequestRecord, gaps: NDArray[np.float64], slo: SLO, mode: SLOMode
) -> float | None:
    """Return the share of tokens (in `gap` mode, of gaps) in time; None where they had no deadline."""
    if slo.tbt is None or not record.is_streamed or not record.delivery_times:
        return None
    if mode == "gap":
        return float(np.mean(gaps <= slo.tbt + TOLERANCE)) if len(gaps) else 1.0
    sizes = np.asarray(record.delivery_sizes, dtype=np.int64)
    times = np.asarray(record.delivery_times, dtype=np.float64)
    first = max(record.delivery_times[0], record.arrival + (slo.ttft or -math.inf))
    # Of a delivery, the tokens below this index had their deadline before it.
    num_overdue = np.ceil((times - first - TOLERANCE) / slo.tbt)
    num_late = np.clip(num_overdue - (np.cumsum(sizes) - sizes), 0, sizes)
    return float(1 - num_late.sum() / sizes.sum())
