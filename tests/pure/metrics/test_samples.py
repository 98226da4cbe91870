"""Pooling of deliveries, and summaries by class."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.slo import SLO, Fate
from onbeat.metrics.distribution import describe, quantiles
from onbeat.metrics.measured import delivery_chunks
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.summary import SummaryOptions, grouped_samples, summarise
from onbeat.report.run import summary_values


def record(
    times: list[float], *, request_class: str | None = None, slo: SLO | None = None, **options: object
) -> RequestRecord:
    return RequestRecord(
        request_id="r",
        arrival=0.0,
        num_prompt_tokens=5,
        request_class=request_class,
        slo=slo,
        delivery_times=array("d", times),
        delivery_sizes=array("I", [1] * len(times)),
        num_output_tokens=len(times),
        end=times[-1] if times else 0.5,
        **({"finish_reason": "length"} | options),  # type: ignore[arg-type]
    )


def summary_of(requests: list[RequestRecord], **options: Any) -> dict[str, Any]:
    """The numbers under the keys of a saved result."""
    return summary_values(summarise(requests, **options))


runs = st.lists(st.lists(st.integers(0, 1000), min_size=0, max_size=7).map(sorted), max_size=20)


@given(runs, st.integers(1, 30))
def test_chunks_hold_every_delivery_once(run: list[list[int]], max_deliveries: int) -> None:
    requests = [record([time / 10 for time in times]) for times in run]
    chunks = list(delivery_chunks(requests, max_deliveries=max_deliveries))

    rows = [row for chunk in chunks for row in chunk.rows.tolist()]
    assert rows == [row for row, times in enumerate(run) if times]
    times = [time for chunk in chunks for time in chunk.times.tolist()]
    assert times == [time for request in requests for time in request.delivery_times]
    gaps = [gap for chunk in chunks for gap in chunk.gaps().tolist()]
    assert gaps == [gap for request in requests for gap in np.diff(request.delivery_times).tolist()]


@given(runs, runs)
def test_groups_are_views_of_the_whole(a: list[list[int]], b: list[list[int]]) -> None:
    groups = [[record([time / 10 for time in times]) for times in run] for run in (a, b)]
    total, views = grouped_samples(groups)

    for metric, values in total.items():
        assert values.tolist() == [value for view in views for value in view[metric].tolist()]
        assert all(np.shares_memory(view[metric], values) for view in views if view[metric].size)


def test_quantiles_copy_unless_told_otherwise() -> None:
    values = np.array([3.0, 1.0, 2.0, 5.0, 4.0])

    assert quantiles(values, [0, 50, 90, 100]) == pytest.approx([1.0, 3.0, 4.6, 5.0])
    assert values.tolist() == [3.0, 1.0, 2.0, 5.0, 4.0]
    assert quantiles(values, [50], overwrite=True) == [3.0]


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=60))
def test_describe_agrees_with_numpy(values: list[float]) -> None:
    result = describe(np.array(values), (99.0,))

    assert result.std_ms == pytest.approx(np.std(values) * 1e3, abs=1e-6)
    assert result.percentiles_ms["p99"] == pytest.approx(np.percentile(values, 99) * 1e3, abs=1e-6)
    assert result.max_ms == max(values) * 1e3


def test_classes_have_summaries_of_their_own() -> None:
    fast, slow = SLO(ttft=0.5, tbt=0.1), SLO(ttft=5.0)
    requests = [
        record([0.4, 0.5], request_class="fast", slo=fast),
        record([0.6, 0.7], request_class="fast", slo=fast),
        record([4.0, 6.0], request_class="slow", slo=slow),
        record([], request_class="slow", slo=slow, fate=Fate.REJECTED, finish_reason=None),
        record([1.0]),
    ]

    result = summary_of(requests, duration=10.0, options=SummaryOptions(percentiles=(50,)))

    assert result["slo_mode"] == "stream"
    assert (result["offered"], result["completed"], result["rejected"]) == (5, 4, 1)
    assert result["attainment"] == pytest.approx(2 / 4)
    assert result["goodput"] == result["request_goodput"] == pytest.approx(0.2)
    assert list(result["classes"]) == ["fast", "slow"]
    fast_keys, slow_keys = result["classes"].values()
    assert (fast_keys["attainment"], slow_keys["attainment"]) == (0.5, 0.5)
    assert (fast_keys["slo_ttft_ms"], fast_keys["slo_tbt_ms"], fast_keys["slo_e2e_ms"]) == (500, 100, None)
    assert fast_keys["mean_ttft_ms"] == pytest.approx(500)
    assert slow_keys["max_itl_ms"] == pytest.approx(2000)
    assert slow_keys["rejected"] == 1
    assert result["mean_ttft_ms"] == pytest.approx((400 + 600 + 4000 + 1000) / 4)
    assert result["max_itl_ms"] == pytest.approx(2000)


def test_objectives_of_the_run_and_of_the_requests_are_both_counted() -> None:
    requests = [record([0.4], slo=SLO(ttft=0.5)), record([0.7], slo=SLO(ttft=0.5))]

    result = summary_of(requests, duration=1.0, options=SummaryOptions(objectives={"ttft": 1.0}))

    assert (result["request_goodput"], result["goodput"], result["attainment"]) == (2.0, 1.0, 0.5)


def test_a_completed_request_without_a_token_has_no_latency() -> None:
    result = summary_of([record([]), record([1.0, 2.0])], duration=2.0)

    assert result["completed"] == 2
    assert result["mean_ttft_ms"] == pytest.approx(1000)


def test_a_record_knows_how_long_it_waited() -> None:
    waited = record([1.0], scheduled=0.25)

    assert (waited.scheduling_delay, record([1.0]).scheduling_delay) == (0.25, None)
