"""Calls that must be made, and made by their schemas: which grammars requests get, and what answers say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from onbeat.core.request import Grammar
from onbeat.text.grammar.compiler import GrammarCompiler, Vocabulary
from tests.chat_templates import SMOLLM2, THINKING_HERMES
from tests.cpu.server.asking import CHAT, check
from tests.cpu.server.running import HELLO, Served, serving
from tests.cpu.server.test_tools import NOON, PARIS, TIME, TOOLS, WEATHER, PlainTokenizer
from tests.fakes_engine import VOCAB_SIZE, FakeEngine

COMPILER = GrammarCompiler(Vocabulary.of(PlainTokenizer(), VOCAB_SIZE), VOCAB_SIZE)
NAMED = {"type": "function", "function": {"name": "get_time"}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]


@pytest.fixture
async def served(engine: FakeEngine) -> AsyncIterator[Served]:
    async with serving(engine, tokenizer=PlainTokenizer(), template=THINKING_HERMES) as running:
        yield running


def allows(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    guide = COMPILER.compile(grammar)
    return all(guide.accepts(each) for each in text.encode()) and guide.may_end


@pytest.mark.parametrize(
    ("fields", "allowed", "refused", "reason"),
    [
        (
            {"tools": TOOLS, "tool_choice": "required"},
            [PARIS, NOON, f"<think>A</think>{NOON}"],
            ["A"],
            "tool_calls",
        ),
        ({"tools": TOOLS, "tool_choice": NAMED}, [NOON], [PARIS, NOON + NOON, "A"], "stop"),
        (
            {"tools": [STRICT, TIME]},
            ["A", PARIS, f"A{NOON}"],
            [PARIS.replace('"Paris"', "5")],
            "tool_calls",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            [NOON],
            [f"{NOON}\n{NOON}"],
            "tool_calls",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [NAMED]},
                },
            },
            [NOON, NOON + NOON],
            [PARIS, "A"],
            "tool_calls",
        ),
        (
            {"tools": TOOLS, "response_format": {"type": "json_object"}},
            [NOON, "{}"],
            ["A", f"A{NOON}"],
            "tool_calls",
        ),
    ],
    ids=str,
)
async def test_what_answers_must_be(
    served: Served,
    engine: FakeEngine,
    fields: dict[str, Any],
    allowed: list[str],
    refused: list[str],
    reason: str,
) -> None:
    engine.script.text = NOON
    answer = await served.post(CHAT, {"messages": HELLO, **fields})
    assert answer.status == 200, answer.body
    grammar = engine.requests[-1].sampling.grammar
    for text in allowed:
        assert allows(grammar, text), text
    for text in refused:
        assert not allows(grammar, text), text
    (choice,) = answer.json["choices"]
    assert "tool_calls" in choice["message"]
    assert choice["finish_reason"] == reason


async def test_tools_that_are_not_strict_leave_answers_free(served: Served, engine: FakeEngine) -> None:
    await served.post(CHAT, {"messages": HELLO, "tools": TOOLS})
    assert engine.requests[-1].sampling.grammar is None


async def test_a_schema_of_the_answer_leaves_room_for_reasoning(served: Served, engine: FakeEngine) -> None:
    body = {"messages": HELLO, "response_format": {"type": "json_object"}}
    await served.post(CHAT, body)
    grammar = engine.requests[-1].sampling.grammar
    assert allows(grammar, '<think>Is it {"b"?</think>\n\n{"a": 1}')
    assert allows(grammar, '{"a": 1}')
    await served.post(CHAT, {**body, "chat_template_kwargs": {"enable_thinking": True}})
    grammar = engine.requests[-1].sampling.grammar
    assert allows(grammar, 'Hm.\n</think>\n\n{"a": 1}')
    assert not allows(grammar, '{"a": 1}')


async def test_a_template_without_tools_has_bare_calls(engine: FakeEngine) -> None:
    engine.script.text = '{"name": "get_time", "arguments": {}}'
    async with serving(engine, tokenizer=PlainTokenizer(), template=SMOLLM2) as served:
        answer = await served.post(CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"})
    assert answer.json["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_time"
    grammar = engine.requests[-1].sampling.grammar
    assert allows(grammar, engine.script.text)
    assert allows(grammar, f"[{engine.script.text}, {engine.script.text}]")
    assert not allows(grammar, "A")


async def test_schemas_that_cannot_be_enforced(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True}},
        "required": ["a"],
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": "required"}
    answer = await served.post(CHAT, body)
    assert answer.status == 200, answer.body
    assert answer.headers["x-onbeat-ignored-fields"] == "tools.uniqueItems"
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}  # type: ignore[dict-item]
    answer = await served.post(CHAT, {**body, "tools": [strict]})
    assert "uniqueItems" in check(answer, 400, "unsupported_schema", "tools")


async def test_the_tool_whose_schema_cannot_be_enforced_is_named(served: Served) -> None:
    bad = {"name": "bad", "parameters": {"type": "objekt"}}
    tools = [WEATHER, {"type": "function", "function": bad}]
    body = {"messages": HELLO, "tools": tools, "tool_choice": "required"}
    wrong = "the grammar cannot be enforced: Invalid type: objekt"
    message = check(await served.post(CHAT, body), 400, "unsupported_schema", "tools")
    assert message == f"tools, the function 'bad': {wrong}"
    listed = [{"type": "function", **WEATHER["function"]}, {"type": "function", **bad}]  # type: ignore[dict-item]
    answer = await served.post("/v1/responses", {"input": "hi", "tools": listed, "tool_choice": "required"})
    assert check(answer, 400, "unsupported_schema", "tools") == message
    schema = {"name": "answer", "schema": {"type": "objekt"}}
    body |= {"tools": [WEATHER], "response_format": {"type": "json_schema", "json_schema": schema}}
    answer = await served.post(CHAT, {**body, "tool_choice": "auto"})
    where = "response_format.json_schema.schema"
    assert check(answer, 400, "unsupported_schema", where) == f"{where}: {wrong}"


async def test_the_other_apis_of_chats_call_and_reason_too(served: Served, engine: FakeEngine) -> None:
    engine.script.text = f"<think>Hm.</think>I look.{PARIS}"
    schema = WEATHER["function"]["parameters"]  # type: ignore[index]
    body = {
        "model": "fake/model",
        "messages": HELLO,
        "max_tokens": 500,
        "tools": [{"name": "get_weather", "input_schema": schema}],
        "tool_choice": {"type": "any"},
    }
    answer = (await served.post("/v1/messages", body)).json
    thinking, text, call = answer["content"]
    assert (thinking["thinking"], text["text"]) == ("Hm.", "I look.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Paris"})
    assert answer["stop_reason"] == "tool_use"
    assert allows(engine.requests[-1].sampling.grammar, PARIS)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sun"}
    messages = [
        *HELLO,
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    assert (await served.post("/v1/messages", {**body, "messages": messages})).status == 200
    assert "<tool_response>\nsun" in bytes(engine.requests[-1].prompt_token_ids).decode()
    flat = {"type": "function", "name": "get_weather", "parameters": schema}
    answer = (await served.post("/v1/responses", {"input": "hi", "tools": [flat]})).json
    reasoning, message, call = answer["output"]
    assert reasoning["content"][0]["text"] == "Hm."
    assert message["content"][0]["text"] == "I look."
    assert (call["type"], call["name"], call["arguments"]) == (
        *("function_call", "get_weather"),
        '{"city": "Paris"}',
    )
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    again = {"input": [{"role": "user", "content": "hi"}, *answer["output"], output], "tools": [flat]}
    assert (await served.post("/v1/responses", again)).status == 200
    assert "<tool_response>\nrain" in bytes(engine.requests[-1].prompt_token_ids).decode()
