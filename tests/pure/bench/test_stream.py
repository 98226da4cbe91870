from __future__ import annotations

import orjson
import pytest

from onbeat.bench.record import PayloadBuilder
from onbeat.bench.stream import AnswerStream, StreamError


def event(message: object) -> bytes:
    return b"data: " + orjson.dumps(message) + b"\n\n"


def chat(content: str | None, finish: str | None = None) -> bytes:
    delta = {} if content is None else {"content": content}
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def test_only_text_is_a_delivery() -> None:
    stream = AnswerStream()
    stream.feed(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}), 1.0)
    stream.feed(chat("Hel"), 2.0)
    stream.feed(chat(""), 2.5)
    stream.feed(chat("lo") + chat("!"), 3.0)
    stream.feed(chat(None, "stop") + event({"choices": [], "usage": {"completion_tokens": 9}}), 4.0)
    stream.feed(b"data: [DONE]\n\n", 4.5)
    stream.finish(4.5)

    assert list(stream.delivery_times) == [2.0, 3.0, 3.0]
    assert "".join(stream.texts) == "Hello!"
    assert stream.usage == {"completion_tokens": 9}
    assert stream.finish_reason == "stop"


@pytest.mark.parametrize("key", ["content", "reasoning_content", "reasoning"])
def test_reasoning_counts_as_output(key: str) -> None:
    stream = AnswerStream()

    stream.feed(event({"choices": [{"delta": {key: "hm"}}]}), 1.0)

    assert list(stream.delivery_times) == [1.0]


def test_calls_of_tools_count_as_output() -> None:
    stream = AnswerStream()
    named = {"index": 0, "id": "c", "type": "function", "function": {"name": "find", "arguments": ""}}
    stream.feed(event({"choices": [{"delta": {"tool_calls": [named]}}]}), 1.0)
    stream.feed(
        event({"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}]}), 2.0
    )
    stream.feed(chat(None, "tool_calls") + event({"choices": [], "usage": {"completion_tokens": 11}}), 3.0)
    stream.finish(3.0)

    assert list(stream.delivery_times) == [1.0, 2.0]
    assert stream.texts == ["find", "{}"]
    assert stream.usage == {"completion_tokens": 11}


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (event({"error": {"message": "boom"}}), "error in stream"),
        (b"data: {broken\n\n", "malformed chunk"),
        (b"data: 5\n\n", "malformed chunk"),
        (event({"choices": [None]}), "malformed chunk"),
        (event({"choices": 5}), "malformed chunk"),
        (event({"choices": [{"delta": {"content": 5}}]}), "malformed chunk"),
        (event({"choices": [{"delta": "text"}]}), "malformed chunk"),
        (event({"object": "error", "message": "boom", "code": 500}), "error in stream"),
        (b'event: error\ndata: {"message": "boom"}\n\n', "error in stream"),
        (b"event: error\n\n", "error in stream"),
        (b'error: {"message": "boom"}\n\n', "error in stream"),
    ],
)
def test_bad_events_end_the_stream(data: bytes, cause: str) -> None:
    with pytest.raises(StreamError) as caught:
        AnswerStream().feed(data, 1.0)
    assert caught.value.cause == cause


@pytest.mark.parametrize(
    "data", [b'event: error\ndata: {"error": {"message": "boom"}}\n\n', b'error: {"message": "boom"}\n\n']
)
def test_an_event_that_is_an_error_says_what_the_server_said(data: bytes) -> None:
    with pytest.raises(StreamError, match=r"^boom$"):
        AnswerStream().feed(chat("a") + data, 1.0)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_server_gave_up_is_a_failure(reason: str) -> None:
    stream = AnswerStream()
    stream.feed(chat("a") + chat(None, reason) + b"data: [DONE]\n\n", 1.0)

    with pytest.raises(StreamError, match="after 1 chunks") as caught:
        stream.finish(1.0)
    assert caught.value.cause.startswith("ended")


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "hm"}],
        [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}],
        ["h", {"type": "text", "text": "m"}],
    ],
)
def test_text_in_parts_counts_as_output(content: list[object]) -> None:
    stream = AnswerStream()

    stream.feed(event({"choices": [{"delta": {"content": content}}]}), 1.0)

    assert stream.texts == ["hm"]


def test_usage_of_another_kind_is_passed_over() -> None:
    stream = AnswerStream()
    stream.feed(event({"choices": [], "usage": {"completion_tokens": 3}}), 1.0)
    stream.feed(event({"choices": [], "usage": 5}), 1.0)

    assert stream.usage == {"completion_tokens": 3}


def test_an_end_without_finish_reason_is_a_broken_stream() -> None:
    stream = AnswerStream()
    stream.feed(chat("a"), 1.0)

    with pytest.raises(StreamError, match="after 1 chunks") as caught:
        stream.finish(2.0)
    assert caught.value.cause == "broken stream"


def test_an_answer_without_text_is_a_failure() -> None:
    stream = AnswerStream()
    stream.feed(chat(None, "stop") + b"data: [DONE]\n\n", 1.0)

    with pytest.raises(StreamError) as caught:
        stream.finish(1.0)
    assert caught.value.cause == "no text"


def test_bodies_of_both_apis() -> None:
    chat_body = orjson.loads(PayloadBuilder(api="chat", model="m").build("hi", 5))
    completion = orjson.loads(
        PayloadBuilder(api="completions", model="m", extra={"top_k": 3, "max_tokens": 9}).build("hi", 5)
    )

    assert chat_body["messages"] == [{"role": "user", "content": "hi"}]
    assert chat_body["stream_options"] == {"include_usage": True}
    assert completion["prompt"] == "hi"
    assert (completion["top_k"], completion["max_tokens"]) == (3, 9)
