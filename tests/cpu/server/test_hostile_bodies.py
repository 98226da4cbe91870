"""Bodies within the size limit that cost far more than they should: none may hold up the other requests."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from onbeat.server.server_config import MAX_JSON_PARTS, MAX_JSON_VALUES, MAX_LISTED_TOKENS, MAX_MESSAGES
from tests.cpu.server.loop_turns import post_from_outside, quickly
from tests.cpu.server.running import HELLO, Served
from tests.fakes_engine import Script

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LIMIT = 10 * 2**20


def filled(start: str, item: str, end: str, *, count: int = LIMIT) -> str:
    """Return a body with some items, but no more than fit in the size limit. Items in a list get commas."""
    separator = "," if start.endswith("[") else ""
    count = min(count, (LIMIT - len(start) - len(end)) // len(item + separator))
    return start + separator.join([item] * count) + end


def fields(count: int, value: str = "1", *, prefix: str = "") -> str:
    """Return an object with as many fields, in no order."""
    names = random.Random(0).sample(range(count), count)
    return "{" + ",".join(f'"{prefix}{name}":{value}' for name in names) + "}"


MESSAGE = '{"role":"user","content":""}'
HEAD = '{"messages":[{"role":"user","content":"hi"}],'
STOPS = '{"prompt":"a","stop_token_ids":['

TOOLS = '"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]}'
CALLED = (
    '{"messages":[{"role":"assistant","tool_calls":[{"type":"function","function":'
    '{"name":"f","arguments":%s}}]}]}'
)
DEEP = '{"a":' * 300 + "1" + "}" * 300

MANY = 65_000
"""Fields, nearly as many as a body may have."""

LISTS = filled('{"a":[', "[]", "]}", count=3_400_000)
INTEGERS = filled('{"a":[', "1", "]}", count=5_000_000)
ESCAPED = r"\u005b\u005d\u002c" * 500_000
"""Lists in a text of a body, which holds none of their characters."""
LONG = "x" * (LIMIT - 200)


def written(path: str, **fields: Any) -> tuple[str, Callable[[], str], int]:
    """Return a case of a body with texts that are JSON again, and the usual status."""
    return path, lambda: orjson.dumps(fields).decode(), 400


def called(*arguments: str) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "f", "arguments": each}} for each in arguments]
    return {"messages": [{"role": "assistant", "tool_calls": calls}]}


def tools(number: int, **fields: Any) -> list[dict[str, Any]]:
    unknown = fields.pop("unknown", {})
    return [
        {"type": "function", "function": {"name": f"f{index}", **fields}, **unknown}
        for index in range(number)
    ]


UNKNOWN = {f"noitcnuf{letter}": 1 for letter in string.ascii_letters[:32]}
"""Names that resemble none that is known, which takes a while to find out."""
ITEM = {"type": "function_call", "call_id": "c", "name": "f"}
HIDDEN: dict[str, tuple[str, Callable[[], str], int]] = {
    "lists in arguments": (*written(CHAT, **called(LISTS))[:2], 413),
    "integers in arguments": (*written(CHAT, **called(INTEGERS))[:2], 413),
    "escaped lists in arguments": (CHAT, lambda: CALLED % f'"{{\\"a\\":[{ESCAPED}[]]}}"', 413),
    "lists in the arguments of many calls": (
        *written(CHAT, **called(*[filled('{"a":[', "[]", "]}", count=1000)] * 3000))[:2],
        413,
    ),
    "a text in the arguments of many calls": (
        *written(CHAT, **called(*['{"a":"' + ",{[" * 800 + '"}'] * 3000))[:2],
        400,
    ),
    "lists in arguments to tokenize": (*written("/tokenize", **called(LISTS))[:2], 413),
    "lists in arguments of a response": (
        *written("/v1/responses", input=[{**ITEM, "arguments": LISTS}])[:2],
        413,
    ),
    "lists in guided_json": written(TEXT, prompt="a", guided_json=LISTS),
    "a closed schema of lists": written(
        TEXT, prompt="a", structured_outputs={"json": LISTS, "disable_additional_properties": True}
    ),
    "a schema of many properties": written(
        TEXT, prompt="a", guided_json={"properties": {str(each): {} for each in range(30_000)}}
    ),
    "a long pattern": written(TEXT, prompt="a", guided_regex=LONG),
    "a long pattern of white space": written(
        TEXT, prompt="a", guided_json={"type": "object"}, guided_whitespace_pattern=LONG
    ),
    "a long grammar": written(TEXT, prompt="a", guided_grammar=LONG),
    "long choices": written(TEXT, prompt="a", guided_choice=["x" * 1000] * 10_000),
    "long tools": written(CHAT, messages=HELLO, tools=tools(128, description="x" * 80_000)),
    "long tools that must be called": written(
        CHAT,
        messages=HELLO,
        tool_choice="required",
        tools=tools(128, parameters={"type": "object", "description": "x" * 80_000}),
    ),
    "unknown fields of tools": written(CHAT, messages=HELLO, tools=tools(128, unknown=UNKNOWN)),
    "many properties of a tool": written(
        CHAT,
        messages=HELLO,
        tool_choice="required",
        tools=tools(1, parameters={"properties": {str(each): {} for each in range(30_000)}}),
    ),
    "tools that a response repeats": (
        *written(
            "/v1/responses",
            input="hi",
            stream=True,
            tool_choice="none",
            tools=[
                {"type": "function", "name": f"f{n}", "parameters": {"a": "x" * 80_000}} for n in range(128)
            ],
        )[:2],
        200,
    ),
    "inputs of tools": written(
        "/v1/messages",
        model="fake/model",
        max_tokens=1,
        messages=[
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": [[]] * 6}}] * 4000,
            }
        ],
    ),
    "a document for a query": (
        *written("/rerank", query="a", documents=["b"], top_n=1, user="x" * (LIMIT - 200))[:2],
        200,
    ),
    "words that are not to come": (
        *written(TEXT, prompt="a", bad_words=["x" * 100] * 128, max_tokens=1)[:2],
        200,
    ),
}
"""The same of texts that are read once more, and of what grammars are made of."""

HOSTILE: dict[str, tuple[str, Callable[[], str], int]] = {
    "wrong messages": (CHAT, lambda: filled('{"messages":[', "1", "]}"), 413),
    "fewer wrong messages": (CHAT, lambda: f'{{"messages":{[1] * MAX_MESSAGES}}}', 400),
    "empty messages": (CHAT, lambda: filled('{"messages":[', MESSAGE, "]}"), 413),
    "too many messages": (CHAT, lambda: filled('{"messages":[', MESSAGE, "]}", count=20_000), 400),
    "most messages": (CHAT, lambda: filled('{"messages":[', MESSAGE, "]}", count=MAX_MESSAGES), 400),
    "messages of empty lists": (CHAT, lambda: filled('{"messages":[', "[]", "]}"), 413),
    "parts": (
        CHAT,
        lambda: filled('{"messages":[{"role":"user","content":[', '""', "]}]}", count=250_000),
        400,
    ),
    "wrong parts": (
        CHAT,
        lambda: filled('{"messages":[{"role":"user","content":[', "1", "]}]}", count=8000),
        400,
    ),
    "unknown fields of a message": (CHAT, lambda: f'{{"messages":[{fields(MANY)}]}}', 400),
    "fields where a list is due": (CHAT, lambda: f'{{"messages":{fields(MANY)}}}', 400),
    "unknown fields of stream_options": (CHAT, lambda: f'{HEAD}"stream_options":{fields(MANY)}}}', 400),
    "unknown fields of slo": (CHAT, lambda: f'{HEAD}"slo":{fields(MANY)}}}', 400),
    "unknown fields": (CHAT, lambda: fields(MANY), 400),
    "a huge name": (CHAT, lambda: filled('{"', "temperature", '":1}'), 400),
    "a huge name in slo": (CHAT, lambda: filled(HEAD + '"slo":{"', "ttft_ms", '":1}}'), 400),
    "a huge class": (CHAT, lambda: filled(HEAD + '"slo":{"class":"', "batch", '"}}'), 400),
    "a huge name in a message": (CHAT, lambda: filled('{"messages":[{"role":"user","', "n", '":1}]}'), 400),
    "a huge role": (CHAT, lambda: filled('{"messages":[{"role":"', "user", '"}]}'), 400),
    "empty stop_token_ids": (TEXT, lambda: filled(STOPS, '""', "]}", count=250_000), 400),
    "stop_token_ids": (TEXT, lambda: filled(STOPS, "1", "]}", count=250_000), 400),
    "stop": (TEXT, lambda: filled('{"prompt":"a","stop":[', "1", "]}", count=250_000), 400),
    "lists in logit_bias": (TEXT, lambda: f'{{"prompt":"a","logit_bias":{fields(MANY, "[]")}}}', 413),
    "nulls in logit_bias": (TEXT, lambda: f'{{"prompt":"a","logit_bias":{fields(MANY, "null")}}}', 400),
    "logit_bias of others": (TEXT, lambda: f'{{"prompt":"a","logit_bias":{fields(MANY)}}}', 400),
    "logit_bias of choices": (
        TEXT,
        lambda: f'{{"prompt":{orjson.dumps(["a"] * 32).decode()},"n":16,"logit_bias":{fields(49_000)}}}',
        400,
    ),
    "long names": (CHAT, lambda: f'{{"messages":[],"metadata":{fields(MANY, prefix="k" * 60)}}}', 400),
    "token ids": (TEXT, lambda: filled('{"prompt":[', "1", "]}", count=260_000), 400),
    "prompts of one token": (TEXT, lambda: filled('{"prompt":[', "[1]", "]}", count=MANY), 400),
    "empty prompts": (TEXT, lambda: filled('{"prompt":[', '""', "]}", count=250_000), 400),
    "a huge prompt": (TEXT, lambda: filled('{"truncate_prompt_tokens":9,"prompt":"', "word ", '"}'), 200),
    "a huge prompt, uncut": (TEXT, lambda: filled('{"prompt":"', "word ", '"}'), 400),
    "many prompts": (
        TEXT,
        lambda: filled(
            '{"truncate_prompt_tokens":9,"echo":true,"prompt":[', f'"{"x" * 2000}"', "]}", count=512
        ),
        200,
    ),
    "tokens": ("/detokenize", lambda: filled('{"tokens":[', "97", "]}", count=260_000), 200),
    "wrong tokens": ("/detokenize", lambda: filled('{"tokens":[', '""', "]}", count=260_000), 400),
    "numbers": (CHAT, lambda: filled(HEAD + '"metadata":[', "1.5", "]}"), 413),
    "deep variables": (CHAT, lambda: f'{HEAD}"chat_template_kwargs":{DEEP}}}', 400),
    "deep tools": (CHAT, lambda: HEAD + TOOLS % DEEP, 400),
    "deep arguments of a call": (CHAT, lambda: CALLED % DEEP, 400),
    "deep arguments in text": (CHAT, lambda: CALLED % orjson.dumps(DEEP).decode(), 200),
    "nested lists": (CHAT, lambda: filled(HEAD + '"metadata":[', "[1]", "]}"), 413),
    "objects": (CHAT, lambda: filled(HEAD + '"metadata":[', '{"a":1}', "]}"), 413),
    "quotes in a text": (TEXT, lambda: filled('{"prompt":"', r"\",", '"}'), 400),
    "brackets in a text": (TEXT, lambda: filled('{"prompt":"', r"\\[", '"}'), 400),
    "a huge user": (CHAT, lambda: filled(HEAD + '"user":"', "x", '"}'), 200),
    "a huge chat": (CHAT, lambda: filled('{"messages":[{"role":"user","content":"', "word ", '"}]}'), 400),
    "large messages": (
        CHAT,
        lambda: filled('{"messages":[', f'{{"role":"user","content":"{"x" * 1200}"}}', "]}", count=4000),
        400,
    ),
    "variables": (
        CHAT,
        lambda: filled(HEAD + '"chat_template_kwargs":{"shown":[', "1", "]}}", count=250_000),
        400,
    ),
}
"""Path, body, and the status that it gets."""


@pytest.mark.parametrize("name", HOSTILE | HIDDEN)
async def test_no_body_holds_up_the_event_loop(served: Served, name: str) -> None:
    path, make, status = (HOSTILE | HIDDEN)[name]
    body = make().encode()
    assert len(body) <= LIMIT
    served.engine.script = Script("a")
    answer = await quickly(lambda: post_from_outside(served, path, body))
    assert answer.status == status, answer.body[:500]
    if status != 200:
        assert len(answer.body) < 1000


async def test_what_stands_in_text_is_not_counted(served: Served) -> None:
    text = r"[{:,\"" * 300_000 + r"\\"
    assert len(text) > 3 * MAX_JSON_VALUES
    body = b'{"prompt":"%b","add_special_tokens":1}' % text.encode()
    assert (await post_from_outside(served, TEXT, body)).error["param"] == "add_special_tokens"


@pytest.mark.parametrize(
    ("item", "most", "word"),
    [
        ("1", MAX_JSON_VALUES, "values"),
        ("[]", MAX_JSON_PARTS, "objects"),
        ('{"a":1}', MAX_JSON_PARTS, "objects"),
    ],
)
async def test_values_and_parts_of_a_body_are_counted(
    served: Served, item: str, most: int, word: str
) -> None:
    cost = 2 if ":" in item else 1
    for num_items, status in ((most // cost - 10, 200), (most // cost + 10, 413)):
        body = HEAD + '"metadata":[' + ",".join([item] * num_items) + "]}"
        answer = await post_from_outside(served, CHAT, body.encode())
        assert answer.status == status
    assert answer.error["code"] == "request_too_large"
    assert f"more than {most} {word}" in answer.error["message"]


async def test_lists_of_tokens_are_bounded_over_all_choices(served: Served) -> None:
    listed = MAX_LISTED_TOKENS // 16
    for fields, status in (
        ({"n": 16, "stop_token_ids": [1] * listed}, 200),
        ({"n": 16, "stop_token_ids": [1] * (listed + 1)}, 400),
        ({"n": 1, "stop_token_ids": [1] * (listed + 1)}, 200),
        ({"n": 16, "stop_token_ids": [1], "allowed_token_ids": [1] * listed}, 400),
        ({"n": 16, "stop_token_ids": [1], "logit_bias": {"1": 1}}, 200),
    ):
        answer = await served.post(CHAT, {"messages": HELLO, **fields})
        assert answer.status == status
        if status == 400:
            assert answer.error["param"] == max(fields, key=lambda name: len(str(fields[name])))
            assert "16 choices" in answer.error["message"]
    answer = await served.post(TEXT, {"prompt": ["a"] * 17, "stop_token_ids": [1] * listed})
    assert answer.error["param"] == "stop_token_ids"


async def test_messages_and_their_parts_are_counted(served: Served) -> None:
    def chat(num_messages: int, num_parts: int) -> dict[str, Any]:
        parts = [{"type": "text", "text": ""}] * num_parts
        return {
            "messages": [
                *[{"role": "user", "content": ""}] * num_messages,
                {"role": "user", "content": parts},
            ]
        }

    for num_messages, num_parts in ((MAX_MESSAGES, 0), (1, MAX_MESSAGES), (4000, 5000)):
        answer = await served.post(CHAT, chat(num_messages, num_parts))
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert f"{num_messages + num_parts + 1} messages" in answer.error["message"]
    assert (await served.post(CHAT, chat(10, 500))).status == 200
