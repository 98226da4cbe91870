"""What requests that were not good missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isnan

from onbeat.core.slo import SLO, SLOMode
from onbeat.metrics.attainment import TOLERANCE, good_requests, has_objectives
from onbeat.metrics.record import RequestRecord


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
    if not record.is_completed and not isnan(record.end):
        return "refused"
    slo = record.slo or SLO()
    if slo.ttft is not None and (record.ttft is None or record.ttft > slo.ttft + TOLERANCE):
        return "TTFT"
    return "E2E" if slo.e2e is not None and record.e2e > slo.e2e + TOLERANCE else "TBT"
