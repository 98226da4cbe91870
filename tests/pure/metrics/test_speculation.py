"""Drafts in metrics, in records and in the timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.protocols import StepOutputs
from onbeat.core.request import FinishReason
from onbeat.core.step_stats import DraftStats
from onbeat.metrics.counts import RunCounts
from onbeat.metrics.exporter import MetricsExporter
from onbeat.metrics.histogram import AT_ONCE, Histogram
from onbeat.metrics.timeline import open_timeline
from onbeat.metrics.tracker import RequestTracker
from tests.pure.metrics.runs import output, request, stats, step
from tests.pure.metrics.test_exporter import shown_by

STEP = DraftStats(
    lengths=[1, 0, 2, 1], drafted_at=[3, 3, 1], accepted_at=[2, 1, 0], num_tokens=7, expected_tokens=6.5
)
"""Rows with 0, 2, 2 and 3 drafts, of which 2, 1 and 0 were accepted, so that they delivered 1 + 3 + 2 + 1."""
SHORT = DraftStats(lengths=[0, 1], drafted_at=[1], accepted_at=[1], num_tokens=2, expected_tokens=1.5)


def shown(*steps: DraftStats | None, **exporter: Any) -> dict[str, float]:
    """Return the metrics after steps of half a second that were to take 0.4 s."""
    counts = RunCounts()
    for drafts in steps:
        counts.on_step(stats(10.0, 10.5, predicted_seconds=0.4, drafts=drafts))
    return shown_by(MetricsExporter(counts, model_name="m", **exporter))


def test_drafts_are_counted_by_proposer_and_position() -> None:
    got = shown(STEP, SHORT, proposer="ngram")
    assert {name: got[name] for name in got if name.startswith("onbeat_spec") and "bucket" not in name} == {
        "onbeat_spec_drafts_total{proposer=ngram}": 4,
        "onbeat_spec_draft_tokens_total{proposer=ngram}": 8,
        "onbeat_spec_accepted_tokens_total{proposer=ngram}": 4,
        "onbeat_spec_delivered_tokens_total{proposer=ngram}": 9,
        "onbeat_spec_expected_tokens_total{proposer=ngram}": 8,
        "onbeat_spec_draft_tokens_at_position_total{position=0,proposer=ngram}": 4,
        "onbeat_spec_draft_tokens_at_position_total{position=1,proposer=ngram}": 3,
        "onbeat_spec_draft_tokens_at_position_total{position=2,proposer=ngram}": 1,
        "onbeat_spec_accepted_tokens_at_position_total{position=0,proposer=ngram}": 3,
        "onbeat_spec_accepted_tokens_at_position_total{position=1,proposer=ngram}": 1,
        "onbeat_spec_accepted_tokens_at_position_total{position=2,proposer=ngram}": 0,
        "onbeat_spec_draft_length_count{proposer=ngram}": 5,
        "onbeat_spec_draft_length_sum{proposer=ngram}": 8,
    }
    buckets = [got[f"onbeat_spec_draft_length_bucket{{le={k}.0,proposer=ngram}}"] for k in range(4)]
    assert buckets == [1, 2, 4, 5]


def test_a_server_that_speculates_shows_so_before_the_first_draft() -> None:
    got = shown(proposer="draft-model", aliases="vllm")
    assert got["onbeat_spec_drafts_total{proposer=draft-model}"] == 0
    assert got["vllm:spec_decode_num_drafts_total"] == 0


def test_nothing_is_shown_where_nothing_is_speculated() -> None:
    assert not [name for name in shown(None, aliases="vllm") if "spec" in name]


def test_vllms_names_count_the_same() -> None:
    got = shown(STEP, SHORT, proposer="ngram", aliases="vllm")
    assert {name: value for name, value in got.items() if name.startswith("vllm:spec")} == {
        "vllm:spec_decode_num_drafts_total": 4,
        "vllm:spec_decode_num_draft_tokens_total": 8,
        "vllm:spec_decode_num_accepted_tokens_total": 4,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=0}": 3,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=1}": 1,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=2}": 0,
    }


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 9))))
def test_a_value_counts_as_often_as_it_was_seen(values: list[tuple[float, int]]) -> None:
    at_once, one_by_one = Histogram((0, 1, 2, 4, 8)), Histogram((0, 1, 2, 4, 8))
    for value, times in values:
        at_once.observe_many([value] * times)
        for _ in range(times):
            one_by_one.observe(value)
            assert one_by_one.count == one_by_one.cumulative()[-1][1]  # whoever reads sees it
    assert at_once.cumulative() == one_by_one.cumulative()
    assert at_once.sum == pytest.approx(one_by_one.sum)


def test_what_waits_to_be_counted_does_not_grow() -> None:
    histogram = Histogram((1.0,))
    for _ in range(5000):
        histogram.observe(0.5)
    assert len(histogram._new) < AT_ONCE
    assert histogram.as_dict() == {"bounds": (1.0,), "counts": [5000, 0], "sum": 2500.0}


def test_tokens_behind_the_end_of_an_answer_are_not_the_requests() -> None:
    """The engine ends the request by its length; its answer ended with a stop string before that."""
    counts = RunCounts()
    tracker = RequestTracker([counts])
    record = tracker.open(request("r", arrival=0.0))
    step(tracker, StepOutputs(1.0, [output("r", 4)]))
    last = output("r", 3, finish_reason=FinishReason.LENGTH)
    tracker.on_step(StepOutputs(2.0, [last]))
    assert (counts.num_open, record.finish_reason) == (0, None), "the engine does not decide"
    tracker.deliver(last, 2.0, 1, made=2.0)
    tracker.close("r", FinishReason.STOP, 2.0)
    tracker.deliver(output("r", 2), 3.0, 2, made=3.0)  # too late
    assert (record.delivery_times.tolist(), record.delivery_sizes.tolist()) == ([1.0, 2.0], [4, 1])
    assert record.num_output_tokens == counts.output_lengths.sum == counts.num_output_tokens == 5
    assert (record.finish_reason, counts.finished["stop"], counts.finished["length"]) == ("stop", 1, 0)
    assert counts.num_open == 0


def test_gaps_lie_between_deliveries_and_tpot_is_by_tokens() -> None:
    counts = RunCounts()
    tracker = RequestTracker([counts])
    tracker.open(request("r", arrival=0.0))
    for now, size in ((1.0, 1), (2.0, 4), (3.0, 2)):
        reason = FinishReason.LENGTH if now == 3.0 else None
        step(tracker, StepOutputs(now, [output("r", size, finish_reason=reason)]))
    assert (counts.gap.count, counts.gap.sum) == (2, 2.0)
    assert counts.tpot.sum == pytest.approx(2.0 / 6)


def test_the_timeline_shows_what_was_planned_and_accepted(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with open_timeline(path) as timeline:
        timeline.on_step(stats(4.0, 4.02, drafts=STEP))
        timeline.on_step(stats(4.02, 4.04))
    events = orjson.loads(path.read_bytes())
    first, second = (event["args"] for event in events if event["name"] == "step")
    drafts = {"drafts_planned": 7, "drafts_verified": 7, "drafts_accepted": 3}
    assert {name: first[name] for name in drafts} == drafts
    assert not drafts.keys() & second.keys()
    (levels,) = (event for event in events if event["name"] == "draft tokens")
    assert (levels["ph"], levels["ts"], levels["args"]) == ("C", 4e6, drafts)
