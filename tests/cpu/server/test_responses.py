"""The Responses API: the official client, and the forms of its input."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest

from onbeat.core.errors import InvalidRequest
from onbeat.server.response_request import messages_of
from tests.cpu.server.running import Served, named_events
from tests.fakes_engine import FakeEngine
from tests.many_cases import each_case

RESPONSES = "/v1/responses"
IMAGE = {"type": "input_image", "image_url": "x"}
REASONING = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
FORMAT = {"type": "json_schema", "name": "a", "schema": {}}
ALLOWED = {"type": "allowed_tools", "mode": "auto"}
TOOL = {"type": "function", "name": "f", "parameters": None}


async def test_client_gets_a_response(served: Served) -> None:
    response = await served.client.responses.create(
        model="fake/model", input="hi", instructions="be brief", metadata={"case": "7"}
    )
    assert response.output_text == "Hello, world!"
    assert (response.status, response.metadata) == ("completed", {"case": "7"})
    assert response.usage is not None
    assert response.usage.input_tokens == len("[system]be brief\n[user]hi\n[assistant]")
    assert response.usage.output_tokens == len("Hello, world!") + 1  # the end token counts
    assert response.id.startswith("resp_")


async def test_client_streams_a_response(served: Served) -> None:
    async with served.client.responses.stream(model="fake/model", input="hi") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "Hello, world!"
    assert kinds[:4] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.completed"),
    ]


async def test_events_are_numbered_and_the_last_is_the_whole_answer(served: Served) -> None:
    body = {
        "input": "hi",
        "max_output_tokens": 5,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
    }
    events = await named_events(served, RESPONSES, body)
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert [name for name, _ in events] == [event["type"] for _, event in events]
    deltas = [event for name, event in events if name == "response.output_text.delta"]
    assert "".join(delta["delta"] for delta in deltas) == "Hello"
    assert all(len(delta["logprobs"]) == len(delta["delta"]) for delta in deltas)
    name, last = events[-1]
    assert (name, last["response"]["incomplete_details"]) == (
        "response.incomplete",
        {"reason": "max_output_tokens"},
    )
    whole = (await served.post(RESPONSES, body)).json
    for answer in (whole, last["response"]):
        (item,) = answer.pop("output")
        (content,) = item["content"]
        assert (item["status"], content["text"], len(content["logprobs"])) == ("incomplete", "Hello", 5)
        del answer["id"], answer["created_at"]
    assert whole == last["response"]


async def test_objectives_stand_in_metadata_and_are_judged(served: Served, engine: FakeEngine) -> None:
    body = {"input": "hi", "metadata": {"slo_ttft_ms": "60000", "slo_class": "standard", "mine": "x"}}
    answer = (await served.post(RESPONSES, body)).json
    assert answer["slo"]["met"] is True
    assert engine.requests[-1].slo is not None
    assert (engine.requests[-1].slo.ttft, engine.requests[-1].slo_class) == (60, "standard")
    _, last = (await named_events(served, RESPONSES, body))[-1]
    assert last["response"]["slo"]["met"] is True
    wrong = await served.post(RESPONSES, {"input": "hi", "metadata": {"slo_tftt_ms": "5"}})
    assert (wrong.status, wrong.error["code"]) == (400, "unknown_parameter")


@each_case(
    ("fields", "param"),
    [
        ({"conversation": "c"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"content": "x"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0]"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": "x" * 3000}, "input"),
        ({"max_output_tokens": 9999}, "input"),
        ({"input": [{"role": "user", "content": 5}], "instructions": "x"}, "input"),
        ({"input": [{"role": "user", "content": [IMAGE]}], "instructions": "x"}, "input[0].content[0].type"),
        ({"input": [REASONING, {"role": "assistant", "content": [IMAGE]}]}, "input[1].content[0].type"),
        ({"reasoning": {"effort": "loud"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "odd"}}}, "text.format.type"),
        ({"text": {"format": {**FORMAT, "name": 5}}}, "text.format.name"),
        ({"text": {"format": {**FORMAT, "schema": {"type": "odd"}}}}, "text.format.schema"),
        ({"text": {"format": FORMAT}, "guided_regex": "a"}, "guided_regex"),
        ({"tools": [{"type": "function", "name": "a b", "parameters": {}}]}, "tools"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {**ALLOWED, "tools": [{"type": "function"}]}, "tools": [TOOL]}, "tool_choice.tools"),
        ({"min_tokens": 5, "max_output_tokens": 2}, "min_tokens"),
        ({"metadata": {"slo_ttft_ms": "soon"}}, "metadata.slo_ttft_ms"),
        ({"metadata": {"slo_job_id": "j", "slo_job_calls_left": "-"}}, "metadata.slo_job_calls_left"),
    ],
)
async def test_what_it_lacks_is_refused_by_name(served: Served, fields: dict[str, Any], param: str) -> None:
    answer = await served.post(RESPONSES, {"input": "hi", **fields})
    assert (answer.status, answer.error["param"]) == (400, param)
    of_chats = r"messages\[|max_completion|max_tokens|response_format|_effort|\.function|slo\."
    assert not re.search(of_chats, answer.error["message"].removeprefix("max_tokens is called"))


async def test_an_error_in_a_stream_is_its_last_event(served: Served, engine: FakeEngine) -> None:
    engine.script.error_after = 3
    name, last = (await named_events(served, RESPONSES, {"input": "hi"}))[-1]
    assert (name, last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "engine_error"
    assert last["response"]["output"][0]["content"][0]["text"] == "Hel"


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
SHOWN_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_what_a_model_said_in_one_turn_is_one_message() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
        CALL,
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "assistant", "content": "both"},
        {"role": "assistant", "content": "again"},
    ]
    assert [message for _, message in messages_of(items, "be kind")] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": [{"type": "output_text", "text": "I look"}],
            "tool_calls": [SHOWN_CALL, {**SHOWN_CALL, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "input_text", "text": "rain"}]},
        {"role": "assistant", "content": "both"},
        {"role": "assistant", "content": "again"},
    ]
    with pytest.raises(InvalidRequest, match=r"input\[0\].name is None"):
        messages_of([{"type": "function_call", "call_id": "c"}], None)
    assert orjson.dumps(messages_of("hi", None)) == b'[["input",{"role":"user","content":"hi"}]]'


async def test_what_clients_send_back_is_taken(served: Served, engine: FakeEngine) -> None:
    said = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
    items = [{"type": None, "role": "user", "content": "hi"}, REASONING, {"role": "user", "content": "?"}]
    own = {"role": "assistant", "content": [said]}
    answer = await served.post(RESPONSES, {"input": [*items, own], "tools": [TOOL], "tool_choice": "none"})
    assert answer.status == 200, answer.body
    assert "x-onbeat-ignored-fields" not in answer.headers
    asked = bytes(engine.requests[-1].prompt_token_ids).decode()
    assert asked == "[user]hi\n[assistant]\n[user]?\n[assistant]a\n[assistant]"
    own["content"] = [{**said, "odd": 1}]
    answer = await served.post(RESPONSES, {"input": [own], "prompt_logprobs": 0})
    assert answer.headers["x-onbeat-ignored-fields"] == "prompt_logprobs, input[].content[].odd"
    assert engine.requests[-1].num_prompt_logprobs is None


async def test_the_tokens_of_an_input_are_counted(served: Served, engine: FakeEngine) -> None:
    asked: dict[str, Any] = {"model": "fake/model", "input": "hi", "instructions": "be kind", "tools": [TOOL]}
    counted = await served.post(f"{RESPONSES}/input_tokens", asked)
    assert (await served.post(RESPONSES, {**asked, "text": {"verbosity": "medium"}})).status == 200
    num_tokens = len(engine.requests[-1].prompt_token_ids)
    assert counted.json == {"object": "response.input_tokens", "input_tokens": num_tokens}
    assert (await served.client.responses.input_tokens.count(**asked)).input_tokens == num_tokens
    refused = await served.post(f"{RESPONSES}/input_tokens", {**asked, "previous_response_id": "resp_1"})
    assert (refused.status, refused.json["error"]["param"]) == (404, "previous_response_id")
