"""Answers that must match something, from the real program with the embedded model."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.cpu.e2e.program import ServerProgram

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "Who is Ada Lovelace? Answer in JSON."}]


def post(server: ServerProgram, path: str, **fields: Any) -> httpx.Response:
    body = {"max_tokens": 120, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)


def chat(server: ServerProgram, **fields: Any) -> Any:
    answer = post(server, "chat/completions", messages=ASKED, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def text(server: ServerProgram, prompt: str, **fields: Any) -> tuple[str, str]:
    answer = post(server, "completions", prompt=prompt, **fields)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["text"], choice["finish_reason"]


DEEP = '{"items":' * 500 + "{}" + "}" * 500


def wide(num_properties: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(num_properties)}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


@pytest.mark.parametrize("strict", [True, False])
def test_a_schema(smollm2_server: ServerProgram, strict: bool) -> None:
    (choice,) = chat(smollm2_server, response_format=schema_format(PERSON, strict=strict))
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    assert choice["finish_reason"] == "stop"


def test_several_choices_at_a_temperature(smollm2_server: ServerProgram) -> None:
    found = chat(smollm2_server, response_format=schema_format(PERSON), n=4, temperature=1, seed=1)
    answers = [json.loads(choice["message"]["content"]) for choice in found]
    for answer in answers:
        jsonschema.validate(answer, PERSON)
    assert len({answer["name"] for answer in answers}) > 1


def test_any_object(smollm2_server: ServerProgram) -> None:
    (choice,) = chat(smollm2_server, response_format={"type": "json_object"}, max_tokens=300)
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"structured_outputs": {"regex": r"[A-Z][a-z]{2,8} \d{4}"}}, r"[A-Z][a-z]{2,8} \d{4}"),
        ({"guided_regex": r"\d{3}-\d{2}"}, r"\d{3}-\d{2}"),
        ({"guided_choice": ["Rome", 'a "quoted" one']}, 'Rome|a "quoted" one'),
        ({"guided_choice": ["no", "never"]}, "no|never"),
        ({"guided_grammar": 'root ::= "<" [a-c]+ ">" ("!" | "?")'}, "<[a-c]+>[!?]"),
        ({"structured_outputs": {"grammar": 'root ::= "x" "y"*'}}, "xy*"),
        ({"guided_grammar": 'start: "k=" NUMBER\nNUMBER: /[0-9]{1,3}/'}, "k=[0-9]{1,3}"),
        ({"structured_outputs": {"json": {"type": "integer", "maximum": 99, "minimum": 10}}}, r"\d\d"),
        ({"guided_json": json.dumps({"enum": ["a", 1, None]})}, '"a"|1|null'),
        ({"guided_json": {"const": {"a": [1]}}}, r'\{\s*"a"\s*:\s*\[\s*1\s*\]\s*\}'),
    ],
)
def test_other_constraints_and_names(
    smollm2_server: ServerProgram, fields: dict[str, Any], expected: str
) -> None:
    got, finish = text(smollm2_server, "The answer is", max_tokens=60, **fields)
    assert re.fullmatch(expected, got) or finish == "length", got


def test_streamed_is_whole(smollm2_server: ServerProgram) -> None:
    client: Any
    with openai.OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none") as client:
        fields: Any = {"model": "smollm2", "messages": ASKED, "response_format": schema_format(PERSON)}
        fields |= {"temperature": 0, "max_tokens": 120}
        whole = client.chat.completions.create(**fields)
        chunks = list(client.chat.completions.create(**fields, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=16)
    age: int = pydantic.Field(ge=0, le=150)
    friends: list[Literal["Bob", "Eve"]] = pydantic.Field(max_length=2)


def test_the_openai_client_parses(smollm2_server: ServerProgram) -> None:
    client: Any
    with openai.OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.parse(
            model="smollm2", messages=ASKED, response_format=Person, max_tokens=120, temperature=0
        )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_stop_strings_logprobs_and_biases_go_on_working(smollm2_server: ServerProgram) -> None:
    got, finish = text(
        smollm2_server, "Ada:", response_format=schema_format(PERSON), stop=['"age"'], logprobs=2
    )
    assert got.startswith("{")
    assert '"age"' not in got
    assert finish == "stop"


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        (
            {"response_format": schema_format({"type": "array", "uniqueItems": True}, strict=True)},
            "unsupported_schema",
            "'uniqueItems'",
        ),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "invalid_value", "both constrain"),
        ({"structured_outputs": {}}, "invalid_value", "names no constraint"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "unsupported_schema", "look-around"),
        ({"guided_grammar": "root ::= ((("}, "invalid_value", "GBNF"),
        ({"guided_grammar": "start: other"}, "unsupported_schema", "other"),
        (
            {"response_format": {"type": "json_schema"}},
            "missing_required_parameter",
            "json_schema is missing",
        ),
        ({"guided_json": {"multipleOf": 999_983}}, "grammar_too_complex", "multipleOf is 999983"),
        ({"guided_choice": []}, "invalid_value", "guided_choice"),
        ({"guided_grammar": "root ::= other"}, "invalid_value", "not valid GBNF"),
        ({"guided_grammar": "root ::= " + '"a" ' * 100_000}, "grammar_too_complex", "of text"),
        ({"guided_json": "{"}, "invalid_value", "not valid JSON"),
        ({"structural_tag": "{}"}, "unsupported_parameter", "structured_outputs"),
        ({"guided_json": "[1]"}, "invalid_value", "no JSON schema"),
        (
            {"response_format": schema_format(nested(100), strict=True)},
            "grammar_too_complex",
            "nested deeper",
        ),
        ({"guided_json": DEEP}, "grammar_too_complex", "nested deeper"),
        ({"guided_json": wide(500)}, "grammar_too_complex", "500 optional"),
        (
            {"guided_grammar": 'start: /[xyz]{40}/ s\ns: s s s | s s | "a"'},
            "grammar_too_complex",
            "guided_grammar",
        ),
        (
            {"guided_regex": f"[xyz]{{40}}({'|'.join(f'(.*{letter}){{3}}.*' for letter in 'abcdefghij')})"},
            "grammar_too_complex",
            "guided_regex",
        ),
        ({"guided_json": {"$ref": "#/x"}, "guided_regex": "a"}, "invalid_value", "both constrain"),
    ],
)
def test_what_cannot_be_enforced_is_refused(
    smollm2_server: ServerProgram, fields: dict[str, Any], code: str, words: str
) -> None:
    answer = post(smollm2_server, "completions", prompt="x", **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == code, error
    assert words in error["message"]
    assert error["param"].partition(".")[0] in fields or "both" in words


LIMITS = ("allowed_token_ids", "logit_bias", "min_tokens", "bad_words")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}, "allowed_token_ids": [2]},
        {"response_format": {"type": "json_object"}, "allowed_token_ids": [2], "logit_bias": {"2": -100}},
        {"structured_outputs": {"choice": ["yes", "no"]}, "allowed_token_ids": [2, 3]},
        {"guided_regex": "[0-9]{3}", "allowed_token_ids": [2], "ignore_eos": True, "temperature": 1},
        {"allowed_token_ids": "x", "bad_words": ["x"]},
    ],
)
def test_fields_that_leave_no_token_are_named(
    smollm2_server: ServerProgram, fields: dict[str, Any], stream: bool
) -> None:
    """It is the caller's mistake, and no 500, which clients would send again."""
    if fields["allowed_token_ids"] == "x":
        tokens = httpx.post(f"{smollm2_server.url}/tokenize", json={"prompt": "x"}).json()["tokens"]
        fields = {**fields, "allowed_token_ids": tokens}
    answer = post(smollm2_server, "completions", prompt="x", stream=stream, **fields)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert {name for name in LIMITS if name in message} == set(LIMITS) & fields.keys()
    assert all(name in message for name in ("response_format", "guided_regex") if name in fields)


