"""What a summary says of requests that were not served as they asked."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from onbeat.core.slo import SLO, Fate
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.summary import GroupSummary, summarise
from onbeat.simulator.result import outcomes_of


def make_record(reason: str, *, name: str = "fast", ttft: float = 0.1, **fields: Any) -> RequestRecord:
    record = RequestRecord(
        request_id="r",
        arrival=0.0,
        num_prompt_tokens=4,
        request_class=name,
        slo=SLO(ttft=0.5),
        finish_reason=reason,
        end=2.0,
        **fields,
    )
    if reason == "length":
        record.delivery_times, record.delivery_sizes = array("d", [ttft, 2.0]), array("I", [1, 1])
        record.num_output_tokens = 2
    return record


def counted(summary: GroupSummary) -> dict[str, int]:
    counts = summary.counts
    return {
        "offered": counts.num_offered,
        "completed": counts.num_completed,
        "rejected": counts.num_rejected,
        "expired": counts.num_expired,
        "failed": counts.num_failed,
    }


def test_each_outcome_is_counted_once_in_all_and_by_class():
    records = [
        make_record("length", predicted_ttft=0.11),
        make_record("length", predicted_ttft=0.15, fate=Fate.RELEGATED),
        make_record("length", ttft=1.0, name="slow"),
        make_record("rejected", fate=Fate.REJECTED, predicted_ttft=2.0, predicted_wait=2.0),
        make_record("expired", predicted_ttft=0.4),
        make_record("expired", name="slow"),
        make_record("abort", name="slow"),
    ]
    summary = summarise(records, duration=2.0)

    def outcomes(name: str | None) -> list[float | None]:
        own = summary if name is None else summary.classes[name]
        return list(outcomes_of(own, records, lambda each: each.finish_reason == "rejected", name).values())

    num_relegated, num_infeasible, error = outcomes(None)
    assert counted(summary) == {"offered": 7, "completed": 3, "rejected": 1, "expired": 2, "failed": 1}
    assert num_relegated == 1
    assert summary.counts.num_admitted == 6
    assert summary.score.attainment == 2 / 7
    assert summary.attainment_admitted == 2 / 6
    # Only requests with a first token show how good their prediction was.
    assert error == pytest.approx((0.1 + 0.5) / 2)
    slow_counts = counted(summary.classes["slow"])
    assert slow_counts == {"offered": 3, "completed": 1, "rejected": 0, "expired": 1, "failed": 1}
    assert outcomes("slow") == [0, 0, None]
    assert num_infeasible == outcomes("fast")[1] == 1


def test_without_objectives_there_is_no_share():
    record = make_record("length")
    record.slo = record.request_class = None
    summary = summarise([record], duration=2.0)
    assert outcomes_of(summary, [record], lambda record: True)["hopeless"] is None
    assert summary.attainment_admitted is None
    assert summary.classes == {}
