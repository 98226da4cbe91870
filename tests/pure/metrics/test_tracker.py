from __future__ import annotations

import math

import pytest

from onbeat.core.errors import InvalidRequest, Overloaded, RequestRejected, SLOUnattainable
from onbeat.core.protocols import StepOutputs
from onbeat.core.request import FinishReason
from onbeat.core.slo import SLO, Fate
from onbeat.core.step_stats import StepStats
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.tracker import RequestTracker, RunListener
from tests.pure.metrics.runs import output, request, run_one, step


class Recorder(RunListener):
    """Remembers what a listener hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.finished: list[RequestRecord] = []

    def on_request(self, record: RequestRecord) -> None:
        self.heard.append("request")

    def on_delivery(self, record: RequestRecord) -> None:
        self.heard.append(f"delivery {record.delivery_sizes[-1]}")

    def on_preemption(self, record: RequestRecord, now: float) -> None:
        self.heard.append("preemption")

    def on_relegation(self, record: RequestRecord, now: float) -> None:
        self.heard.append(f"relegation {now:g}")

    def on_refusal(self, record: RequestRecord, reason: str) -> None:
        self.heard.append(f"refusal: {reason}")

    def on_leave(self, record: RequestRecord) -> None:
        self.heard.append("leave")

    def on_finish(self, record: RequestRecord) -> None:
        self.heard.append("finish")
        self.finished.append(record)

    def on_step(self, stats: StepStats, replica: int = 0) -> None:
        self.heard.append("step")


def test_a_record_has_the_times_and_sizes_of_its_deliveries() -> None:
    recorder = Recorder()
    run_one(RequestTracker([recorder]))
    (record,) = recorder.finished
    assert list(record.delivery_times) == [12.0, 12.5, 13.5]
    assert list(record.delivery_sizes) == [1, 2, 1]
    assert (record.scheduled, record.first_token, record.ttft, record.end) == (11.0, 12.0, 2.0, 13.5)
    assert record.tpot == pytest.approx(1.5 / 3)
    assert (record.num_output_tokens, record.num_cached_tokens, record.num_preemptions) == (4, 4, 1)
    assert record.is_completed


def test_listeners_hear_things_in_order() -> None:
    recorder = Recorder()
    run_one(RequestTracker([recorder]))
    assert recorder.heard == [
        "request",
        *("step", "delivery 1"),
        *("step", "delivery 2"),
        *("step", "leave", "preemption", "delivery 1", "finish"),
    ]


def test_closing_ends_a_request_once() -> None:
    recorder = Recorder()
    tracker = RequestTracker([recorder])
    record = tracker.open(request("r", arrival=1.0))
    tracker.close("r", FinishReason.ABORT, 4.0)
    tracker.close("r", FinishReason.STOP, 5.0)
    step(tracker, StepOutputs(6.0, [output("r", finish_reason=FinishReason.ABORT)]))
    assert recorder.heard == ["request", "leave", "finish"]
    assert (record.finish_reason, record.e2e, record.ttft, record.tpot) == ("abort", 3.0, None, None)
    assert not record.is_completed


def test_outputs_of_unknown_requests_are_ignored() -> None:
    recorder = Recorder()
    step(RequestTracker([recorder]), StepOutputs(1.0, [output("stranger")]))
    assert recorder.heard == []


def test_an_open_record_has_no_end() -> None:
    record = RequestTracker().open(request("r", arrival=1.0))
    assert math.isnan(record.end)


def test_a_record_knows_what_was_promised() -> None:
    slo = SLO(ttft=0.5, tbt=0.05)
    promised = request("r", arrival=1.0, slo=slo, slo_class="interactive", tenant="a")
    record = RequestTracker().open(promised, is_streamed=False)
    assert (record.slo, record.request_class, record.is_streamed) == (slo, "interactive", False)
    assert record.tenant == "a"


def test_relegation_is_heard_once_and_the_prediction_is_kept() -> None:
    recorder = Recorder()
    tracker = RequestTracker([recorder])
    record = tracker.open(request("r", arrival=1.0))
    for now in (2.0, 3.0):
        predicted = 0.7 if now == 2.0 else None
        step(tracker, StepOutputs(now, [output("r", fate=Fate.RELEGATED, predicted_ttft=predicted)]))
    assert recorder.heard == ["request", "delivery 1", "relegation 2", "delivery 1"]
    assert (record.fate, record.predicted_ttft) == (Fate.RELEGATED, 0.7)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SLOUnattainable("too late", predicted_ttft=3.5, retry_after=1.0), "slo_unattainable"),
        (SLOUnattainable("was late", predicted_ttft=3.5, code="deadline_exceeded"), "deadline_exceeded"),
        (Overloaded("the queue is full", code="server_overloaded"), "queue_full"),
    ],
)
def test_a_refused_request_ends_with_its_reason(error: RequestRejected, reason: str) -> None:
    recorder = Recorder()
    tracker = RequestTracker([recorder])
    record = tracker.open(request("r", arrival=1.0))
    tracker.refuse("r", error, 1.5)
    tracker.close("r", FinishReason.ERROR, 2.0)
    assert recorder.heard == ["request", f"refusal: {reason}", "leave", "finish"]
    assert (record.finish_reason, record.is_rejected, record.end) == ("rejected", True, 1.5)
    assert record.predicted_wait == getattr(error, "predicted_ttft", None)


def test_a_request_that_no_server_takes_is_no_refusal() -> None:
    recorder = Recorder()
    tracker = RequestTracker([recorder])
    record = tracker.open(request("r", arrival=1.0))
    tracker.refuse("r", InvalidRequest("too long"), 1.5)
    assert recorder.heard == ["request", "leave", "finish"]
    assert (record.finish_reason, record.is_rejected) == ("error", False)


def test_a_request_that_expires_in_the_queue_was_never_scheduled() -> None:
    recorder = Recorder()
    tracker = RequestTracker([recorder])
    record = tracker.open(request("r", arrival=1.0))
    expired = output("r", 0, finish_reason=FinishReason.EXPIRED, fate=Fate.EXPIRED, scheduled_time=-1.0)
    step(tracker, StepOutputs(3.0, [expired]))
    assert recorder.heard == ["request", "leave", "refusal: deadline_exceeded", "finish"]
    assert (record.finish_reason, record.scheduled, record.end) == ("expired", None, 3.0)
