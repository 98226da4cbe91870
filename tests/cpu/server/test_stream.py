"""The exact shape of streams."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from onbeat import __version__
from onbeat.core.request import Request, SamplingParams
from onbeat.metrics.tracker import RequestTracker
from onbeat.server.answer_report import counts_up_to
from onbeat.server.choices import Choice, TextOptions
from onbeat.server.generation import Generator
from tests.cpu.server.running import HELLO, Served, parse_events
from tests.fakes_engine import EOS, ByteTokenizer, FakeEngine

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


def content(events: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for event in events[:-1]
        for choice in event.get("choices", ())
        if choice["index"] == index
    )


async def test_snapshot_of_a_chat_stream(served: Served, engine: FakeEngine) -> None:
    engine.script.text = "Hi"
    events = await served.events(CHAT, chat(stream_options={"include_usage": True}))
    assert events.pop() == "[DONE]"
    head = {key: events[0][key] for key in ("id", "created")}
    assert head["id"].startswith("chatcmpl-")
    head |= {
        "object": "chat.completion.chunk",
        "model": "fake/model",
        "system_fingerprint": f"onbeat-{__version__}",
    }

    def chunk(delta: dict[str, str], reason: str | None = None, **extra: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **extra}
        return {**head, "choices": [choice], "usage": None}

    usage = {
        "prompt_tokens": 20,
        "completion_tokens": 3,
        "total_tokens": 23,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    assert events == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "H"}),
        chunk({"content": "i"}),
        chunk({}, "stop", stop_reason=None),
        {**head, "choices": [], "usage": usage},
    ]


async def test_snapshot_of_a_text_stream(served: Served) -> None:
    events = await served.events(TEXT, {"prompt": "a", "max_tokens": 2})
    assert events.pop() == "[DONE]"
    head = {key: events[0][key] for key in ("id", "created")}
    assert head["id"].startswith("cmpl-")
    head |= {
        "object": "text_completion",
        "model": "fake/model",
        "system_fingerprint": f"onbeat-{__version__}",
    }
    first = {"index": 0, "text": "H", "logprobs": None, "finish_reason": None}
    last = {"index": 0, "text": "e", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert events == [{**head, "choices": [first]}, {**head, "choices": [last]}]


async def test_stream_headers(served: Served) -> None:
    answer = await served.post(CHAT, chat(stream=True))
    headers = answer.headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "openai-processing-ms" not in headers
    assert len(headers["x-request-id"]) == 32


async def test_continuous_usage_counts_up(served: Served, engine: FakeEngine) -> None:
    engine.script.text = "Hi"
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await served.events(CHAT, chat(stream_options=options))
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [0, 1, 2, 3, 3]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5])
async def test_no_character_is_split(served: Served, engine: FakeEngine, tokens_per_step: int) -> None:
    engine.script.text = "héllo 🌍 日本語 👩‍👩‍👧 x"
    engine.script.tokens_per_step = tokens_per_step
    events = await served.events(CHAT, chat())
    assert content(events) == engine.script.text
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert all(delta.get("content") for delta in deltas[1:-1]), "an empty delta"


async def test_a_lone_half_character_at_the_end_is_replaced(served: Served, engine: FakeEngine) -> None:
    engine.script.text = "aé"
    events = await served.events(CHAT, chat(max_tokens=2))
    assert content(events) == "a\ufffd"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("tokens_per_step", [1, 3, 7])
async def test_no_stop_string_leaks(served: Served, engine: FakeEngine, tokens_per_step: int) -> None:
    engine.script.text = "one two END three"
    engine.script.tokens_per_step = tokens_per_step
    events = await served.events(CHAT, chat(stop=["END", "nothing"], stream_options={"include_usage": True}))
    assert content(events) == "one two "
    last = events[-3]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "END")
    assert events[-2]["usage"]["completion_tokens"] == len("one two END")
    assert engine.aborted == [events[0]["id"]]
    assert engine.running_ids == set()


async def test_a_stop_string_ends_the_request_before_its_text_is_sent(engine: FakeEngine) -> None:
    tracker = RequestTracker()
    generator = Generator(engine, ByteTokenizer(), tracker)
    sampling = SamplingParams(max_tokens=100, stop_token_ids=(EOS,))
    choice = Choice(
        index=0,
        prompt_index=0,
        request=Request(request_id="r", prompt_token_ids=(1,), sampling=sampling),
        is_streamed=True,
    )
    async with aclosing(generator.run([choice], TextOptions(stop=(",",)))) as deltas:
        async for delta in deltas:
            if delta.finish_reason is not None:
                assert engine.aborted == ["r"]
                return
    pytest.fail("the choice did not finish")


async def test_a_possible_stop_string_is_let_go_when_it_is_none(served: Served, engine: FakeEngine) -> None:
    engine.script.text = "an EN is no end, nor is E"
    events = await served.events(CHAT, chat(stop="END"))
    assert content(events) == engine.script.text


async def test_the_stop_string_is_kept_on_request(served: Served, engine: FakeEngine) -> None:
    events = await served.events(CHAT, chat(stop=",", include_stop_str_in_output=True))
    assert content(events) == "Hello,"


async def test_no_stop_string_ends_the_answer_within_min_tokens(served: Served, engine: FakeEngine) -> None:
    engine.script.text = "a, b, c"
    for min_tokens, expected in [(0, "a"), (1, "a"), (2, "a, b")]:
        events = await served.events(CHAT, chat(stop=",", min_tokens=min_tokens))
        assert content(events) == expected


async def test_choices_are_streamed_side_by_side(served: Served, engine: FakeEngine) -> None:
    events = await served.events(CHAT, chat(n=3, seed=40, stream_options={"include_usage": True}))
    assert [content(events, index) for index in range(3)] == ["Hello, world!"] * 3
    roles = [event for event in events[:-2] if "role" in event["choices"][0]["delta"]]
    assert len(roles) == 3
    assert [request.sampling.seed for request in engine.requests] == [40, 41, 42]
    assert [request.request_id for request in engine.requests] == [f"{events[0]['id']}-{i}" for i in range(3)]
    usage = events[-2]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (20, 42)


async def test_token_ids_are_returned_on_request(served: Served) -> None:
    events = await served.events(TEXT, {"prompt": [72, 105], "max_tokens": 2, "return_token_ids": True})
    first, second = (event["choices"][0] for event in events[:-1])
    assert (first["prompt_token_ids"], first["token_ids"], second["token_ids"]) == ([72, 105], [72], [101])
    assert "prompt_token_ids" not in second


async def test_token_ids_of_a_chats_prompt_are_beside_its_choices(served: Served) -> None:
    body = chat(max_tokens=2, return_token_ids=True)
    events = (await served.events(CHAT, body))[:-1]
    whole = (await served.post(CHAT, body)).json
    assert bytes(whole["prompt_token_ids"]) == b"[user]hi\n[assistant]"
    assert [event.get("prompt_token_ids") for event in events] == [whole["prompt_token_ids"], None, None]
    assert all("prompt_token_ids" not in event["choices"][0] for event in [*events, whole])
    assert [event["choices"][0].get("token_ids") for event in events] == [None, [72], [101]]
    assert whole["choices"][0]["token_ids"] == [72, 101]


async def test_chat_logprobs_cover_all_shown_tokens(served: Served, engine: FakeEngine) -> None:
    engine.script.text = "é!"
    events = await served.events(CHAT, chat(logprobs=True, top_logprobs=2))
    entries = [
        entry
        for event in events[:-1]
        if (logprobs := event["choices"][0]["logprobs"])
        for entry in logprobs["content"]
    ]
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9], [0x21]]  # and none for the end token
    assert entries[2]["token"] == "!"
    assert entries[2]["logprob"] == pytest.approx(-0.5)
    assert [top["token"] for top in entries[2]["top_logprobs"]] == ["!", '"']


async def test_an_engine_error_ends_the_stream_with_an_event(served: Served, engine: FakeEngine) -> None:
    engine.script.error_after = 2
    events = await served.events(CHAT, chat(n=2))
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "engine_error"
    assert events[-2]["error"]["type"] == "server_error"
    assert content(events[:-1]) == "He"
    assert engine.running_ids == set(), "the other choice goes on for nobody"
    metrics = (await served.get("/metrics")).body.decode()
    assert 'onbeat_stream_errors_total{code="engine_error"} 1.0' in metrics


async def test_a_dying_engine_ends_streams_and_turns_health(served: Served, engine: FakeEngine) -> None:
    assert (await served.get("/health")).status == 200
    engine.script.die_after = 3
    events = await served.events(CHAT, chat(n=2))
    assert events[-2]["error"]["code"] == "engine_dead"
    health = await served.get("/health")
    assert (health.status, health.error["code"]) == (503, "engine_dead")
    assert (await served.get("/ready")).status == 503
    again = await served.post(CHAT, chat())
    assert (again.status, again.error["code"]) == (503, "engine_dead")


async def test_a_stream_that_fails_before_it_starts_has_a_status(served: Served, engine: FakeEngine) -> None:
    engine.script.error_after = 0
    answer = await served.post(CHAT, chat(stream=True))
    assert (answer.status, answer.error["code"]) == (500, "engine_error")


def test_parse_events_refuses_a_cut_stream() -> None:
    with pytest.raises(AssertionError):
        parse_events(b"data: {}\n")


async def test_continuous_usage_of_a_choice_counts_what_was_sent_of_it(engine: FakeEngine) -> None:
    """A choice that is ahead of a slow reader tells no tokens that are still to be sent."""
    generator = Generator(engine, ByteTokenizer(), RequestTracker())
    choices = [
        Choice(
            index=index,
            prompt_index=0,
            request=Request(request_id=f"r-{index}", prompt_token_ids=(1, 2)),
            is_streamed=True,
        )
        for index in range(2)
    ]
    num_sent = [0, 0]
    async with aclosing(generator.run(choices, TextOptions())) as deltas:
        async for delta in deltas:
            await asyncio.sleep(0.01)  # the others go on meanwhile
            num_sent[delta.choice.index] += len(delta.token_ids)
            assert counts_up_to(delta).output == num_sent[delta.choice.index]
    assert num_sent == [16, 16]