def test_what_shows_late_is_no_error_of_the_server(smollm2_server: ServerProgram) -> None:
    """The first token may come and no second one: the stream is open by then."""
    tokens = httpx.post(f"{smollm2_server.url}/tokenize", json={"prompt": "ab"}).json()["tokens"]
    fields = {"guided_choice": ["abba"], "allowed_token_ids": tokens, "n": 1}
    streamed = post(smollm2_server, "completions", prompt="x", stream=True, **fields)
    assert streamed.status_code == 200, streamed.text
    *_, last = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert last["error"]["type"] == "invalid_request_error"
    assert post(smollm2_server, "completions", prompt="x", **fields).status_code == 400


def test_keywords_that_are_not_enforced_are_named(smollm2_server: ServerProgram) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "maxItems": 2, "uniqueItems": True}
    answer = post(smollm2_server, "completions", prompt="x", response_format=schema_format(schema))
    assert answer.status_code == 200
    name = "response_format.json_schema.schema.uniqueItems"
    assert answer.headers["x-onbeat-ignored-fields"] == name


def test_metrics_tell_what_was_compiled_and_refused(smollm2_server: ServerProgram) -> None:
    def values() -> dict[str, float]:
        page = httpx.get(f"{smollm2_server.url}/metrics").text
        found = re.findall(r"^(onbeat_(?:grammar|guided?)_\S+) (\S+)$", page, re.MULTILINE)
        return {name: float(value) for name, value in found}

    before = values()
    text(smollm2_server, "Say", guided_regex="(never|compiled) before", max_tokens=3)
    for _ in range(2):
        bad = post(smollm2_server, "completions", prompt="x", guided_json={"uniqueItems": True})
        assert bad.json()["error"]["code"] == "unsupported_schema"
    moved = {name: value - before[name] for name, value in values().items()}
    assert moved["onbeat_grammar_compile_seconds_count"] == 1
    assert 0 < moved["onbeat_grammar_compile_seconds_sum"] < 5
    assert moved['onbeat_grammar_refusals_total{reason="unsupported"}'] == 2
    assert moved['onbeat_guided_tokens_total{result="accepted"}'] + moved[
        'onbeat_guided_tokens_total{result="refused"}'
    ] == pytest.approx(3, abs=1)
