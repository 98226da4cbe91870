"""Refusals and verdicts in what vLLM answers."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import SLOUnattainable
from onbeat.vllm.objectives import ROUTES
from onbeat.vllm.telemetry import (
    LATE,
    TOO_LONG,
    WRONG,
    Publisher,
    Refusal,
    RequestNews,
    refusal_by,
    refusal_in,
)
from tests.cpu.vllm.vllm_app import (
    ASK,
    BREAKS_OFF,
    CHAT,
    COMPLETIONS,
    EXPIRED,
    HEAD,
    MESSAGES,
    REFUSED,
    RESPONSES,
    STREAMS,
    VLLMApp,
    chat_chunk,
    chat_stream,
    chat_whole,
    client_of,
    data_events,
    event,
    response_object,
)


def refused_answers(path: str, text: str):
    """Yield how vLLM carries a refusal, by version, streamed and whole."""
    error = {"error": {"message": f"Request failed: {text}", "type": "ServiceUnavailable", "code": 503}}
    yield (503, error)
    yield [event(error), event("[DONE]")]
    if path == CHAT:
        yield chat_whole("abort", stop_reason=text)
        role, end = chat_chunk({"role": "assistant", "content": ""}), chat_chunk
        yield [role, end({"content": ""}, "abort", stop_reason=text), event("[DONE]")]
        yield [role, event(error), event("[DONE]")]
    if path == COMPLETIONS:
        choice = {"index": 0, "text": "", "finish_reason": "abort", "stop_reason": text}
        yield (200, {**HEAD, "choices": [choice]})
        yield [event({**HEAD, "choices": [choice]}), event("[DONE]")]
    if path == MESSAGES:
        start = STREAMS[MESSAGES]()[0]
        yield [start, event({"type": "error", "error": {"type": "internal_error", "message": text}}, "error")]
    if path == RESPONSES:
        begun = STREAMS[RESPONSES]()[:2]
        yield [*begun, event({"type": "error", "message": text}, "error")]


@pytest.mark.parametrize("path", sorted(ROUTES))
@pytest.mark.parametrize("text", [REFUSED, EXPIRED], ids=["429", "504"])
async def test_a_refusal_is_a_status_of_its_own_streamed_or_not(path, text):
    for num, answer in enumerate(refused_answers(path, text), 1):
        app = VLLMApp(lambda _, answer=answer: answer)
        client = client_of(app)
        reply = await client.post(path, json={**ASK, "stream": isinstance(answer, list)})
        error = reply.json()["error"]
        assert reply.headers["content-type"] == "application/json"
        if text == EXPIRED:
            assert (reply.status_code, error["code"]) == (504, "deadline_exceeded")
            continue
        assert (reply.status_code, error["code"]) == (429, "slo_unattainable")
        assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("3", "2500")
        assert reply.headers["x-onbeat-predicted-ttft-ms"] == "1250.0"
        assert error["slo"]["ttft_ms"] == 500
        metrics = (await client.get("/metrics")).text
        assert f'onbeat_requests_rejected_total{{reason="slo_unattainable"}} {num}.0' in metrics


async def test_behind_a_prefix_a_refusal_has_the_form_of_its_api():
    served = client_of(VLLMApp(lambda _: next(refused_answers(MESSAGES, REFUSED)))).served
    transport = httpx.ASGITransport(served, root_path="/api")
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
        reply = await client.post(f"/api{MESSAGES}", json=ASK)
    assert (reply.status_code, reply.json().get("type")) == (429, "error")


async def test_browsers_of_other_origins_can_read_a_refusal():
    app = VLLMApp(lambda _: list(refused_answers(CHAT, REFUSED))[1])

    async def with_origin(scope, receive, send) -> None:
        async def send_more(message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"access-control-allow-origin", b"*"))
            await send(message)

        await app(scope, receive, send_more)

    reply = await client_of(with_origin).post(CHAT, json={**ASK, "stream": True})
    assert (reply.status_code, reply.headers["content-type"]) == (429, "application/json")
    assert reply.headers["access-control-allow-origin"] == "*"


async def test_other_choices_of_a_refused_request_are_ended():
    refused = chat_chunk({"content": ""}, "abort", stop_reason=REFUSED)
    app, sent = VLLMApp(lambda _: [refused, *[chat_chunk({"content": "x"})] * 100]), []

    def pieces(raw: bytes):
        for piece in raw.split(b"\n\n"):
            sent.append(piece)
            yield piece + b"\n\n"

    app.cut = pieces
    reply = await client_of(app).post(CHAT, json={**ASK, "stream": True, "n": 2})
    assert reply.status_code == 429
    assert len(sent) < 5


async def test_wrong_objectives_are_400():
    text = Refusal(code=WRONG, reason="no such objective").text()
    reply = await client_of(VLLMApp(lambda _: (503, {"error": {"message": text}}))).post(CHAT, json=ASK)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_value")
    assert reply.json()["error"]["message"] == "no such objective"


async def test_an_objective_that_is_never_kept_is_refused_without_a_time():
    refusal = refusal_by(SLOUnattainable("not even when idle", predicted_ttft=0.05, retry_after=None))
    client = client_of(VLLMApp(lambda _: (503, {"error": {"message": refusal.text()}})))
    reply = await client.post(CHAT, json=ASK)
    assert (reply.status_code, reply.json()["error"]["reason"]) == (429, "out_of_reach_when_idle")
    assert "retry-after" not in reply.headers
    assert reply.headers["x-should-retry"] == "false"


async def test_too_long_a_queue_is_429_and_counted_apart():
    """503 stays vLLM's, for an engine that is not there: gateways take out a server that says it."""
    refusal = Refusal(code=TOO_LONG, predicted_ttft=70.0, retry_after=9.5)
    client = client_of(VLLMApp(lambda _: (503, {"error": {"message": refusal.text()}})))
    reply = await client.post(CHAT, json=ASK)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["reason"]) == (429, TOO_LONG, "queue_too_long")
    assert (reply.headers["retry-after"], error["predicted_ttft_ms"]) == ("10", 70_000)
    metrics = (await client.get("/metrics")).text
    assert 'onbeat_requests_rejected_total{reason="queue_too_long"} 1.0' in metrics


