"""Every row of the error table, and what bad input gets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cpu.server.asking import CHAT, JSON, TEXT, check
from tests.cpu.server.running import HELLO, Served
from tests.fakes_engine import VOCAB_SIZE, FakeEngine
from tests.many_cases import each_case


@each_case(
    "raw",
    [b"", b"{", b"[]", b"1", b'"x"', b"null", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}'],
)
@each_case("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_malformed_json(served: Served, path: str, raw: bytes) -> None:
    check(await served.post(path, data=raw, headers=JSON), 400, "invalid_json")


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
async def test_numbers_that_json_lacks(served: Served, number: bytes) -> None:
    answer = await served.post(TEXT, data=b'{"prompt": "a", "temperature": %b}' % number, headers=JSON)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
async def test_other_content_types(served: Served, content_type: str) -> None:
    answer = await served.post(TEXT, data=b'{"prompt": "a"}', headers={"content-type": content_type})
    check(answer, 400, "invalid_content_type")


async def test_json_with_a_charset_is_json(served: Served) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    assert (await served.post(TEXT, data=b'{"prompt": "a"}', headers=headers)).status == 200


BAD_COMMON: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "16.5"}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": "9" * 20}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "0"}, "max_tokens"),
    ({"temperature": "inf"}, "temperature"),
    ({"temperature": "2.5"}, "temperature"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": 1, "stop_token_ids": list(range(VOCAB_SIZE))}, "min_tokens"),
    ({"min_tokens": 1, "allowed_token_ids": [7, 8], "stop_token_ids": [8, 7, 9]}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 10**30}, "n"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream": 0.0}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"priority": 1}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"model": 3}, "model"),
]


@pytest.mark.parametrize("number", [-(2**63) - 1, 2**64, 10**30])
async def test_numbers_beyond_64_bits_are_called_so(served: Served, number: int) -> None:
    message = check(await served.post(TEXT, {"prompt": "a", "seed": number}), 400, "invalid_value", "seed")
    assert "64 bits" in message


async def test_integers_may_be_written_with_a_point(served: Served, engine: FakeEngine) -> None:
    body = {"prompt": "a", "max_tokens": 5.0, "seed": -3.0, "top_k": 2.0, "n": 1.0, "logprobs": 1.0}
    assert (await served.post(TEXT, body)).json["usage"]["completion_tokens"] == 5
    assert engine.requests[0].sampling.top_k == 2
    assert (await served.post(CHAT, {"messages": HELLO, "max_completion_tokens": 3.0})).status == 200


async def test_numbers_and_booleans_may_be_written_as_text(served: Served, engine: FakeEngine) -> None:
    fields = {"max_tokens": "5", "seed": "-3", "temperature": "0.5", "top_p": "1", "ignore_eos": "True"}
    answer = await served.post(TEXT, {"prompt": "a", "logprobs": "1", "echo": "false", **fields})
    assert answer.json["usage"]["completion_tokens"] == 5
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.stop_token_ids) == (0.5, 1.0, ())
    chat = await served.post(CHAT, {"messages": HELLO, "logprobs": "true", "top_logprobs": "2", **fields})
    assert len(chat.json["choices"][0]["logprobs"]["content"]) == 5
    options = {"include_usage": "true", "continuous_usage_stats": "false"}
    body = {"messages": HELLO, "stream": "TRUE", "stream_options": options}
    assert (await served.post(CHAT, body)).body.endswith(b"data: [DONE]\n\n")
    strs = await served.post("/tokenize", {"prompt": "a", "return_token_strs": "1", "max_tokens": "3"})
    assert strs.json["token_strs"] == ["<bos>", "<97>"]


async def test_the_template_decides_which_roles_it_takes(served: Served, engine: FakeEngine) -> None:
    messages = [{"role": "Reviewer 2", "content": "no"}]
    assert (await served.post(CHAT, {"messages": messages})).status == 200
    assert bytes(engine.requests[0].prompt_token_ids).startswith(b"[Reviewer 2]no\n")
    messages[0]["role"] = "king"
    message = check(await served.post(CHAT, {"messages": messages}), 400, "invalid_value", "messages")
    assert "kings have no say" in message


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]], ids=str)
async def test_an_empty_stop_string_is_said_in_one_message(served: Served, stop: Any) -> None:
    message = check(await served.post(TEXT, {"prompt": "a", "stop": stop}), 400, "invalid_value", "stop")
    assert message.count("empty") == 1


@each_case(("fields", "param"), BAD_COMMON)
async def test_bad_values_of_both_endpoints(served: Served, fields: dict[str, Any], param: str) -> None:
    check(await served.post(TEXT, {"prompt": "a", **fields}), 400, "invalid_value", param)
    message = check(await served.post(CHAT, {"messages": HELLO, **fields}), 400, "invalid_value", param)
    assert param in message


@each_case(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "a" * 65, "content": "x"}]}, "messages"),
        ({"messages": [{"role": 3, "content": "x"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ],
)
async def test_bad_chats(served: Served, fields: dict[str, Any], param: str) -> None:
    answer = await served.post(CHAT, {"messages": HELLO, **fields})
    assert answer.status == 400
    assert answer.error["param"] == param
    assert answer.error["code"] in ("invalid_value", "missing_required_parameter", None)


@each_case(
    ("fields", "wanted"),
    [
        ({"slo": 5}, "slo is 5; it should be an object"),
        ({"messages": ["hi"]}, "messages[0] is 'hi'; it should be an object"),
        ({"messages": "hi"}, "messages is 'hi'; it should be an array"),
        ({"logit_bias": [1]}, "logit_bias is [1]; it should be an object"),
        ({"stream": True, "stream_options": 1}, "stream_options is 1; it should be an object"),
        (
            {"bad_words": ["a"] * 129},
            "bad_words is ['a', 'a', 'a', 'a', 'a', 'a', ...]; it should have at most 128 items, not 129",
        ),
        ({"slo": {"job": {"id": ""}}}, "slo.job.id is ''; it should have at least 1 character"),
        ({"stop": ["a", 5]}, "stop[1] is 5; it should be a valid string"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function is missing"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name is missing"),
        (
            {"tool_choice": {"type": "any"}},
            "tool_choice is {'type': 'any'}; it should be 'none', 'auto' or 'required' or it should be "
            "'function' or it should be 'allowed_tools'",
        ),
        (
            {"messages": [{"role": "user", "content": [5]}]},
            "messages[0].content[0] is 5; it should be a valid string or it should be an object",
        ),
    ],
)
async def test_types_are_named_as_json_names_them(
    served: Served, fields: dict[str, Any], wanted: str
) -> None:
    answer = await served.post(CHAT, {"messages": HELLO, **fields})
    assert (answer.status, answer.error["message"]) == (400, wanted)


@each_case(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 6}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
async def test_bad_completions(served: Served, fields: dict[str, Any], param: str) -> None:
    check(await served.post(TEXT, {"prompt": "a", **fields}), 400, "invalid_value", param)


async def test_a_body_that_is_packed_is_refused_in_words(served: Served) -> None:
    answer = await served.post(TEXT, {"prompt": "a"}, headers={"content-encoding": "gzip"})
    assert "'gzip'" in check(answer, 400, "invalid_content_type", None)
    answer = await served.post(
        TEXT, {"prompt": "a", "max_tokens": 1}, headers={"content-encoding": "identity"}
    )
    assert answer.status == 200


async def test_missing_fields_are_named(served: Served) -> None:
    check(await served.post(CHAT, {}), 400, "missing_required_parameter", "messages")
    check(await served.post(TEXT, {}), 400, "missing_required_parameter", "prompt")
    check(await served.post("/detokenize", {}), 400, "missing_required_parameter", "tokens")
    check(await served.post("/tokenize", {}), 400, "missing_required_parameter", "prompt")


@each_case(
    ("path", "body", "says"),
    [
        ("/rerank", {"query": "a", "docs": ["b"]}, "documents is missing; unknown fields: 'docs'"),
        ("/rerank", {"query": "a", "documnts": ["b"]}, "unknown field 'documnts'; did you mean 'documents'?"),
        (
            "/score",
            {"sentence": "a", "text_2": "b"},
            "text_1 is missing; send one of text_1, queries, data_1; un",
        ),
        (
            "/v1/embeddings",
            {"texts": ["a"]},
            "input is missing; send one of input, messages; unknown fields: 'te",
        ),
        (
            "/tokenize",
            {"content": "a"},
            "prompt is missing; send one of prompt, messages; unknown fields: 'cont",
        ),
        ("/detokenize", {"ids": [1]}, "tokens is missing; unknown fields: 'ids'"),
        (TEXT, {"text": "a"}, "prompt is missing; unknown fields: 'text'"),
        (CHAT, {"conversation": HELLO, "x": 1}, "messages is missing; unknown fields: 'conversation', 'x'"),
        (
            CHAT,
            {"messages": [{"roles": "user", "content": "a"}]},
            "unknown field 'messages[].roles'; did you mean",
        ),
        (CHAT, {"messages": [{"speaker": "user", "content": "a"}]}, "fields: 'messages[].speaker'"),
        (
            CHAT,
            {"messages": HELLO, "tools": [{"func": {}}]},
            "tools[0].function is missing; unknown fields: 't",
        ),
        ("/v1/responses", {"query": "a"}, "input is missing; unknown fields: 'query'"),
        ("/v1/responses", {"messages": HELLO}, "messages is not supported here; send input"),
        ("/v1/embeddings", {"prompt": "a"}, "prompt is not supported here; send input"),
        (TEXT, {"messages": HELLO}, "messages is not supported here; send them to /v1/chat/completions"),
    ],
)
async def test_a_missing_field_is_named_with_what_may_be_meant_for_it(
    served: Served, path: str, body: dict[str, Any], says: str
) -> None:
    answer = await served.post(path, body)
    assert answer.status == 400
    assert says in answer.error["message"]


UNSUPPORTED = {
    "audio": {"voice": "alloy"},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "x"},
    "use_beam_search": True,
    "length_penalty": 2.0,
    "logits_processors": ["x"],
    "best_of": 3,
    "suffix": "x",
}


@each_case("field", UNSUPPORTED)
async def test_unsupported_fields_are_named(served: Served, field: str) -> None:
    answer = await served.post(CHAT, {"messages": HELLO, field: UNSUPPORTED[field]})
    assert field in check(answer, 400, "unsupported_parameter", field)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0].type",
        ),
    ],
)
async def test_unsupported_messages_are_named(served: Served, message: dict[str, Any], param: str) -> None:
    check(await served.post(CHAT, {"messages": [message]}), 400, "unsupported_parameter", param)


async def test_unknown_inner_fields_are_named(served: Served) -> None:
    for fields, param in (
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"messages": [{"role": "user", "contents": "x", "content": "x"}]}, "messages[].contents"),
    ):
        answer = await served.post(CHAT, {"messages": HELLO, **fields})
        assert param in check(answer, 400, "unknown_parameter", param)
