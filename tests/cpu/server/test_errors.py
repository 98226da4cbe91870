"""Every row of the error table, and what bad input gets."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from onbeat.core.errors import InvalidRequest, Overloaded, PromptTooLong
from tests.cpu.server.running import HELLO, Answer, Served, serving
from tests.fakes_engine import VOCAB_SIZE, FakeEngine, Script

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}


def check(answer: Answer, status: int, code: str, param: str | None = None) -> str:
    """Check an error answer and return its message."""
    assert answer.status == status, answer.body
    error = answer.error
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert (error["type"], error["code"], error["param"]) == (kind, code, param)
    assert answer.headers["Content-Type"] == "application/json"
    assert "x-request-id" in answer.headers
    message: str = error["message"]
    return message


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"1", b'"x"', b"null", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}'],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
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
    assert message == "seed is a number of more than 64 bits; send a smaller one"


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
    assert message == "stop holds an empty string, which is not allowed; leave it out"


@pytest.mark.parametrize(("fields", "param"), BAD_COMMON, ids=lambda value: str(value)[:40])
async def test_bad_values_of_both_endpoints(served: Served, fields: dict[str, Any], param: str) -> None:
    check(await served.post(TEXT, {"prompt": "a", **fields}), 400, "invalid_value", param)
    message = check(await served.post(CHAT, {"messages": HELLO, **fields}), 400, "invalid_value", param)
    assert param in message


@pytest.mark.parametrize(
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
    ids=str,
)
async def test_bad_chats(served: Served, fields: dict[str, Any], param: str) -> None:
    answer = await served.post(CHAT, {"messages": HELLO, **fields})
    assert answer.status == 400
    assert answer.error["param"] == param
    assert answer.error["code"] in ("invalid_value", "missing_required_parameter", None)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"slo": 5}, "slo is 5; it should be an object"),
        ({"messages": ["hi"]}, "messages[0] is 'hi'; it should be an object"),
        ({"messages": "hi"}, "messages is 'hi'; it should be an array"),
        ({"logit_bias": [1]}, "logit_bias is [1]; it should be an object"),
        ({"stream": True, "stream_options": 1}, "stream_options is 1; it should be an object"),
    ],
    ids=str,
)
async def test_types_are_named_as_json_names_them(
    served: Served, fields: dict[str, Any], wanted: str
) -> None:
    answer = await served.post(CHAT, {"messages": HELLO, **fields})
    assert (answer.status, answer.error["message"]) == (400, wanted)


@pytest.mark.parametrize(
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
    ids=lambda value: str(value)[:40],
)
async def test_bad_completions(served: Served, fields: dict[str, Any], param: str) -> None:
    check(await served.post(TEXT, {"prompt": "a", **fields}), 400, "invalid_value", param)


async def test_missing_fields_are_named(served: Served) -> None:
    check(await served.post(CHAT, {}), 400, "missing_required_parameter", "messages")
    check(await served.post(TEXT, {}), 400, "missing_required_parameter", "prompt")
    check(await served.post("/detokenize", {}), 400, "missing_required_parameter", "tokens")
    check(await served.post("/tokenize", {}), 400, "invalid_value", "prompt")


UNSUPPORTED = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "response_format": {"type": "json_object"},
    "audio": {"voice": "alloy"},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "high",
    "structured_outputs": {"json": {}},
    "guided_json": {"type": "object"},
    "bad_words": ["x"],
    "prompt_logprobs": 1,
    "use_beam_search": True,
    "length_penalty": 2.0,
    "logits_processors": ["x"],
    "best_of": 3,
    "suffix": "x",
    "echo": True,
}


@pytest.mark.parametrize("field", UNSUPPORTED)
async def test_unsupported_fields_are_named(served: Served, field: str) -> None:
    answer = await served.post(CHAT, {"messages": HELLO, field: UNSUPPORTED[field]})
    assert field in check(answer, 400, "unsupported_parameter", field)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0].type",
        ),
    ],
)
async def test_unsupported_messages_are_named(served: Served, message: dict[str, Any], param: str) -> None:
    check(await served.post(CHAT, {"messages": [message]}), 400, "unsupported_parameter", param)


async def test_echo_with_logprobs_is_unsupported(served: Served) -> None:
    check(
        await served.post(TEXT, {"prompt": "a", "echo": True, "logprobs": 1}),
        400,
        "unsupported_parameter",
        "echo",
    )


async def test_unknown_inner_fields_are_named(served: Served) -> None:
    for fields, param in (
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"messages": [{"role": "user", "contents": "x", "content": "x"}]}, "messages[].contents"),
    ):
        answer = await served.post(CHAT, {"messages": HELLO, **fields})
        assert param in check(answer, 400, "unknown_parameter", param)


@pytest.mark.parametrize("depth", [500, 1020, 60_000])
async def test_deep_nesting(served: Served, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    for body in (
        '{"prompt": %s}',
        '{"prompt": "a", "stop": %s}',
        '{"prompt": "a", "tools": %s}',
        '{"messages": [{"role": "user", "content": %s}]}',
        '{"messages": [{"role": "user", "content": "show"}], "chat_template_kwargs": {"shown": %s}}',
    ):
        path = CHAT if "messages" in body else TEXT
        answer = await served.post(path, data=(body % deep).encode(), headers=JSON)
        assert answer.status in (200, 400) if "shown" in body else answer.status == 400, answer.body
        assert len(answer.body) < 2000 or answer.status == 200


async def test_too_long_prompts(served: Served) -> None:
    exact = {"prompt": [1] * 2000, "max_tokens": 48}
    assert (await served.post(TEXT, exact)).status == 200
    for fields, path in (
        ({"prompt": [1] * 2000, "max_tokens": 49}, TEXT),
        ({"prompt": [1] * 2048}, TEXT),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, CHAT),
        ({"messages": HELLO, "max_completion_tokens": 2048}, CHAT),
    ):
        answer = await served.post(path, fields)
        check(answer, 400, "context_length_exceeded", "prompt" if path == TEXT else "messages")


async def test_a_huge_text_is_refused_without_tokenizing_it(served: Served) -> None:
    message = check(
        await served.post(TEXT, {"prompt": "x" * 9_000_000}), 400, "context_length_exceeded", "prompt"
    )
    assert "at least" in message


async def test_what_the_engine_refuses_keeps_its_status(served: Served, engine: FakeEngine) -> None:
    for error, status, code in (
        (InvalidRequest("no", param="prompt"), 400, "invalid_value"),
        (PromptTooLong("larger than the KV cache"), 400, "context_length_exceeded"),
    ):
        engine.script = Script(reject=error)
        check(await served.post(TEXT, {"prompt": "a", "stream": True}), status, code, "prompt")
    engine.script = Script(reject=Overloaded("the queue is full"))
    answer = await served.post(TEXT, {"prompt": "a"})
    check(answer, 503, "server_overloaded")
    assert int(answer.headers["Retry-After"]) >= 1


async def test_unknown_model_path_and_method(served: Served) -> None:
    check(await served.post(TEXT, {"prompt": "a", "model": "gpt-4"}), 404, "model_not_found", "model")
    check(await served.get("/v1/models/gpt-4"), 404, "model_not_found", "model")
    check(await served.get("/v2/other"), 404, "not_found")
    answer = await served.get(CHAT)
    check(answer, 405, "method_not_allowed")
    assert answer.headers["Allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/v1/embeddings", "embeddings are"),
        ("/v1/responses", "the Responses API is"),
        ("/v1/responses/resp_1/cancel", "the Responses API is"),
        ("/v1/messages", "Anthropic's Messages API is"),
        ("/api/chat", "Ollama's API is"),
        ("/api/generate", "Ollama's API is"),
        ("/completion", "llama.cpp's own API is"),
        ("/v1/rerank", "reranking, scores and classes are"),
        ("/v1/audio/transcriptions", "sound is"),
        ("/v1/images/generations", "making images is"),
    ],
)
async def test_an_endpoint_of_other_servers_is_told_to_be_missing(
    served: Served, path: str, what: str
) -> None:
    for answer in (await served.post(path, {"model": "m", "input": "a"}), await served.get(path)):
        check(answer, 404, "not_found")
        said = f"{what} not in this version of onbeat; GET /docs lists its paths"
        assert answer.error["message"] == said


@pytest.mark.parametrize("path", ["/v1/embeddingsx", "/v1", "/apix", "/v1/completion"])
async def test_other_paths_are_plainly_not_there(served: Served, path: str) -> None:
    assert (await served.get(path)).error["message"] == "there is no such path; GET /docs lists them"


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        ({"a": 1, "5": 1, "-1": 1}, "logit_bias has the keys 'a', '-1'; keys are token ids"),
        ({f"k{i}": 1 for i in range(9)}, "'k0', 'k1', 'k2', 'k3' and 5 more; keys are token ids"),
        ({"x": 1}, "logit_bias has the key 'x'; keys"),
        ({"5": 101, "6": "a", "7": 1}, "logit_bias has 101, 'a' for '5', '6'; it takes numbers from -100"),
        ({"5": 1, "90000": 1, "90001": 1}, "logit_bias holds the token ids 90000, 90001; this model's"),
    ],
)
async def test_a_few_bad_entries_of_logit_bias_are_named(
    served: Served, bias: dict[str, object], said: str
) -> None:
    answer = await served.post(TEXT, {"prompt": "a", "logit_bias": bias})
    check(answer, 400, "invalid_value", "logit_bias")
    assert said in answer.error["message"]


async def test_errors_are_answered_without_threads(served: Served) -> None:
    before = threading.active_count()
    answers = await asyncio.gather(*(served.get("/no/such/path") for _ in range(40)))
    assert {answer.status for answer in answers} == {404}
    assert threading.active_count() == before


async def test_a_base_model_has_no_chat(engine: FakeEngine) -> None:
    async with serving(engine, has_template=False) as served:
        message = check(await served.post(CHAT, {"messages": HELLO}), 400, "no_chat_template")
        assert "chat template" in message
        assert (await served.post(TEXT, {"prompt": "a"})).status == 200


async def test_priority_is_accepted_where_it_has_an_effect() -> None:
    engine = FakeEngine(priority_scheduling=True)
    async with serving(engine) as served:
        assert (await served.post(TEXT, {"prompt": "a", "priority": -3})).status == 200
    assert engine.requests[0].priority == -3


@pytest.mark.parametrize("served", [{"max_body_bytes": 1000}], indirect=True)
async def test_large_bodies_with_and_without_a_length(served: Served) -> None:
    body = b'{"prompt": "%b"}' % (b"x" * 2000)
    check(await served.post(TEXT, data=body, headers=JSON), 413, "request_too_large")

    async def chunks() -> Any:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    check(await served.post(TEXT, data=chunks(), headers=JSON), 413, "request_too_large")
    assert (await served.post(TEXT, {"prompt": "x" * 900})).status == 200


async def test_a_body_over_the_default_limit(served: Served) -> None:
    check(await served.post(TEXT, {"prompt": "x" * 11_000_000}), 413, "request_too_large")


async def test_bugs_are_logged_and_not_shown(
    served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(request: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(engine, "generate", broken)
    with caplog.at_level(logging.ERROR, "onbeat.server"):
        answer = await served.post(TEXT, {"prompt": "a"})
    message = check(answer, 500, "internal_error")
    assert "secret" not in message
    assert "ZeroDivisionError" in caplog.text


async def test_bugs_in_mid_stream_end_the_stream(
    served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = engine.generate

    async def broken(request: Any) -> Any:
        async for delivery in real(request):
            yield delivery
            raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(engine, "generate", broken)
    events = await served.events(TEXT, {"prompt": "a"})
    assert (events[-2]["error"]["code"], events[-1]) == ("internal_error", "[DONE]")
    assert "secret" not in str(events)
    assert "ZeroDivisionError" in caplog.text
