from __future__ import annotations

import pytest

from onbeat.core.errors import SLOUnattainable
from onbeat.core.slo import SLO
from onbeat.core.step import DraftStats, SchedulerState
from onbeat.metrics.exposition import read_exposition
from onbeat.report.live_view import LATENCY_SECONDS, ServerHistory, is_onbeat
from tests.pure.metrics.fake_server import FakeServer

STARTED = 1000.0
"""When the server was started, as its own metrics say it."""


def look(history: ServerHistory, server: FakeServer, now: float, *, started: float = STARTED) -> None:
    own = f"process_start_time_seconds {started}\n"
    lines = [line for line in server.text(now).splitlines() if not line.startswith("process_start")]
    history.add(read_exposition(own + "\n".join(lines)), now)


def test_the_first_look_is_at_all_there_was() -> None:
    server, history = FakeServer(), ServerHistory()
    server.serve("a", 0.0, [0.5, 0.6])
    server.open("b", 1.0)
    look(history, server, 2.0)
    view = history.view(unix_time=STARTED + 10)
    assert (view.span, view.uptime) == (None, 10)
    assert (view.running, view.waiting) == (0, 1)
    assert (view.load.finished, view.load.arrivals) == pytest.approx((0.1, 0.2))
    assert view.load.output_tokens == pytest.approx(0.2)
    assert view.info == {"version": "0.2.0", "model": "tiny", "policy": "slo", "slo_mode": "stream"}
    assert (list(history.attainment), list(history.step_seconds)) == ([], [])


def test_rates_are_of_the_last_ten_seconds_and_percentiles_of_the_last_minute() -> None:
    server, history = FakeServer(), ServerHistory()
    look(history, server, 0.0)
    server.serve("slow", 0.0, [0.9, 0.95])
    server.step(0.0, 0.5, rows=[(10, 1)])
    for now in range(1, 41):
        look(history, server, float(now))
    server.serve("quick", 40.0, [0.09, 0.14])
    server.step(40.0, 40.1, rows=[(10, 1), (10, 1), (0, 32)], predicted_seconds=0.08, budget_seconds=0.09)
    look(history, server, 41.0)
    view = history.view(STARTED + 41)
    assert (view.span, view.latency_span) == (10, 41)
    assert view.load.finished == pytest.approx(0.1)
    assert (view.steps.decodes, view.steps.chunk_tokens) == (2, 32)
    assert (view.steps.seconds, view.steps.predicted) == pytest.approx((0.1, 0.08))
    assert view.steps.budget_p50 is not None
    assert 0.075 < view.steps.budget_p50 <= 0.1
    assert view.steps.over_budget == 1.0
    (chat,) = view.classes
    assert (chat.name, chat.attainment) == ("chat", 1.0)
    assert (chat.rate, chat.goodput) == pytest.approx((2 / 41, 2 / 41))
    assert chat.ttft.objective == 1.0
    assert chat.ttft.p50 is not None
    assert chat.ttft.p99 is not None
    assert chat.ttft.p50 <= 0.1 < 0.8 < chat.ttft.p99 <= 0.9  # both requests
    assert chat.tbt.objective == 0.1


def test_looks_older_than_a_minute_are_forgotten() -> None:
    server, history = FakeServer(), ServerHistory()
    look(history, server, 0.0)
    server.serve("old", 0.0, [0.5])
    for now in range(10, 200, 10):
        look(history, server, float(now))
    view = history.view(STARTED + 200)
    assert view.latency_span == LATENCY_SECONDS
    assert view.classes[0].ttft.p50 is None


def test_the_rates_and_the_attainment_of_a_class_are_of_one_time() -> None:
    server, history = FakeServer(), ServerHistory()
    for now in range(90):
        name = str(now)
        server.serve(name, float(now), [0.5 if now % 4 else 1.5])
        server.open(f"refused {now}", float(now))
        server.tracker.refuse(f"refused {now}", SLOUnattainable("no", predicted_ttft=5.0), now + 0.1)
        look(history, server, now + 0.9)
        (chat,) = history.view(STARTED + now).classes
        if now:
            assert chat.rate is not None
            assert chat.goodput is not None
            assert chat.attainment == pytest.approx(chat.goodput / chat.rate)
    assert (chat.rate, chat.goodput) == pytest.approx((2.0, 0.75), rel=0.03)


