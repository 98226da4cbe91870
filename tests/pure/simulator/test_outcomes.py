"""What a summary says of requests that were not served as they asked."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from onbeat.core.slo import SLO
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.summary import summarise
from onbeat.simulator.outcomes import add_outcomes


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


def test_each_outcome_is_counted_once_in_all_and_by_class():
    records = [
        make_record("length", predicted_ttft=0.11),
        make_record("length", predicted_ttft=0.15, is_relegated=True),
        make_record("length", ttft=1.0, name="slow"),
        make_record("rejected", is_rejected=True, predicted_ttft=2.0, predicted_wait=2.0),
        make_record("expired", predicted_ttft=0.4),
        make_record("expired", name="slow"),
        make_record("abort", name="slow"),
    ]
    summary = summarise(records, duration=2.0)
    add_outcomes(summary, records, lambda record: record.finish_reason == "rejected")
    counts = {key: summary[key] for key in ("offered", "completed", "rejected", "expired", "failed")}
    assert counts == {"offered": 7, "completed": 3, "rejected": 1, "expired": 2, "failed": 1}
    assert summary["relegated"] == 1
    assert summary["admitted"] == 6
    assert summary["attainment"] == 2 / 7
    assert summary["attainment_admitted"] == 2 / 6
    # Only requests with a first token show how good their prediction was.
    assert summary["median_predicted_ttft_error"] == pytest.approx((0.1 + 0.5) / 2)
    slow = summary["classes"]["slow"]
    counted = ("completed", "rejected", "expired", "failed", "relegated", "hopeless")
    assert [slow[key] for key in counted] == [1, 0, 1, 1, 0, 0]
    assert summary["hopeless"] == summary["classes"]["fast"]["hopeless"] == 1
    assert slow["median_predicted_ttft_error"] is None


def test_without_objectives_there_is_no_share():
    record = make_record("length")
    record.slo = record.request_class = None
    summary = summarise([record], duration=2.0)
    add_outcomes(summary, [record], lambda record: True)
    assert summary["attainment_admitted"] is summary["hopeless"] is None
    assert summary["classes"] == {}