@pytest.mark.parametrize("path", sorted(ROUTES))
async def test_a_refusal_that_vllm_hides_is_told_by_the_scheduler(path, tmp_path, monkeypatch):
    """vLLM says nothing of a refusal in these APIs, or breaks off."""
    monkeypatch.setattr("onbeat.vllm.middleware.TOLD_SECONDS", 10.0)  # however busy the machine is
    empty = {
        RESPONSES: [
            (200, response_object("completed", [])),
            STREAMS[RESPONSES]()[:2],
            [*STREAMS[RESPONSES]()[:2], BREAKS_OFF],
        ],
        MESSAGES: [
            (200, {"type": "message", "content": [], "stop_reason": None}),
            [STREAMS[MESSAGES]()[0], event({"type": "message_delta", "delta": {"stop_reason": None}})],
        ],
    }.get(path, [chat_whole("abort"), [chat_chunk({"role": "assistant", "content": ""}), event("[DONE]")]])
    address = f"ipc://{tmp_path}/t"
    publisher = Publisher(address)
    for answer in empty:
        app = VLLMApp(lambda _, answer=answer: answer)

        async def tell(app=app) -> None:
            while True:
                if app.bodies:
                    slo_id = app.bodies[-1]["vllm_xargs"]["slo_id"]
                    refusal = Refusal(code=LATE, predicted_ttft=0.07, retry_after=1.0)
                    publisher.send(RequestNews(slo_id=slo_id, refusal=refusal))
                await asyncio.sleep(0.005)

        telling = asyncio.create_task(tell())
        client = client_of(app, {"telemetry": address})
        await client.get("/metrics")  # the subscriber is there
        await asyncio.sleep(0.2)
        reply = await client.post(path, json={**ASK, "stream": isinstance(answer, list)})
        telling.cancel()
        client.shared.close()
        assert reply.status_code == 429
        assert reply.json()["error"]["predicted_ttft_ms"] == 70.0
    publisher.close()


async def test_what_a_model_says_is_no_refusal():
    for answer in (
        chat_whole("stop", stop_reason=REFUSED),
        [chat_chunk({"content": REFUSED}), chat_chunk({}, "stop", stop_reason=REFUSED), event("[DONE]")],
    ):
        app = VLLMApp(lambda _, answer=answer: answer)
        assert (await client_of(app).post(CHAT, json=ASK)).status_code == 200


async def test_other_errors_of_vllm_stay_as_they_are():
    error = {"error": {"message": "the model overflows", "code": 500}}
    reply = await client_of(VLLMApp(lambda _: (500, error))).post(CHAT, json=ASK)
    assert (reply.status_code, reply.json()) == (500, error)
    stream = [*chat_stream()[:2], event(error), event("[DONE]")]
    reply = await client_of(VLLMApp(lambda _: stream)).post(CHAT, json=ASK)
    assert (reply.status_code, reply.content) == (200, b"".join(stream))


# --- verdicts out


