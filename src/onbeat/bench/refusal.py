"""What a server's refusal says: that it takes no more, or that it is too late, and what it had predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onbeat.bench.record import RequestRecord, Status
from onbeat.bench.stream import StreamError, error_code, error_text
from onbeat.bench.verdict import milliseconds

STATUSES = {429: Status.REJECTED, 503: Status.REJECTED, 504: Status.EXPIRED}
CODES = {
    "slo_unattainable": Status.REJECTED,
    "server_overloaded": Status.REJECTED,
    "deadline_exceeded": Status.EXPIRED,
}
"""The same in an error event of a stream that had already begun."""
BREAKDOWNS = frozenset({"engine_dead"})
"""Codes of a 503 that refuses nobody: the server has failed."""


def refusal(
    record: RequestRecord, status: int, headers: Mapping[str, str], message: dict[str, Any] | None
) -> StreamError:
    """Note in a record what an answer other than 200 means; returns the error to raise.

    Parameters
    ----------
    message : the answer's body; None if it is not a JSON object.
    """
    error = (message or {}).get("error")
    fields = error if isinstance(error, dict) else {}
    code = None if message is None else error_code(message)
    if status in STATUSES and code not in BREAKDOWNS:
        record.status = STATUSES[status]
        record.predicted_ttft = milliseconds(fields.get("predicted_ttft_ms"))
        record.retry_after = _retry_after(headers)
    return StreamError(
        f"HTTP {status}",
        error_text(message) if message is not None else "",
        code=code,
    )


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the wait that the headers ask for, seconds: the finer one of the two that servers send."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return float(headers[name]) * unit
        except (KeyError, ValueError):  # absent, or the date that the standard allows too
            continue
    return None