def test_classes_come_by_urgency() -> None:
    server, history = FakeServer(), ServerHistory()
    for name, slo in (("a", SLO(ttft=10.0)), ("b", SLO(e2e=5.0)), ("c", SLO(ttft=0.5, tbt=0.1))):
        server.serve(name, 0.0, [0.2], slo=slo, slo_class=f"class {name}")
    look(history, server, 1.0)
    names = [own.name for own in history.view(STARTED).classes]
    assert names == ["class c", "class a", "class b"]


def test_history_has_one_value_for_each_look() -> None:
    server, history = FakeServer(), ServerHistory()
    look(history, server, 0.0)
    server.serve("good", 0.0, [0.5])
    server.step(0.0, 0.25)
    look(history, server, 1.0)
    server.serve("late", 0.0, [1.5])
    look(history, server, 2.0)
    assert list(history.attainment) == [1.0, 0.5]
    assert list(history.step_seconds) == [0.25, None]


def test_decisions_are_counted_since_the_start() -> None:
    server, history = FakeServer(), ServerHistory()
    server.open("r", 0.0)
    server.tracker.refuse("r", SLOUnattainable("no", predicted_ttft=5.0), 0.1)
    state = SchedulerState(num_relegated=4, num_missed=2, predicted_wait=0.3)
    server.open("s", 0.0)
    server.step(0.0, 0.5, num_preemptions=1, num_running=0, num_waiting=1, scheduler=state)
    look(history, server, 1.0)
    view = history.view(STARTED)
    others = dict.fromkeys(("deadline_exceeded", "queue_too_long", "queue_full", "no_replica"), 0)
    assert view.refused == {"slo_unattainable": 1} | others
    assert (view.relegated, view.missed, view.preempted) == (4, 2, 1)
    assert view.load.predicted_wait == 0.3


@pytest.mark.parametrize("started", [STARTED, STARTED + 50])
def test_a_server_that_was_started_anew_begins_anew(started: float) -> None:
    server, history = FakeServer(), ServerHistory()
    server.serve("a", 0.0, [0.5])
    server.step(0.0, 0.5)
    look(history, server, 0.0)
    look(history, server, 1.0)
    look(history, FakeServer(), 50.0, started=started)  # the same start, but counters went back
    view = history.view(started + 5)
    assert (view.span, view.load.finished, view.classes) == (None, 0, ())


def test_metrics_of_others_are_told_apart() -> None:
    assert is_onbeat(read_exposition(FakeServer().text(0.0)))
    assert not is_onbeat(read_exposition('vllm:num_requests_running{model_name="m"} 1\n'))


def test_drafts_are_of_the_last_ten_seconds() -> None:
    server, history = FakeServer(proposer="ngram"), ServerHistory()
    look(history, server, 0.0)
    server.step(0.0, 0.5, drafts=DraftStats([0, 0, 1], [1, 1], [1, 1], num_tokens=3, expected_tokens=2.5))
    look(history, server, 1.0)
    for now in range(2, 20):
        look(history, server, float(now))
    steps = DraftStats([2, 0, 0, 2], [2, 2, 1], [1, 1, 0], num_tokens=6, expected_tokens=5.0)
    server.step(19.0, 19.5, drafts=steps, predicted_seconds=0.4)
    look(history, server, 20.0)
    drafts = history.view(STARTED + 20).drafts
    assert drafts is not None
    assert (drafts.proposer, drafts.length, drafts.acceptance) == ("ngram", 1.5, 0.4)
    assert drafts.tokens_per_row == 1.5
    assert drafts.goodput == pytest.approx(9.0, rel=0.02)
    assert drafts.predicted_goodput == pytest.approx(12.5)


def test_a_server_that_does_not_speculate_has_no_drafts() -> None:
    server, history = FakeServer(), ServerHistory()
    server.step(0.0, 0.5)
    look(history, server, 1.0)
    assert history.view(STARTED + 1).drafts is None
