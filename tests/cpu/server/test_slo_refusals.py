"""Requests whose objectives cannot be kept: status, headers and body."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from onbeat.core.errors import Overloaded, SLOUnattainable
from tests.cpu.server.predicting_engine import PredictingEngine
from tests.cpu.server.running import HELLO, Served, parse_events
from tests.told import numbers
from tests.waiting import until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SLO: dict[str, Any] = {"ttft_ms": 500, "class": "interactive", "shed": True}


def shed(retry_after: float = 1.25, predicted_ttft: float = 0.8125) -> SLOUnattainable:
    return SLOUnattainable(
        "TTFT is predicted to be 812 ms, above the objective of 500 ms",
        predicted_ttft=predicted_ttft,
        retry_after=retry_after,
    )


@pytest.fixture
def engine() -> PredictingEngine:
    return PredictingEngine()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})])
async def test_shed_requests_get_429_and_the_prediction(
    served: Served, engine: PredictingEngine, path: str, body: dict[str, Any], stream: bool
) -> None:
    engine.refusals[""] = shed()
    answer = await served.post(path, {**body, "slo": SLO, "stream": stream})
    assert answer.status == 429
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["retry-after"] == "2"
    assert answer.headers["retry-after-ms"] == "1250"
    assert answer.headers["x-onbeat-predicted-ttft-ms"] == "812.5"
    assert answer.error == {
        "message": "TTFT is predicted to be 812 ms, above the objective of 500 ms",
        "type": "rate_limit_error",
        "param": "slo",
        "code": "slo_unattainable",
        "reason": "predicted_ttft_above_objective",
        "predicted_ttft_ms": 812.5,
        "slo": {"ttft_ms": 500.0, "tbt_ms": 50.0, "e2e_ms": None, "class": "interactive"},
    }


@pytest.mark.parametrize(
    ("seconds", "retry_after", "retry_after_ms"),
    [
        (0.0, "1", "1000"),
        (0.0001, "1", "1"),
        (1.0, "1", "1000"),
        (59.01, "60", "59010"),
        (math.inf, "86400", "86400000"),
        (math.nan, "1", "1000"),
    ],
)
async def test_retry_after_is_whole_seconds_of_at_least_one(
    served: Served, engine: PredictingEngine, seconds: float, retry_after: str, retry_after_ms: str
) -> None:
    engine.refusals[""] = shed(seconds)
    answer = await served.post(CHAT, {"messages": HELLO, "slo": SLO})
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == (retry_after, retry_after_ms)


async def test_who_asks_for_what_is_never_kept_is_not_told_to_come_again(
    served: Served, engine: PredictingEngine
) -> None:
    engine.refusals[""] = SLOUnattainable("not even when idle", predicted_ttft=0.05, retry_after=None)
    answer = await served.post(CHAT, {"messages": HELLO, "slo": SLO})
    assert (answer.status, answer.error["code"]) == (429, "slo_unattainable")
    assert answer.error["reason"] == "out_of_reach_when_idle"
    assert answer.headers["x-should-retry"] == "false"
    assert not {"retry-after", "retry-after-ms"} & answer.headers.keys()
    client, num_asked = served.client.with_options(max_retries=5), len(engine.asked)
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(model="fake/model", messages=HELLO, extra_body={"slo": SLO})
    assert len(engine.asked) == num_asked + 1, "the official client does not repeat it"


@pytest.mark.parametrize("predicted", [math.inf, math.nan])
async def test_a_prediction_without_end_is_null(
    served: Served, engine: PredictingEngine, predicted: float
) -> None:
    engine.refusals[""] = shed(predicted_ttft=predicted)
    answer = await served.post(CHAT, {"messages": HELLO, "slo": SLO})
    assert (answer.status, answer.error["predicted_ttft_ms"]) == (429, None)
    assert "x-onbeat-predicted-ttft-ms" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_that_passes_in_the_queue_is_a_504(
    served: Served, engine: PredictingEngine, stream: bool
) -> None:
    engine.expires, engine.predicted_ttft = ("",), 0.4
    answer = await served.post(CHAT, {"messages": HELLO, "slo": SLO, "stream": stream})
    assert answer.status == 504
    error = answer.error
    assert (error["type"], error["code"]) == ("server_error", "deadline_exceeded")
    assert (error["reason"], error["predicted_ttft_ms"]) == ("ttft_out_of_reach_after_waiting", 400.0)
    assert numbers(error["message"]) == [600, 500]
    assert "finish_reason" not in answer.body.decode()
    assert "retry-after" not in answer.headers  # nobody knows


async def test_an_engine_that_raises_for_a_passed_deadline_is_a_504_too(
    served: Served, engine: PredictingEngine
) -> None:
    engine.refusals[""] = SLOUnattainable(
        "late", predicted_ttft=0.4, retry_after=3.0, code="deadline_exceeded"
    )
    answer = await served.post(CHAT, {"messages": HELLO, "slo": SLO})
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "3000")


async def test_a_full_queue_is_a_503(served: Served, engine: PredictingEngine) -> None:
    engine.refusals[""] = Overloaded("8 requests wait, the limit", code="server_overloaded")
    answer = await served.post(CHAT, {"messages": HELLO, "slo": SLO})
    assert answer.status == 503
    assert (answer.error["type"], answer.error["code"]) == ("server_error", "server_overloaded")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_queue_that_is_too_long_is_a_503_that_says_when_there_is_room(
    served: Served, engine: PredictingEngine
) -> None:
    engine.refusals[""] = Overloaded("a minute's wait", code="server_overloaded", retry_after=2.25)
    answer = await served.post(CHAT, {"messages": HELLO})
    assert (answer.status, answer.error["code"]) == (503, "server_overloaded")
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2250")


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_waited_and_would_have_to_wait_for_too_long_is_a_503(
    served: Served, engine: PredictingEngine, stream: bool
) -> None:
    engine.expires, engine.room_in = ("",), 7.5
    answer = await served.post(CHAT, {"messages": HELLO, "slo": SLO, "stream": stream})
    assert (answer.status, answer.error["code"]) == (503, "server_overloaded")
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("8", "7500")


REFUSED = [("refusals", 429, "slo_unattainable"), ("expires", 504, "deadline_exceeded")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("how", "status", "code"), REFUSED)
async def test_one_refused_choice_refuses_the_request_and_aborts_the_others(
    served: Served, engine: PredictingEngine, how: str, status: int, code: str, stream: bool
) -> None:
    if how == "refusals":
        engine.refusals["-1"] = shed()
    else:
        engine.expires = ("-1",)
    engine.wait = 0.1  # the other choices have begun by then
    engine.script.seconds_per_step, engine.script.end = 0.01, False
    body = {"messages": HELLO, "slo": SLO, "n": 3, "max_tokens": 1000, "stream": stream}
    answer = await served.post(CHAT, body)
    assert (answer.status, answer.error["code"]) == (status, code)
    await until(lambda: not engine.running_ids)
    assert sorted(request_id[-2:] for request_id in engine.aborted) == ["-0", "-2"]


async def test_choices_that_may_not_be_refused_stream_as_they_come(
    served: Served, engine: PredictingEngine
) -> None:
    engine.refusals["-1"] = shed()
    engine.wait = 0.5  # the other choice has begun by then
    engine.script.seconds_per_step, engine.script.end = 0.01, False
    slo = {**SLO, "shed": False}
    body = {"messages": HELLO, "slo": slo, "n": 2, "max_tokens": 1000, "stream": True}
    answer = await served.post(CHAT, body)
    assert answer.status == 200
    *_, error, done = parse_events(answer.body)
    assert (error["error"]["code"], done) == ("slo_unattainable", "[DONE]")


async def test_choices_that_may_be_refused_arrive_whole(served: Served, engine: PredictingEngine) -> None:
    events = await served.events(CHAT, {"messages": HELLO, "slo": SLO, "n": 3})
    texts = ["", "", ""]
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == ["Hello, world!"] * 3


async def test_the_official_client_sees_the_refusal(served: Served, engine: PredictingEngine) -> None:
    engine.refusals[""] = shed()
    with pytest.raises(openai.RateLimitError) as refused:
        await served.client.chat.completions.create(
            model="fake/model", messages=HELLO, extra_body={"slo": SLO}
        )
    assert refused.value.code == "slo_unattainable"
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["predicted_ttft_ms"] == 812.5


async def test_refusals_are_counted(served: Served, engine: PredictingEngine) -> None:
    engine.refusals[""] = shed()
    await served.post(CHAT, {"messages": HELLO, "slo": SLO})
    engine.refusals.clear()
    engine.expires = ("",)
    await served.post(CHAT, {"messages": HELLO, "slo": SLO})
    metrics = (await served.get("/metrics")).body.decode()
    for outcome in ("rejected", "expired"):
        line = next(
            line
            for line in metrics.splitlines()
            if line.startswith("onbeat_slo_requests_total") and f'outcome="{outcome}"' in line
        )
        assert 'slo_class="interactive"' in line
        assert line.endswith(" 1.0")
