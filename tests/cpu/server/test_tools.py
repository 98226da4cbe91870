"""Calls of tools and reasoning in chat completions: requests, prompts, answers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.server.reply import reply_style
from onbeat.server.server_config import ServerConfig
from onbeat.text.chat_template import ChatTemplate
from tests.chat_templates import GEMMA, THINKING_HERMES
from tests.cpu.server.asking import CHAT, check
from tests.cpu.server.running import HELLO, Served, serving
from tests.fakes_engine import EOS, THINK, VOCAB_SIZE, ByteTokenizer, FakeEngine
from tests.many_cases import each_case
from tests.waiting import until

NAME = "fake/model"
EXAMPLE = Path(__file__).parents[3] / "examples" / "agent.py"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS: list[Any] = [WEATHER, TIME]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PARIS, NOON = call("get_weather", city="Paris"), call("get_time")


class PlainTokenizer(ByteTokenizer):
    """Has no token for reasoning, so that text is what marks it."""

    special_token_ids = frozenset(range(EOS, VOCAB_SIZE)) - {THINK}


@pytest.fixture
async def served(engine: FakeEngine) -> AsyncIterator[Served]:
    async with serving(engine, tokenizer=PlainTokenizer(), template=THINKING_HERMES) as running:
        yield running


def joined(events: list[Any], index: int = 0) -> tuple[dict[str, Any], str | None]:
    """Return the message and the finish reason that a stream comes to."""
    message: dict[str, Any] = {"content": None}
    calls: list[dict[str, Any]] = []
    reason = None
    for choice in (choice for event in events[:-1] for choice in event["choices"]):
        if choice["index"] != index:
            continue
        reason = choice["finish_reason"]
        delta = choice["delta"]
        for name in delta.keys() - {"tool_calls"}:
            message[name] = (message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append(json.loads(json.dumps(part)))
            else:
                assert part.keys() == {"index", "function"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message | ({"tool_calls": calls} if calls else {}), reason


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls", [])
    for each in calls:
        assert each["id"].startswith("call_")
        assert len(each["id"]) == 29
    assert len({each["id"] for each in calls}) == len(calls)
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "calls": [(each["function"]["name"], each["function"]["arguments"]) for each in calls]}


ANSWERS = [
    ("Hello", {"content": "Hello", "calls": []}, "stop"),
    (PARIS, {"content": None, "calls": [("get_weather", '{"city": "Paris"}')]}, "tool_calls"),
    (
        f"I look.\n{PARIS}\n{NOON}",
        {"content": "I look.", "calls": [("get_weather", '{"city": "Paris"}'), ("get_time", "{}")]},
        "tool_calls",
    ),
    (
        f"<think>\nHm.\n</think>\n\n{NOON}",
        {"content": None, "reasoning": "Hm.", "reasoning_content": "Hm.", "calls": [("get_time", "{}")]},
        "tool_calls",
    ),
    (call("nobody"), {"content": call("nobody"), "calls": []}, "stop"),
]


@pytest.mark.parametrize("tokens_per_step", [1, 7])
@pytest.mark.parametrize(("text", "message", "reason"), ANSWERS)
async def test_whole_and_streamed_answers_say_the_same(
    served: Served,
    engine: FakeEngine,
    text: str,
    message: dict[str, Any],
    reason: str,
    tokens_per_step: int,
) -> None:
    engine.script.text, engine.script.tokens_per_step = text, tokens_per_step
    answer = (await served.post(CHAT, {"messages": HELLO, "tools": TOOLS})).json
    (choice,) = answer["choices"]
    role = choice["message"].pop("role")
    assert (without_ids(choice["message"]), choice["finish_reason"]) == (message, reason)
    streamed, streamed_reason = joined(await served.events(CHAT, {"messages": HELLO, "tools": TOOLS}))
    assert streamed.pop("role") == role == "assistant"
    # the first chunk, which names the role, has an empty text
    assert without_ids(streamed) == {**message, "content": message["content"] or ""}
    assert streamed_reason == reason
    reasoning = text.find("</think>") + len("</think>") if "<think>" in text else 0
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == reasoning


async def test_the_chunks_of_a_call(served: Served, engine: FakeEngine) -> None:
    engine.script.text, engine.script.tokens_per_step = PARIS, 58
    events = await served.events(CHAT, {"messages": HELLO, "tools": TOOLS})
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    call_id = deltas[1]["tool_calls"][0]["id"]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": call_id,
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": '},
                }
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]},
    ]


async def test_the_template_gets_the_tools(served: Served, engine: FakeEngine) -> None:
    for fields, is_shown in (({}, True), ({"tool_choice": "auto"}, True), ({"tool_choice": "none"}, False)):
        body = {"messages": HELLO, "tools": TOOLS, **fields}
        await served.post(CHAT, body)
        prompt = bytes(engine.requests[-1].prompt_token_ids).decode()
        assert (json.dumps(WEATHER) in prompt) is is_shown
        tokens = (await served.post("/tokenize", body)).json["tokens"]
        assert tokens == list(engine.requests[-1].prompt_token_ids)


async def test_some_tools_may_be_allowed(served: Served, engine: FakeEngine) -> None:
    engine.script.text = PARIS + NOON
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = await served.post(CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": choice})
    message = without_ids(answer.json["choices"][0]["message"])
    assert (message["content"], message["calls"]) == (PARIS, [("get_time", "{}")])
    assert "get_weather" not in bytes(engine.requests[-1].prompt_token_ids).decode()


async def test_one_call_may_be_all(served: Served, engine: FakeEngine) -> None:
    engine.script.text = f"{PARIS}\n{NOON} and more"
    body = {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False}
    (choice,) = (await served.post(CHAT, body)).json["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    await until(lambda: len(engine.aborted) == 1)


async def test_an_answer_that_is_cut_off_keeps_its_call(served: Served, engine: FakeEngine) -> None:
    engine.script.text = PARIS
    for many in ({}, {"parallel_tool_calls": False}, {"parallel_tool_calls": False, "stop": ["Paris"]}):
        body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 57, **many}
        (choice,) = (await served.post(CHAT, body)).json["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city":'
        assert choice["finish_reason"] == "length"
        assert joined(await served.events(CHAT, body))[1] == "length"


async def test_calls_and_results_go_to_the_template(served: Served, engine: FakeEngine) -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}},
        {"id": "b", "type": "function", "function": {"name": "get_time", "arguments": ""}},
    ]
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"cut":'}}]},
        {"role": "tool", "name": "f", "content": None},
    ]
    answer = await served.post(CHAT, {"messages": messages})
    assert answer.status == 200, answer.body
    assert "x-onbeat-ignored-fields" not in answer.headers
    prompt = bytes(engine.requests[-1].prompt_token_ids).decode()
    assert f"assistant\n{PARIS}\n{NOON}<|im_end|>" in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt
    assert '"arguments": "{\\"cut\\":"' in prompt
    assert "<tool_response>\n\n</tool_response>" in prompt


async def test_reasoning_that_the_prompt_opens(served: Served, engine: FakeEngine) -> None:
    engine.script.text = "Hm.\n</think>\n\nYes"
    body = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": True}}
    answer = (await served.post(CHAT, body)).json
    expected = {"content": "Yes", "reasoning": "Hm.", "reasoning_content": "Hm."}
    assert answer["choices"][0]["message"] == {"role": "assistant", **expected}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Hm.\n</think>")
    usage = {"include_usage": True, "continuous_usage_stats": True}
    events = await served.events(CHAT, {**body, "stream_options": usage})
    assert joined(events)[0] == {"role": "assistant", **expected}
    counts = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in events[1:-1]]
    assert counts == sorted(counts)
    answer = (await served.post(CHAT, {**body, "include_reasoning": False, "return_token_ids": True})).json
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Yes"}
    assert bytes(answer["choices"][0]["token_ids"][:-1]).decode() == engine.script.text


async def test_choices_have_calls_of_their_own(served: Served, engine: FakeEngine) -> None:
    engine.script.text = PARIS
    body = {"messages": HELLO, "tools": TOOLS, "n": 2, "logprobs": True}
    choices = (await served.post(CHAT, body)).json["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 2
    tokens = [token["token"] for token in choices[0]["logprobs"]["content"]]
    assert "".join(tokens) == PARIS
    events = await served.events(CHAT, body)
    for index in range(2):
        assert len(joined(events, index)[0]["tool_calls"]) == 1
    parts = [
        choice["logprobs"] for event in events[:-1] for choice in event["choices"] if not choice["index"]
    ]
    assert "".join(token["token"] for part in parts if part for token in part["content"]) == PARIS


async def test_a_template_without_tools_is_told_of_them_in_messages(engine: FakeEngine) -> None:
    paris = '{"name": "get_weather", "arguments": {"city":"Paris"}}'
    engine.script.text = f"[{paris}, {paris}]"
    async with serving(engine, template=GEMMA) as served:
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, *HELLO]
        answer = (await served.post(CHAT, {"messages": messages, "tools": TOOLS})).json
        message = answer["choices"][0]["message"]
        assert [each["function"]["name"] for each in message["tool_calls"]] == ["get_weather"] * 2
        messages += [message]
        messages += [
            {"role": "tool", "tool_call_id": each["id"], "content": "sun"} for each in message["tool_calls"]
        ]
        assert (await served.post(CHAT, {"messages": messages, "tools": TOOLS})).status == 200
        prompt = bytes(engine.requests[-1].prompt_token_ids).decode()
        tokens = (await served.post("/tokenize", {"messages": messages, "tools": TOOLS})).json["tokens"]
    assert "Be brief.\n\nYou may call functions" in prompt
    assert '"description":"Tells the weather"' in prompt
    assert f"model\n{paris}\n{paris}" in prompt
    assert "user\nResult of get_weather: sun\nResult of get_weather: sun" in prompt
    assert tokens == list(engine.requests[-1].prompt_token_ids)


@each_case(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "be 'function'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is missing"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools", "should match pattern"),
        ({"tools": [TIME, TIME]}, "tools", "'get_time' twice"),
        ({"tools": [TIME] * 129}, "tools", "at most 128"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools", "should be an object"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "'f', which is not among the tools",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "send tools"),
        ({"function_call": {"name": "g"}}, "function_call", "send tool_choice"),
    ],
)
async def test_tools_that_are_refused(served: Served, fields: dict[str, Any], param: str, says: str) -> None:
    for path in (CHAT, "/tokenize"):
        answer = await served.post(path, {"messages": HELLO, **fields})
        assert answer.status == 400, answer.body
        assert answer.error["param"] == param
        assert says in answer.error["message"]


async def test_a_server_may_read_no_calls_and_no_reasoning(engine: FakeEngine) -> None:
    engine.script.text = f"<think>A</think>{PARIS}"
    async with serving(
        engine, template=THINKING_HERMES, tool_call_parser="none", reasoning_parser="none"
    ) as served:
        answer = await served.post(CHAT, {"messages": HELLO})
        assert answer.json["choices"][0]["message"]["content"] == engine.script.text
        answer = await served.post(CHAT, {"messages": HELLO, "tools": TOOLS})
        assert "--tool-call-parser none" in check(answer, 400, "unsupported_parameter", "tools")


async def test_the_example_loops_over_five_calls(served: Served, engine: FakeEngine) -> None:
    steps = [
        call("find", word="lamp"),
        call("price", item="lamp-1") + call("price", item="lamp-3"),
        call("price", item="lamp-2"),
        "<think>So.</think>" + call("order", item="lamp-2"),
        "It is order 7781.",
    ]
    engine.script.answers = [*steps]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, EXAMPLE),
        env={**os.environ, "OPENAI_BASE_URL": f"{served.url}/v1", "MODEL": NAME},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert (process.returncode, out.decode().splitlines()) == (
        0,
        [
            'find({"word": "lamp"}) -> ["lamp-1", "lamp-2"]',
            'price({"item": "lamp-1"}) -> 40',
            'price({"item": "lamp-3"}) -> {"error": "KeyError: \'lamp-3\'"}',
            'price({"item": "lamp-2"}) -> 25',
            'order({"item": "lamp-2"}) -> "order 7781 of lamp-2"',
            "It is order 7781.",
        ],
    )
    prompt = bytes(engine.requests[-1].prompt_token_ids).decode()
    assert prompt.count("<tool_response>") == 5


async def test_the_openai_client_streams_calls_and_sends_them_back(
    served: Served, engine: FakeEngine
) -> None:
    engine.script.answers = [f"I look.{PARIS}{NOON}", "Sunny."]
    messages: list[Any] = [*HELLO]
    names = []
    async with served.client.chat.completions.stream(model=NAME, messages=messages, tools=TOOLS) as stream:
        async for event in stream:
            if event.type == "tool_calls.function.arguments.done":
                names.append((event.name, event.arguments))
        message = (await stream.get_final_completion()).choices[0].message
    assert names == [("get_weather", '{"city": "Paris"}'), ("get_time", "{}")]
    assert message.content == "I look."
    messages.append(message)
    for each in message.tool_calls or ():
        messages.append({"role": "tool", "tool_call_id": each.id, "content": "sun"})
    answer = await served.client.chat.completions.create(model=NAME, messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "Sunny."
    assert bytes(engine.requests[-1].prompt_token_ids).decode().count("<tool_response>\nsun\n") == 2


def test_flags_name_what_is_known() -> None:
    assert ServerConfig(tool_call_parser="qwen3_coder", reasoning_parser="deepseek_r1")
    with pytest.raises(ConfigError, match="'kimi'"):
        ServerConfig(tool_call_parser="kimi")
    with pytest.raises(ConfigError, match="'glm45'"):
        ServerConfig(reasoning_parser="glm45")
    template = ChatTemplate(GEMMA, bos_token="", eos_token="")
    with pytest.raises(ConfigError, match=r"chat template .*tools"):
        reply_style(ServerConfig(tool_call_parser="pythonic"), template, ByteTokenizer())
    assert reply_style(ServerConfig(tool_call_parser="hermes"), template, ByteTokenizer()).family


async def test_unknown_fields_of_tools_and_calls_are_named(served: Served) -> None:
    tools = [{**TIME, "cache_control": {}}]
    calls = [{"id": "a", "function": {"name": "f", "arguments": "{}"}, "index": 0, "extra_content": {}}]
    messages = [*HELLO, {"role": "assistant", "tool_calls": calls}]
    answer = await served.post(CHAT, {"messages": messages, "tools": tools})
    assert answer.status == 200, answer.body
    ignored = answer.headers["x-onbeat-ignored-fields"]
    assert "tools[].cache_control" in ignored
    assert "messages[].tool_calls[].extra_content" in ignored
