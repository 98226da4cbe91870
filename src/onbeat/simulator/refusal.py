"""What is written of a request that a replica did not take."""

from __future__ import annotations

from onbeat.core.errors import Overloaded, SLOUnattainable
from onbeat.metrics.record import RequestRecord

REJECTED = "rejected"
"""`RequestRecord.finish_reason` of a request that was refused at its arrival."""

REFUSALS = (Overloaded, SLOUnattainable)
"""What a scheduler raises for want of capacity; other refusals mean that the request could never run."""


def write_refusal(record: RequestRecord, refusal: Overloaded | SLOUnattainable, now: float) -> None:
    """Close the record of a request that was refused now."""
    record.is_rejected = True
    record.finish_reason = REJECTED
    record.end = now
    if isinstance(refusal, SLOUnattainable):
        record.predicted_ttft = record.predicted_wait = refusal.predicted_ttft