@pytest.mark.parametrize("path", sorted(ROUTES))
async def test_the_last_event_has_the_verdict(path):
    stream = STREAMS[path]()
    app = VLLMApp(lambda _: stream)
    reply = await client_of(app).post(path, json={**ASK, "stream": True})
    events, sent = data_events(reply.content), data_events(b"".join(stream))
    with_verdict = [index for index, each in enumerate(events) if "slo" in (each | each.get("response", {}))]
    assert len(with_verdict) == 1
    last = events[with_verdict[0]]
    verdict = last.get("response", last).pop("slo")
    assert verdict["met"] is True
    assert (verdict["ttft_ms"] > 0, verdict["relegated"], verdict["predicted_ttft_ms"]) == (True, False, None)
    assert events == sent
    assert reply.content.count(b"\n\n") == b"".join(stream).count(b"\n\n")


async def test_where_usage_follows_it_has_the_verdict():
    app = VLLMApp(lambda _: chat_stream(usage=True))
    reply = await client_of(app).post(CHAT, json={**ASK, "stream": True})
    assert "slo" in data_events(reply.content)[-1]


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (CHAT, chat_whole()),
        (RESPONSES, (200, response_object("completed", [1]))),
        (MESSAGES, (200, {"type": "message", "content": [1], "stop_reason": "end_turn"})),
    ],
)
async def test_a_whole_answer_has_the_verdict(path, answer):
    reply = await client_of(VLLMApp(lambda _: answer)).post(path, json=ASK)
    body = reply.json()
    assert body.pop("slo")["met"] is True
    assert body == answer[1]
    assert int(reply.headers["content-length"]) == len(reply.content)


async def test_without_objectives_an_answer_is_vllms_to_the_byte():
    for answer in (chat_stream(), chat_stream(usage=True)):
        reply = await client_of(VLLMApp(lambda _, answer=answer: answer)).post(CHAT, json={"stream": True})
        assert reply.content == b"".join(answer)


async def test_a_late_answer_has_missed():
    app = VLLMApp(lambda _: chat_stream())

    def slowly(data: bytes):
        import time

        time.sleep(0.01)
        return [data]

    app.cut = slowly
    reply = await client_of(app).post(CHAT, json={"stream": True, "slo": {"ttft_ms": 1}})
    assert data_events(reply.content)[-1]["slo"]["met"] is False


@given(data=st.data())
@pytest.mark.parametrize("path", [*sorted(ROUTES), "refused"])
def test_it_does_not_matter_how_a_stream_is_cut_into_messages(path, data):
    stream = STREAMS.get(path, lambda: list(refused_answers(CHAT, REFUSED))[3])()
    raw = b"".join(stream)
    ends = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=8)))

    async def answer(cuts: list[int]) -> tuple[int, object]:
        app = VLLMApp(lambda _: stream)
        app.cut = lambda raw: [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        reply = await client_of(app).post(path if path in STREAMS else CHAT, json={**ASK, "stream": True})
        if reply.status_code != 200:
            return reply.status_code, reply.content
        events = data_events(reply.content)
        for each in events:
            verdict = each.get("response", each).pop("slo", None)
            assert verdict is None or verdict["met"]
        return reply.status_code, events

    assert asyncio.run(answer(ends)) == asyncio.run(answer([]))


@pytest.mark.parametrize(
    "stream",
    [
        [b"data: {\n\n", event("[DONE]")],
        [b"no event"],
        [event({"choices": 5}), event({"choices": [5, {"index": "x", "delta": 7}]}), event([1])],
        [event({"choices": [{"finish_reason": {"a": 1}, "index": 10**9}]}), event("[DONE]")],
        [event({"usage": 5, "choices": []}), event("[DONE]")],
        [b"\n\n\n\n", b":\n\n"],
        [event({"x": "y" * 2_000_000})],
    ],
)
async def test_whatever_vllm_sends_gets_through(stream):
    reply = await client_of(VLLMApp(lambda _: stream)).post(CHAT, json={"stream": True})
    assert (reply.status_code, reply.content) == (200, b"".join(stream))


@pytest.mark.parametrize("body", [5, [], {"choices": 5}, {"choices": [{"index": None}]}, {"error": 5}])
@pytest.mark.parametrize("path", sorted(ROUTES))
async def test_whatever_vllm_answers_gets_through(path, body):
    reply = await client_of(VLLMApp(lambda _: (200, body))).post(path, json={})
    assert (reply.status_code, reply.json()) == (200, body)


def test_what_is_told_of_a_refusal_reads_back():
    refusal = Refusal(code=LATE, predicted_ttft=float("inf"), retry_after=1.5)
    told = refusal_in(f"Error: {refusal.text()} (at 0x1)")
    assert told is not None
    assert (told.code, told.predicted_ttft, told.retry_after) == (LATE, None, 1.5)
    mark = refusal.text().partition("{")[0]
    for text in (mark, mark + "{", mark + '{"code": "x"}', mark + "[1]", json.dumps({}), None, 7):
        assert refusal_in(text) is None
