"""What paths, sizes, the engine and bugs are answered with; `test_errors` has the fields."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from onbeat.core.errors import InvalidRequest, Overloaded, PromptTooLong
from tests.cpu.server.asking import CHAT, JSON, TEXT, check
from tests.cpu.server.running import HELLO, Served, serving
from tests.fakes_engine import FakeEngine, Script
from tests.many_cases import each_case


@pytest.mark.parametrize("depth", [500, 1020, 60_000])
async def test_deep_nesting(served: Served, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    for body in (
        '{"prompt": %s}',
        '{"prompt": "a", "stop": %s}',
        '{"prompt": "a", "tools": %s}',
        '{"messages": [{"role": "user", "content": %s}]}',
        '{"messages": [{"role": "user", "content": "show"}], "chat_template_kwargs": {"shown": %s}}',
    ):
        path = CHAT if "messages" in body else TEXT
        answer = await served.post(path, data=(body % deep).encode(), headers=JSON)
        assert answer.status in (200, 400) if "shown" in body else answer.status == 400, answer.body
        assert len(answer.body) < 2000 or answer.status == 200


async def test_too_long_prompts(served: Served) -> None:
    exact = {"prompt": [1] * 2000, "max_tokens": 48}
    assert (await served.post(TEXT, exact)).status == 200
    for fields, path in (
        ({"prompt": [1] * 2000, "max_tokens": 49}, TEXT),
        ({"prompt": [1] * 2048}, TEXT),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, CHAT),
        ({"messages": HELLO, "max_completion_tokens": 2048}, CHAT),
    ):
        answer = await served.post(path, fields)
        check(answer, 400, "context_length_exceeded", "prompt" if path == TEXT else "messages")


async def test_a_huge_text_is_refused_without_tokenizing_it(served: Served) -> None:
    message = check(
        await served.post(TEXT, {"prompt": "x" * 9_000_000}), 400, "context_length_exceeded", "prompt"
    )
    assert "at least" in message


@pytest.mark.parametrize(
    ("field", "value", "neutral"), [("min_p", 0.1, 0.0), ("logit_bias", {"65": 1.0}, {}), ("min_p", 1, None)]
)
async def test_what_the_engine_would_leave_out_is_refused_at_the_request(
    served: Served, engine: FakeEngine, field: str, value: Any, neutral: Any
) -> None:
    engine.left_out = {"min_p": "its drafts forbid it", "logit_bias": "its drafts forbid it"}
    for path, asked in (
        (TEXT, {"prompt": "a"}),
        (CHAT, {"messages": HELLO}),
        (CHAT, {"messages": HELLO, "n": 2}),
    ):
        answer = await served.post(path, {**asked, field: value})
        assert "its drafts forbid it" in check(answer, 400, "unsupported_parameter", field)
        assert (await served.post(path, {**asked, field: neutral})).status == 200


async def test_what_the_engine_refuses_keeps_its_status(served: Served, engine: FakeEngine) -> None:
    for error, status, code in (
        (InvalidRequest("no", param="prompt"), 400, "invalid_value"),
        (PromptTooLong("larger than the KV cache"), 400, "context_length_exceeded"),
    ):
        engine.script = Script(reject=error)
        check(await served.post(TEXT, {"prompt": "a", "stream": True}), status, code, "prompt")
    for path, param in ((CHAT, "messages"), ("/v1/responses", "input"), ("/v1/embeddings", "input")):
        body = {param: HELLO if path == CHAT else "a"}
        check(await served.post(path, body), 400, "context_length_exceeded", param)
    engine.script = Script(reject=Overloaded("the queue is full"))
    answer = await served.post(TEXT, {"prompt": "a"})
    check(answer, 503, "server_overloaded")
    assert int(answer.headers["Retry-After"]) >= 1


async def test_unknown_model_path_and_method(served: Served) -> None:
    check(await served.post(TEXT, {"prompt": "a", "model": "gpt-4"}), 404, "model_not_found", "model")
    check(await served.get("/v1/models/gpt-4"), 404, "model_not_found", "model")
    check(await served.get("/v2/other"), 404, "not_found")
    answer = await served.get(CHAT)
    check(answer, 405, "method_not_allowed")
    assert answer.headers["Allow"] == "POST"
    assert answer.json["error"]["message"].endswith("POST")


@pytest.mark.parametrize("path", ["/v1/embeddingsx", "/v1", "/api/chat", "/v1/completion"])
async def test_other_paths_are_not_there(served: Served, path: str) -> None:
    error = (await served.get(path)).error
    assert (error["code"], "GET /docs" in error["message"]) == ("not_found", True)


@each_case(
    ("bias", "said"),
    [
        ({"a": 1, "5": 1, "-1": 1}, "logit_bias has the keys 'a', '-1';"),
        ({f"k{i}": 1 for i in range(9)}, "'k0', 'k1', 'k2', 'k3' and 5"),
        ({"x": 1}, "logit_bias has the key 'x';"),
        ({"5": 101, "6": "a", "7": 1}, "logit_bias has 101, 'a' for '5', '6'; it takes numbers from -100"),
        ({"5": 1, "90000": 1, "90001": 1}, "logit_bias holds the token ids 90000, 90001,"),
    ],
)
async def test_a_few_bad_entries_of_logit_bias_are_named(
    served: Served, bias: dict[str, object], said: str
) -> None:
    answer = await served.post(TEXT, {"prompt": "a", "logit_bias": bias})
    check(answer, 400, "invalid_value", "logit_bias")
    assert said in answer.error["message"]


async def test_errors_are_answered_without_threads(served: Served) -> None:
    before = threading.active_count()
    answers = await asyncio.gather(*(served.get("/no/such/path") for _ in range(40)))
    assert {answer.status for answer in answers} == {404}
    assert threading.active_count() == before


async def test_a_base_model_has_no_chat(engine: FakeEngine) -> None:
    async with serving(engine, template=None) as served:
        message = check(await served.post(CHAT, {"messages": HELLO}), 400, "no_chat_template")
        assert "chat template" in message
        assert (await served.post(TEXT, {"prompt": "a"})).status == 200


async def test_priority_is_accepted_where_it_has_an_effect() -> None:
    engine = FakeEngine(priority_scheduling=True)
    async with serving(engine) as served:
        assert (await served.post(TEXT, {"prompt": "a", "priority": -3})).status == 200
    assert engine.requests[0].priority == -3


@pytest.mark.parametrize("served", [{"max_body_bytes": 1000}], indirect=True)
async def test_large_bodies_with_and_without_a_length(served: Served) -> None:
    body = b'{"prompt": "%b"}' % (b"x" * 2000)
    check(await served.post(TEXT, data=body, headers=JSON), 413, "request_too_large")

    async def chunks() -> Any:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    check(await served.post(TEXT, data=chunks(), headers=JSON), 413, "request_too_large")
    assert (await served.post(TEXT, {"prompt": "x" * 900})).status == 200


async def test_a_body_over_the_default_limit(served: Served) -> None:
    check(await served.post(TEXT, {"prompt": "x" * 11_000_000}), 413, "request_too_large")


async def test_bugs_are_logged_and_not_shown(
    served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(request: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(engine, "generate", broken)
    with caplog.at_level(logging.ERROR, "onbeat.server"):
        answer = await served.post(TEXT, {"prompt": "a"})
    message = check(answer, 500, "internal_error")
    assert "secret" not in message
    assert "ZeroDivisionError" in caplog.text


async def test_bugs_in_mid_stream_end_the_stream(
    served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = engine.generate

    async def broken(request: Any) -> Any:
        async for delivery in real(request):
            yield delivery
            raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(engine, "generate", broken)
    events = await served.events(TEXT, {"prompt": "a"})
    assert (events[-2]["error"]["code"], events[-1]) == ("internal_error", "[DONE]")
    assert "secret" not in str(events)
    assert "ZeroDivisionError" in caplog.text
