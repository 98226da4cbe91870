"""Anthropic's Messages API: its client, its blocks, its errors."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from onbeat.core.errors import InvalidRequest
from onbeat.server import answer
from onbeat.server.messages import messages_of
from tests.cpu.server.running import Served, named_events
from tests.fakes_engine import FakeEngine
from tests.many_cases import each_case

if TYPE_CHECKING:
    import anthropic

MESSAGES = "/v1/messages"
HI: list[Any] = [{"role": "user", "content": "hi"}]
BODY = {"model": "fake/model", "max_tokens": 50, "messages": HI}


@pytest.fixture
async def client(served: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    library = pytest.importorskip(
        "anthropic", reason="anthropic is not installed: pip install -e '.[clients]'"
    )
    async with library.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


async def test_client_gets_a_message(client: anthropic.AsyncAnthropic, engine: FakeEngine) -> None:
    engine.script.num_cached_tokens = 3
    message = await client.messages.create(model="fake/model", max_tokens=50, messages=HI, system="be brief")
    (block,) = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason) == ("Hello, world!", "end_turn")
    num_prompt = len("[system]be brief\n[user]hi\n[assistant]")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (num_prompt - 3, 3)


async def test_client_streams_a_message(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(model="fake/model", max_tokens=5, messages=HI) as stream:
        text = "".join([text async for text in stream.text_stream])
        message = await stream.get_final_message()
    assert (text, message.stop_reason, message.usage.output_tokens) == ("Hello", "max_tokens", 5)


async def test_client_lists_models(client: anthropic.AsyncAnthropic) -> None:
    (model,) = [each async for each in client.models.list()]
    assert (model.type, model.id, model.display_name) == ("model", "fake/model", "fake/model")
    assert (await client.models.retrieve("fake/model")).created_at == model.created_at


async def test_client_counts_tokens(client: anthropic.AsyncAnthropic) -> None:
    count = await client.messages.count_tokens(model="fake/model", messages=HI)
    assert count.input_tokens == len("[user]hi\n[assistant]")


async def test_a_stream_has_the_events_of_its_blocks(served: Served) -> None:
    events = await named_events(served, MESSAGES, {**BODY, "stop_sequences": [", "]})
    assert [name for name, _ in events] == [
        *("message_start", "content_block_start", "ping"),
        *(["content_block_delta"] * (len(events) - 6)),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": ", "}
    text = "".join(event["delta"]["text"] for name, event in events if name == "content_block_delta")
    assert text == "Hello"


async def test_a_stream_that_is_silent_says_that_it_goes_on(
    served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "PING_SECONDS", 0.02)
    engine.script.seconds_per_step = 0.2
    names = [name for name, _ in await named_events(served, MESSAGES, {**BODY, "max_tokens": 3})]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    first, last = (
        names.index("content_block_delta"),
        len(names) - names[::-1].index("content_block_delta"),
    )
    assert names[first:last].count("ping") >= 2
    assert names[last:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_errors_have_the_form_of_the_api(served: Served, engine: FakeEngine) -> None:
    for body, kind, status in (
        ({**BODY, "model": "other"}, "not_found_error", 404),
        ({**BODY, "max_tokens": None}, "invalid_request_error", 400),
        ({**BODY, "messages": [{"role": "robot", "content": ""}]}, "invalid_request_error", 400),
        ({**BODY, "output_config": {"format": "json"}}, "invalid_request_error", 400),
        ({**BODY, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "invalid_request_error", 400),
    ):
        reply = await served.post(MESSAGES, body)
        assert (reply.status, reply.json["type"], reply.json["error"]["type"]) == (status, "error", kind)
    engine.script.error_after = 3
    name, last = (await named_events(served, MESSAGES, BODY))[-1]
    assert (name, last["type"], last["error"]["type"]) == ("error", "error", "api_error")


@pytest.mark.parametrize("served", [{"api_keys": ("secret",)}], indirect=True)
async def test_a_key_may_come_by_its_header(served: Served) -> None:
    wrong = await served.post(MESSAGES, BODY, headers={"x-api-key": "guess"})
    assert (wrong.status, wrong.json["error"]["type"]) == (401, "authentication_error")
    for other in ({}, {"authorization": "Bearer a-proxys"}, {"authorization": "Basic eDp5"}):
        headers = {"x-api-key": "secret", **other}
        assert (await served.post(MESSAGES, BODY, headers=headers)).status == 200


async def test_objectives_and_tenant_stand_in_metadata(served: Served, engine: FakeEngine) -> None:
    metadata = {"user_id": "anna", "slo_tbt_ms": 100, "slo_shed": "false"}
    message = (await served.post(MESSAGES, {**BODY, "metadata": metadata})).json
    request = engine.requests[-1]
    assert request.slo is not None
    assert (message["slo"]["met"], request.slo.tbt) == (True, 0.1)
    assert (request.tenant or "").startswith("user:")


@pytest.mark.parametrize("begun", ["Sure, ", [{"type": "text", "text": "Sure, "}]])
async def test_the_answer_goes_on_with_a_last_message_of_its_own(served: Served, begun: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": begun}]
    asked = {"model": "fake/model", "max_tokens": 5, "messages": messages}
    answer = await served.post("/v1/messages", asked)
    assert answer.json["content"] == [{"type": "text", "text": "Hello"}]
    prompt = served.engine.requests[-1].prompt_token_ids
    assert bytes(prompt).decode() == "[user]hi\n[assistant]Sure, "
    counted = await served.post("/v1/messages/count_tokens", asked)
    assert counted.json == {"input_tokens": len(prompt)}


def test_blocks_become_messages() -> None:
    blocks: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "gone", "is_error": True},
                {"type": "text", "text": "so?"},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t3"}]},
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "be kind"}]
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert [message for _, message in messages_of(blocks, system)] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look"}],
            "reasoning_content": "hm",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sun"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: gone"},
        {"role": "user", "content": [{"type": "text", "text": "so?"}]},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
    ]
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\].type.*'image'"):
        messages_of([{"role": "user", "content": [{"type": "image"}]}], None)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}


async def test_a_talk_goes_on_behind_what_is_no_text(served: Served, engine: FakeEngine) -> None:
    reference, document = {"type": "tool_reference", "tool_name": "f"}, {"type": "document", "source": {}}
    parts = [{"type": "text", "text": "a"}, IMAGE, reference, document]
    messages = [
        {"role": "user", "content": [{**RESULT, "content": parts}, IMAGE]},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "abc"}]},
        *HI,
    ]
    answer = await served.post(MESSAGES, {**BODY, "messages": messages})
    assert answer.status == 200, answer.body
    names = [f"messages[].content[].{kind}" for kind in ("image", "tool_reference", "document")]
    assert answer.headers["x-onbeat-ignored-fields"] == ", ".join(names)
    shown = bytes(engine.requests[-1].prompt_token_ids).decode()
    left_out = [f"[{kind} left out: only text can be read here]" for kind in ("image", "tool_reference")]
    assert shown.startswith("[user]Result: a\n" + "\n".join(left_out))
    assert shown.endswith(f"[user]{left_out[0]}\n[assistant]\n[assistant]\n[user]hi\n[assistant]")


@pytest.mark.parametrize("block", [IMAGE, {**RESULT, "content": [IMAGE]}, {"type": "document"}])
async def test_a_question_about_what_is_no_text_is_refused(served: Served, block: dict[str, Any]) -> None:
    messages = [*HI, {"role": "user", "content": [block]}]
    answer = await served.post(MESSAGES, {**BODY, "messages": messages})
    assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported_parameter")


TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}


@each_case(
    ("fields", "param"),
    [
        ({"system": "x", "messages": [*HI, {"role": "user", "content": 5}]}, "messages"),
        ({"system": "x", "messages": [*HI, {"role": "user"}]}, "messages[1].content"),
        ({"system": "x", "messages": []}, "messages"),
        ({"output_config": {"effort": "loud"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools"),
        ({"tools": [{**TOOL, "input_schema": 5}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": 5}}, "tool_choice.name"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"metadata": {"slo_tbt_ms": -1}}, "metadata.slo_tbt_ms"),
        ({"metadata": {"slo_tbt": 1}}, "metadata.slo_tbt"),
        ({"slo": {"class": "none"}}, "slo.class"),
    ],
)
async def test_errors_name_the_fields_of_the_api(served: Served, fields: dict[str, Any], param: str) -> None:
    answer = await served.post(MESSAGES, {**BODY, **fields})
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, param)
    of_chats = r"messages\[2|continue_final|response_format|_effort|\.function|parameters|^user|\bslo\.t"
    assert not re.search(of_chats, error["message"]), error


async def test_the_tier_may_be_anthropics(served: Served, engine: FakeEngine) -> None:
    assert (await served.post(MESSAGES, {**BODY, "service_tier": "standard_only"})).status == 200
    assert engine.requests[-1].slo_class is None
