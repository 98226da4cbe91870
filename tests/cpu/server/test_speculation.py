"""Several tokens in one delivery, and what answers say of the drafts behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.cpu.server.running import HELLO, Served, serving
from tests.fakes_engine import FakeEngine, Script

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NUM_TOKENS = len("Hello, world!") + 1
"""With the end token: deliveries of 4, 4, 4 and 2."""


@pytest.fixture
def engine() -> FakeEngine:
    """Verifies five drafts at each step and accepts three."""
    return FakeEngine(Script(tokens_per_step=4, drafts_per_step=5))


@pytest.fixture
async def served(engine: FakeEngine) -> AsyncIterator[Served]:
    async with serving(engine) as running:
        yield running


def details(usage: Any) -> tuple[int, int]:
    """Return accepted and rejected prediction tokens, as the official client reads them."""
    found = usage.completion_tokens_details
    return found.accepted_prediction_tokens, found.rejected_prediction_tokens


async def test_usage_counts_drafts_that_are_in_the_answer(served: Served) -> None:
    chat = await served.client.chat.completions.create(model="fake/model", messages=HELLO)
    assert chat.usage is not None
    assert chat.usage.completion_tokens == NUM_TOKENS
    # Of the last delivery, two tokens were left of the three drafts that were accepted.
    assert details(chat.usage) == (3 + 3 + 3 + 2, 4 * 5 - 11)
    text = await served.client.completions.create(model="fake/model", prompt="x", max_tokens=9)
    assert text.usage is not None
    assert (text.usage.completion_tokens, *details(text.usage)) == (9, 3 + 3 + 1, 3 * 5 - 7)


async def test_choices_add_up(served: Served) -> None:
    chat = await served.client.chat.completions.create(model="fake/model", messages=HELLO, n=3)
    assert chat.usage is not None
    assert (chat.usage.completion_tokens, *details(chat.usage)) == (3 * NUM_TOKENS, 33, 27)


async def test_streams_tell_at_their_end(served: Served) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chat = await served.client.chat.completions.create(model="fake/model", messages=HELLO, n=2, **options)
    text = await served.client.completions.create(model="fake/model", prompt="x", max_tokens=9, **options)
    assert details([chunk async for chunk in chat][-1].usage) == (22, 18)
    assert details([chunk async for chunk in text][-1].usage) == (7, 8)


async def test_continuous_usage_counts_drafts_up(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await served.events(TEXT, {"prompt": "x", "max_tokens": 9, "stream_options": options})
    usages = [event["usage"]["completion_tokens_details"] for event in events[:-1]]
    assert [usage["accepted_prediction_tokens"] for usage in usages] == [3, 6, 7, 7]
    assert [usage["rejected_prediction_tokens"] for usage in usages] == [2, 4, 8, 8]


async def test_without_speculation_nothing_was_predicted(served: Served, engine: FakeEngine) -> None:
    engine.script.drafts_per_step = 0
    chat = await served.client.chat.completions.create(model="fake/model", messages=HELLO)
    assert chat.usage is not None
    assert details(chat.usage) == (0, 0)


async def test_a_delivery_is_one_event(served: Served) -> None:
    events = await served.events(CHAT, {"messages": HELLO})
    texts = [event["choices"][0]["delta"].get("content") for event in events[1:-1]]
    assert texts == ["Hell", "o, w", "orld", "!"]


@pytest.mark.parametrize("stop", [",", "o, w", "l"])
async def test_nothing_behind_a_stop_string_is_counted(served: Served, engine: FakeEngine, stop: str) -> None:
    """The delivery that completes it brings more tokens, some of them accepted drafts."""
    body = {"prompt": "x", "max_tokens": 50, "stop": stop, "logprobs": 1, "return_token_ids": True}
    answer = (await served.post(TEXT, body)).json
    text = engine.script.text
    num_tokens = text.index(stop) + len(stop)
    choice, usage = answer["choices"][0], answer["usage"]
    assert (choice["text"], choice["stop_reason"]) == (text[: text.index(stop)], stop)
    assert choice["token_ids"] == list(text[:num_tokens].encode())
    assert choice["logprobs"]["tokens"] == list(text[:num_tokens])
    assert len(choice["logprobs"]["token_logprobs"]) == usage["completion_tokens"] == num_tokens
    num_deliveries = -(-num_tokens // 4)
    num_accepted = 3 * (num_deliveries - 1) + min(3, num_tokens - 4 * (num_deliveries - 1))
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": num_accepted,
        "rejected_prediction_tokens": 5 * num_deliveries - num_accepted,
    }
    metrics = (await served.get("/metrics")).body.decode()
    assert f"onbeat_request_output_tokens_sum {num_tokens}.0" in metrics


async def test_streamed_logprobs_end_with_the_stop_string(served: Served) -> None:
    body = {"messages": HELLO, "stop": "o, w", "logprobs": True, "include_stop_str_in_output": True}
    events = await served.events(CHAT, body)
    choices = [event["choices"][0] for event in events[:-1]]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello, w"
    assert "".join(entry["token"] for entry in entries) == "Hello, w"


async def test_a_stop_token_inside_the_deliverys_drafts_is_not_shown(served: Served) -> None:
    body = {"messages": HELLO, "stop_token_ids": [ord("o")], "logprobs": True, "return_token_ids": True}
    answer = (await served.post(CHAT, body)).json
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("Hell", ord("o"))
    assert (choice["token_ids"], len(choice["logprobs"]["content"])) == (list(b"Hello"), 5)
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 3 + 1


async def test_each_token_of_a_delivery_has_its_own_deadline(served: Served, engine: FakeEngine) -> None:
    """Four tokens every 200 ms are one every 50 ms: they hold 100 ms, though gaps are longer."""
    engine.script.seconds_per_step = 0.2
    body = {"prompt": "x", "max_tokens": 8, "slo": {"tbt_ms": 100}}
    slo = (await served.post(TEXT, {**body, "stream": True})).body.decode()
    assert '"met":true' in slo
    assert '"token_attainment":1.0' in slo


async def test_metrics_are_labelled_with_the_proposer(served: Served) -> None:
    await served.post(CHAT, {"messages": HELLO})
    text = (await served.get("/metrics")).body.decode()
    for line in (
        'onbeat_spec_drafts_total{proposer="ngram"} 4.0',
        'onbeat_spec_draft_tokens_total{proposer="ngram"} 20.0',
        'onbeat_spec_accepted_tokens_total{proposer="ngram"} 12.0',
        'onbeat_spec_accepted_tokens_at_position_total{position="2",proposer="ngram"} 4.0',
        'onbeat_spec_draft_length_bucket{le="5.0",proposer="ngram"} 4.0',
    ):
        assert line in text


async def test_the_schema_describes_the_fields(served: Served) -> None:
    schemas = (await served.get("/openapi.json")).json["components"]["schemas"]
    properties = schemas["CompletionTokensDetails"]["properties"]
    assert properties.keys() == {
        "reasoning_tokens",
        "accepted_prediction_tokens",
        "rejected_prediction_tokens",
    }
    assert all(properties[name]["type"] == "integer" for name in properties)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_stop_string_in_the_last_delivery_is_the_end_everywhere(
    served: Served, caplog: pytest.LogCaptureFixture, is_streamed: bool
) -> None:
    """The engine ends the request by its length in that delivery, and brings a token behind the string."""
    caplog.set_level("INFO", logger="onbeat.server")
    body = {"prompt": "x", "max_tokens": 8, "stop": ", ", "stream": is_streamed, "slo": {"e2e_ms": 9000}}
    answer = await served.post(TEXT, body)
    assert b'"finish_reason":"stop","stop_reason":", "' in answer.body
    metrics = (await served.get("/metrics")).body.decode()
    for line in (
        'onbeat_requests_total{finish_reason="stop"} 1.0',
        'onbeat_requests_total{finish_reason="length"} 0.0',
        f"onbeat_output_tokens_total {len('Hello, ')}.0",
        f"onbeat_request_output_tokens_sum {len('Hello, ')}.0",
        "onbeat_requests_running 0.0",
        "onbeat_requests_waiting 0.0",
    ):
        assert line in metrics
    (logged,) = [each.getMessage() for each in caplog.records if TEXT in each.getMessage()]
    assert "finish=stop" in logged
