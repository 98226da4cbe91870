"""Calls that the embedded model must make, through the real program."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.cpu.e2e.program import ServerProgram

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
PAGE: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"enum": ["cat", "dog"]}},
    "required": ["word"],
    "additionalProperties": False,
}
SCHEMAS = {"forecast": CITY, "search": PAGE}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "description": f"A {name}", "parameters": schema, "strict": True},
    }
    for name, schema in SCHEMAS.items()
]
ASKED: list[Any] = [{"role": "user", "content": "What will the weather be in Paris, for three days?"}]


def check(call: Any) -> None:
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])


def ask(server: ServerProgram, **fields: Any) -> Any:
    body = {"messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 150, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_a_call_is_made_where_it_must(smollm2_server: ServerProgram) -> None:
    (choice,) = ask(smollm2_server, tool_choice="required", parallel_tool_calls=False)
    (call,) = choice["message"]["tool_calls"]
    check(call)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_function_that_is_named_is_called_once(smollm2_server: ServerProgram, name: str) -> None:
    named = {"type": "function", "function": {"name": name}}
    for choice in ask(smollm2_server, tool_choice=named, n=3, temperature=1, seed=3):
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == name
        check(call)
        assert choice["finish_reason"] == "stop"


def test_strict_functions_may_be_called(smollm2_server: ServerProgram) -> None:
    for choice in ask(smollm2_server, n=3, temperature=1, seed=1):
        for call in choice["message"].get("tool_calls", ()):
            if choice["finish_reason"] != "length":
                check(call)


def test_a_stream_and_the_way_back(smollm2_server: ServerProgram) -> None:
    (whole,) = ask(smollm2_server, tool_choice="required", parallel_tool_calls=False)
    messages = list(ASKED)
    with openai.OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none") as client:
        about: Any = {"model": "smollm2", "tools": TOOLS, "temperature": 0, "max_tokens": 150}
        how: Any = {"tool_choice": "required", "parallel_tool_calls": False}
        with client.chat.completions.stream(messages=messages, **about, **how) as stream:
            message = stream.get_final_completion().choices[0].message
        assert message.tool_calls
        (call,) = message.tool_calls
        assert call.function.arguments == whole["message"]["tool_calls"][0]["function"]["arguments"]
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sun, sun, rain"}]
        answer = client.chat.completions.create(messages=messages, **about, tool_choice="none")
    assert answer.choices[0].message.content
