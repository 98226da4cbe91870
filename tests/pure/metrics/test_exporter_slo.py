"""Objectives, refusals and plans as /metrics shows them."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import Overloaded, SLOUnattainable
from onbeat.core.protocols import StepOutputs
from onbeat.core.request import FinishReason
from onbeat.core.slo import SLO, Fate
from onbeat.core.step_stats import SchedulerState
from onbeat.metrics.histogram import Histogram
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.slo_counts import JUDGED_REQUESTS, MOST_RECENT, OUTCOMES, EndedRequest, SLOCounts
from tests.pure.metrics.fake_server import FakeServer
from tests.pure.metrics.runs import output, step
from tests.pure.metrics.test_exporter import samples


def metrics(server: FakeServer, now: float) -> dict[str, float]:
    return samples(server.text(now))


def outcomes(got: dict[str, float], slo_class: str = "chat") -> dict[str, float]:
    names = {
        outcome: f"onbeat_slo_requests_total{{outcome={outcome},slo_class={slo_class}}}"
        for outcome in OUTCOMES
    }
    return {outcome: got[name] for outcome, name in names.items() if got[name]}


def test_requests_are_judged_by_class() -> None:
    server = FakeServer()
    server.serve("in time", 0.0, [0.5, 0.6, 0.7])
    server.serve("late", 0.0, [1.5, 1.6])
    server.serve("loose", 0.0, [1.5, 1.6], slo=SLO(ttft=10.0), slo_class="batch")
    server.serve("nothing promised", 0.0, [50.0], slo=None, slo_class=None)
    server.serve("own terms", 0.0, [0.5], slo_class=None)
    got = metrics(server, 10.0)
    assert outcomes(got) == {"good": 1, "bad": 1}
    assert outcomes(got, "batch") == outcomes(got, "unnamed") == {"good": 1}
    assert got["onbeat_slo_attainment{slo_class=chat}"] == 0.5
    assert got["onbeat_goodput_requests_per_second{slo_class=chat}"] == 0.1
    assert got["onbeat_slo_objective_seconds{objective=tbt,slo_class=chat}"] == 0.1
    assert "onbeat_slo_objective_seconds{objective=tbt,slo_class=batch}" not in got
    assert got["onbeat_slo_time_to_first_token_seconds_count{slo_class=chat}"] == 2
    assert got["onbeat_slo_time_between_tokens_seconds_sum{slo_class=chat}"] == pytest.approx(0.3)
    assert not [name for name in got if "nothing" in name or "None" in name]


@pytest.mark.parametrize(("mode", "expected"), [("stream", "good"), ("gap", "bad")])
def test_the_mode_decides_what_in_time_means(mode, expected: str) -> None:
    server = FakeServer(slo_mode=mode)
    server.serve("stalls", 0.0, [0.1, 0.7])  # ahead of its deadlines, with one gap of 0.6 s
    assert outcomes(metrics(server, 1.0)) == {expected: 1}


def test_an_answer_that_is_not_streamed_has_no_gaps() -> None:
    server = FakeServer(slo_mode="gap")
    server.serve("whole", 0.0, [0.1, 0.7], is_streamed=False)
    assert outcomes(metrics(server, 1.0)) == {"good": 1}


def test_attainment_is_of_the_last_minute_and_counters_of_all_time() -> None:
    server = FakeServer()
    server.serve("late", 0.0, [2.0])
    server.serve("in time", 50.0, [0.5])
    assert metrics(server, 55.0)["onbeat_slo_attainment{slo_class=chat}"] == 0.5
    got = metrics(server, 100.0)
    assert got["onbeat_slo_attainment{slo_class=chat}"] == 1.0
    assert got["onbeat_goodput_requests_per_second{slo_class=chat}"] == pytest.approx(1 / 60)
    assert outcomes(got) == {"good": 1, "bad": 1}
    got = metrics(server, 200.0)
    assert "onbeat_slo_attainment{slo_class=chat}" not in got  # of nothing
    assert got["onbeat_goodput_requests_per_second{slo_class=chat}"] == 0


WORST = "onbeat_slo_attainment_worst_decile"
LONGEST_WAIT = "onbeat_slo_longest_wait_seconds"
WORST_PROMPTS = "onbeat_slo_worst_decile_prompt_tokens"


def test_the_worst_decile_of_the_last_minute_is_that_of_all_classes() -> None:
    server = FakeServer()
    for size in range(1, 19):
        server.serve(f"short {size}", 10.0, [0.5], num_prompt_tokens=size, slo_class="ab"[size % 2])
    assert WORST in metrics(server, 11.0)
    server.serve("long", 10.0, [0.9], num_prompt_tokens=300)
    server.open("longest", 10.0, num_prompt_tokens=400)
    step(
        server.tracker,
        StepOutputs(45.0, [output("longest", 0, finish_reason=FinishReason.EXPIRED, fate=Fate.EXPIRED)]),
    )
    got = metrics(server, 50.0)
    assert got[WORST] == 0.5
    assert (got[WORST_PROMPTS + "{bound=min}"], got[WORST_PROMPTS + "{bound=max}"]) == (300, 400)
    assert got[LONGEST_WAIT] == 35.0
    got = metrics(server, 90.0)  # one is left
    assert got[LONGEST_WAIT] == 35.0
    assert not [name for name in got if name.startswith((WORST, WORST_PROMPTS))]
    assert LONGEST_WAIT not in metrics(server, 200.0)


def test_requests_that_are_not_judged_are_in_no_decile() -> None:
    server = FakeServer()
    for size in range(1, 10):
        server.serve(f"r{size}", 0.0, [0.5], num_prompt_tokens=size)
    server.serve("nothing promised", 0.0, [5.0], num_prompt_tokens=99, slo=None, slo_class=None)
    server.open("left early", 0.0, num_prompt_tokens=100)
    server.tracker.close("left early", FinishReason.ABORT, 0.9)
    assert WORST not in metrics(server, 6.0)
    server.serve("tenth", 0.0, [0.5], num_prompt_tokens=10)
    got = metrics(server, 6.0)
    assert (got[WORST], got[LONGEST_WAIT]) == (1.0, 0.5)


def test_refusals_are_counted_by_reason_and_are_not_good() -> None:
    server = FakeServer()
    for name in ("a", "b", "c", "d", "e"):
        server.open(name, 1.0)
    too_long = Overloaded("a minute's wait", retry_after=3.0, reason="queue_too_long")
    server.tracker.refuse("d", too_long, 1.0)
    step(
        server.tracker,
        StepOutputs(2.0, [output("e", 0, finish_reason=FinishReason.EXPIRED, fate=Fate.OVERDUE)]),
    )
    server.tracker.refuse("a", SLOUnattainable("no", predicted_ttft=9.0), 1.0)
    server.tracker.refuse("b", Overloaded("full", retry_after=1.0), 1.0)
    step(
        server.tracker,
        StepOutputs(2.0, [output("c", 0, finish_reason=FinishReason.EXPIRED, fate=Fate.EXPIRED)]),
    )
    server.serve("in time", 2.0, [0.5])
    got = metrics(server, 3.0)
    for reason in ("slo_unattainable", "queue_full", "deadline_exceeded"):
        assert got[f"onbeat_requests_rejected_total{{reason={reason}}}"] == 1
    assert got["onbeat_requests_rejected_total{reason=queue_too_long}"] == 2
    assert outcomes(got) == {"good": 1, "rejected": 3, "expired": 2}
    assert got["onbeat_slo_attainment{slo_class=chat}"] == pytest.approx(1 / 6)
    assert got["onbeat_requests_total{finish_reason=rejected}"] == 3
    assert got["onbeat_requests_total{finish_reason=expired}"] == 2
    assert got["onbeat_requests_waiting"] == 0


@pytest.mark.parametrize(("left_at", "expected"), [(1.5, "abandoned"), (3.0, "bad")])
def test_a_caller_who_leaves_counts_against_the_server_only_once_it_was_late(left_at, expected) -> None:
    server = FakeServer()
    server.open("r", 1.0)
    server.tracker.close("r", FinishReason.ABORT, left_at)
    got = metrics(server, 4.0)
    assert outcomes(got) == {expected: 1}
    assert ("onbeat_slo_attainment{slo_class=chat}" in got) == (expected == "bad")


def test_plans_are_counted() -> None:
    server = FakeServer()
    state = SchedulerState(
        num_best_effort=3, num_relegated=5, num_missed=2, decode_slacks=[-0.15, 0.015, 0.045, 0.3]
    )
    common = {"num_running": 1, "scheduler": state}
    server.open("r", 0.0)
    for end in (1.04, 1.06):
        server.step(1.0, end, rows=[(10, 1), (0, 8)], budget_seconds=0.05, **common)
    server.step(1.5, 2.0)  # nothing bound it
    got = metrics(server, 2.0)
    expected = {
        "onbeat_step_budget_seconds_count": 2,
        "onbeat_step_budget_seconds_sum": 0.1,
        "onbeat_steps_over_budget_total": 1,
        "onbeat_chunk_tokens_total": 16,
        "onbeat_decode_slack_seconds_bucket{le=0.0}": 2,
        "onbeat_decode_slack_seconds_bucket{le=0.02}": 4,
        "onbeat_decode_slack_seconds_bucket{le=+Inf}": 8,
        "onbeat_requests_relegated_total": 5,
        "onbeat_requests_lost_total": 2,
        "onbeat_requests_best_effort": 1,  # no more than are open
        "onbeat_planner_seconds_count": 3,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)


NAMES = ("predicted_wait_seconds", "predicted_queue_seconds")


@pytest.mark.parametrize(("is_open", "expected"), [(True, [0.7, 9.0]), (False, [0.0, 0.0])])
def test_nobody_waits_where_no_request_is_open(is_open: bool, expected: list[float]) -> None:
    server = FakeServer()
    if is_open:
        server.open("r", 9.0)
    server.step(9.5, 10.0, scheduler=SchedulerState(predicted_wait=0.7, queue_seconds=9.0))
    got = metrics(server, 10.5)
    assert [got[f"onbeat_{name}"] for name in NAMES] == expected


def test_policies_without_deadlines_show_no_load() -> None:
    server = FakeServer()
    server.step(0.5, 1.0)
    got = metrics(server, 1.0)
    assert not {f"onbeat_{name}" for name in (*NAMES, "requests_relegated_total")} & got.keys()
    assert got["onbeat_step_budget_seconds_count"] == 0


@given(st.lists(st.floats(-3, 20)), st.lists(st.floats(-2, 12), min_size=1, unique=True).map(sorted))
def test_many_values_at_once_count_like_one_by_one(values: list[float], bounds: list[float]) -> None:
    together, apart = Histogram(bounds), Histogram(bounds)
    together.observe_many(values)
    for value in values:
        apart.observe(value)
    assert together.cumulative() == apart.cumulative()
    assert together.sum == pytest.approx(apart.sum)


@given(
    ends=st.lists(
        st.tuples(
            st.sampled_from(list(FinishReason)),
            st.lists(st.sampled_from([0.0, 0.05, 0.2, 0.9]), max_size=4),
        ),
        min_size=1,
        max_size=2 * JUDGED_REQUESTS,
    )
)
def test_requests_judged_together_have_the_outcomes_that_they_have_alone(ends) -> None:
    together, alone = SLOCounts(), Counter[str]()
    for reason, gaps in ends:
        times = array("d", (sum(gaps[: index + 1]) for index in range(len(gaps))))
        record = RequestRecord(
            request_id="a",
            arrival=0.0,
            num_prompt_tokens=5,
            slo=SLO(ttft=0.5, tbt=0.1),
            request_class="chat",
            delivery_times=times,
            delivery_sizes=array("I", [1] * len(times)),
            num_output_tokens=len(times),
            finish_reason=reason.value,
            end=4.0,
        )
        single = SLOCounts()
        for counts in (together, single):
            counts.on_finish(record)
        alone += +single.classes["chat"].outcomes
    assert +together.classes["chat"].outcomes == alone
    judged = alone.total() - alone["abandoned"]
    assert together.classes["chat"].judged_and_good(5.0) == (judged, alone["good"])
    assert together.classes["chat"].judged_and_good(64.1) == (0, 0)


def test_of_many_requests_of_late_the_last_are_looked_at() -> None:
    server = FakeServer()
    for number in range(MOST_RECENT + 100):
        server.serve(str(number), number * 1e-3, [0.5])
    got = metrics(server, 10.0)
    assert outcomes(got) == {"good": MOST_RECENT + 100}
    assert got["onbeat_goodput_requests_per_second{slo_class=chat}"] == (MOST_RECENT + 100) / 10
    assert len(server.counts.slo.recent(10.0)) == MOST_RECENT


def test_what_others_have_judged_is_forgotten_in_time_though_nobody_asks() -> None:
    counts = SLOCounts()
    for second in range(300):
        for late in (0.5, 0.0):  # of two front ends, each of which tells once a second
            counts.remember("chat", [EndedRequest(second - late, 5, 0.0, is_ttft=True, is_good=True)])
    kept = [each.end for each in counts.classes["chat"].last(1000)]
    assert kept == sorted(kept)
    assert len(kept) == 120
