"""Fields that the server does not honour: ignored and named, taken for a slip of the pen, or refused."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from onbeat.server.reply_fields import unread_variables
from tests.cpu.server.asking import check
from tests.cpu.server.running import HELLO, Answer, Served
from tests.fakes_engine import FakeEngine
from tests.many_cases import each_case

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "a"}}
ROOT = Path(__file__).parents[3]
IGNORED = "x-onbeat-ignored-fields"


async def chat(served: Served, **fields: Any) -> Answer:
    return await served.post(CHAT, {"messages": HELLO, **fields})


def refused(answer: Answer) -> tuple[str, str]:
    """Return code and message of a 400."""
    assert answer.status == 400, answer.body
    return answer.error["code"], answer.error["message"]


async def test_unknown_fields_are_taken_and_named(served: Served) -> None:
    answer = await chat(served, xyzzy=1, provider={"order": []})
    assert (answer.status, answer.headers[IGNORED]) == (200, "xyzzy, provider")
    assert IGNORED not in (await chat(served)).headers


async def test_streams_and_errors_name_them_too(served: Served) -> None:
    assert (await chat(served, xyzzy=1, stream=True)).headers[IGNORED] == "xyzzy"
    answer = await chat(served, xyzzy=1, temperature=7)
    assert (answer.status, answer.headers[IGNORED]) == (400, "xyzzy")


async def test_unknown_fields_of_messages_and_parts_are_taken(served: Served, engine: FakeEngine) -> None:
    part = {"type": "text", "text": "hi", "lang": "en"}
    messages = [
        {"role": "user", "content": [part, part], "id": "m1"},
        {"role": "assistant", "content": "yes", "id": "m2", "provider_specific_fields": {"refusal": None}},
        {"role": "user", "content": "why?", "metadata": {}},
    ]
    answer = await served.post(CHAT, {"messages": messages})
    assert answer.status == 200, answer.body
    names = ["messages[].id", "messages[].provider_specific_fields", "messages[].metadata"]
    assert answer.headers[IGNORED].split(", ") == [*names, "messages[].content[].lang"]
    assert b"[assistant]yes" in bytes(engine.requests[0].prompt_token_ids)


async def test_no_name_breaks_the_header(served: Served) -> None:
    answer = await chat(served, **{"a\r\nSet-Cookie: b": 1, "größe, €": 2, "w" * 5000: 3})
    assert answer.headers[IGNORED] == f"a??Set-Cookie:?b, gr??e???, {'w' * 100}"


@each_case(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("top-p", "top_p"),
        ("maxTokens", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("repeat_penalty", "repetition_penalty"),
        ("stop_token", "stop_token_ids"),
        ("slo_class", "slo.class"),
        ("slo_ttft_ms", "slo.ttft_ms"),
    ],
)
async def test_a_slip_of_the_pen_is_refused(served: Served, name: str, meant: str) -> None:
    code, message = refused(await served.post(TEXT, {"prompt": "a", name: 1}))
    assert code == "unknown_parameter"
    assert f"mean {meant!r}" in message


async def test_a_slip_of_the_pen_in_a_message_is_refused(served: Served) -> None:
    messages = [{"role": "user", "content": "x", "reasoning_contnt": "x"}]
    code, message = refused(await served.post(CHAT, {"messages": messages}))
    assert (code, "'reasoning_content'" in message) == ("unknown_parameter", True)


@each_case("name", ["cache_prompt", "user_id", "agent", "rid", "keep_alive"])
async def test_foreign_names_are_no_slips(served: Served, name: str) -> None:
    assert (await chat(served, **{name: True})).status == 200


async def test_too_many_unknown_fields_are_refused(served: Served) -> None:
    code, message = refused(await chat(served, **{f"zz{i}": 1 for i in range(60_000)}))
    assert (code, "60000" in message) == ("unknown_parameter", True)
    messages = [{"role": "user", "content": "x", f"zz{i}": 1} for i in range(1000)]
    assert "messages[]" in refused(await served.post(CHAT, {"messages": messages}))[1]


@each_case(
    "fields",
    [
        {"tools": []},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"functions": [], "function_call": "none"},
        {"response_format": {"type": "text"}},
        {"reasoning_effort": None},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"guided_grammar": ""},
        {"cache_prompt": True},
        {"truncation_side": "left", "truncate_prompt_tokens": 3},
        {"verbosity": "medium", "mcp_servers": []},
    ],
)
async def test_what_asks_for_nothing_is_taken(served: Served, fields: dict[str, Any]) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})):
        answer = await served.post(path, {**body, **fields})
        assert answer.status == 200, answer.body
        assert IGNORED not in answer.headers


@each_case(
    "fields",
    [
        {"verbosity": "low"},
        {"mcp_servers": [{"type": "url", "url": "https://a.example", "name": "a"}]},
        {"use_beam_search": True},
        {"functions": [{"name": "f"}]},
    ],
)
async def test_what_would_change_the_output_is_refused(served: Served, fields: dict[str, Any]) -> None:
    answer = await chat(served, **fields)
    assert (refused(answer)[0], answer.error["param"]) == ("unsupported_parameter", next(iter(fields)))


ASKED_OF_OTHERS: dict[str, dict[str, Any]] = {
    "vLLM": {
        "watermarking": True,
        "return_token_offsets": True,
        "return_prompt_text": True,
        "ec_transfer_params": {"a": 1},
        "early_stopping": True,
    },
    "OpenAI": {"max_output_tokens": 3},
    "Anthropic": {"stop_sequences": ["a"], "max_tokens_to_sample": 3, "system": "Be brief."},
}
"""What changes the output of the servers whose APIs these are."""


@pytest.mark.parametrize("whose", ASKED_OF_OTHERS)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_what_changes_the_output_of_others_is_never_ignored(
    served: Served, engine: FakeEngine, whose: str, path: str
) -> None:
    for name, value in ASKED_OF_OTHERS[whose].items():
        answer = await served.post(path, {**ASKED[path], name: value})
        assert (refused(answer)[0], answer.error["param"]) == ("unsupported_parameter", name)
        assert (await served.post(path, {**ASKED[path], name: None})).status == 200
    assert all(request.sampling.max_tokens > 3 for request in engine.requests)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("max_output_tokens", "send max_tokens"),
        ("top_logprobs", "send logprobs"),
        ("n_predict", "send max_tokens"),
        ("num_predict", "send max_tokens"),
        ("grammar", "send structured_outputs.grammar"),
        ("ebnf", "send structured_outputs.grammar"),
        ("regex", "send structured_outputs.regex"),
        ("json_schema", "send structured_outputs.json"),
        ("messages", "send them to /v1/chat/completions"),
    ],
)
async def test_the_field_that_does_the_same_is_named(served: Served, name: str, instead: str) -> None:
    assert instead in refused(await served.post(TEXT, {"prompt": "a", name: 3}))[1]


@pytest.mark.parametrize("field", ["audio", "function_call"])
async def test_what_a_message_carries_for_others_is_never_ignored(served: Served, field: str) -> None:
    message = {"role": "assistant", "content": "a", field: {"name": "f", "arguments": ""}}
    answer = await served.post(CHAT, {"messages": [*HELLO, message]})
    assert (refused(answer)[0], answer.error["param"]) == ("unsupported_parameter", f"messages[1].{field}")


FOREIGN: dict[str, Any] = {
    "stop_regex": "a+",
    "reasoning": {"effort": "low"},
    "enable_thinking": True,
    "input_ids": [1],
    "dry_multiplier": 0.8,
    "mirostat": 2,
    "options": {"num_predict": 3},
    "think": True,
    "top_a": 0.1,
    "typ_p": 0.9,
    "typical_p": 0.5,
    "return_tokens": True,
    "return_prompt_token_ids": True,
    "encoder_repetition_penalty": 1.2,
    "adapter_id": "a",
    "truncate": 3,
}
"""Fields of SGLang, llama.cpp, Ollama, TGI and transformers."""


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_fields_of_other_servers_are_named_as_ignored(served: Served, path: str) -> None:
    answer = await served.post(path, {**ASKED[path], **FOREIGN})
    assert (answer.status, answer.headers[IGNORED].split(", ")) == (200, [*FOREIGN])


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": ""}, None),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": False}, False),
        ({"thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
    ids=str,
)
async def test_templates_learn_whether_reasoning_is_wanted(
    served: Served, fields: dict[str, Any], thinks: bool | None
) -> None:
    answer = await served.post("/tokenize", {"messages": HELLO, **fields})
    prompt = bytes(answer.json["tokens"])
    assert (b"<thinking>" in prompt, b"<no thinking>" in prompt) == (thinks is True, thinks is False)
    assert (await chat(served, **fields)).json["usage"]["prompt_tokens"] == len(prompt)


async def test_templates_learn_how_much_reasoning_is_wanted(served: Served, engine: FakeEngine) -> None:
    thinking = {"type": "enabled", "budget_tokens": 9}
    body = {"reasoning_effort": "low", "thinking": thinking, "chat_template_kwargs": {"loud": True}}
    answer = await chat(served, **body)
    assert bytes(engine.requests[0].prompt_token_ids).endswith(b"<thinking>low[assistant]!")
    assert answer.headers[IGNORED] == "thinking.budget_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": "high", "thinking": False}, "reasoning_effort"),
        ({"thinking": {"type": "perhaps"}}, "thinking"),
    ],
    ids=str,
)
async def test_wrong_ways_to_ask_for_reasoning(served: Served, fields: dict[str, Any], param: str) -> None:
    answer = await chat(served, **fields)
    assert (refused(answer)[0], answer.error["param"]) == ("invalid_value", param)
    assert refused(await served.post(TEXT, {"prompt": "a", **fields}))[0] == "unsupported_parameter"


def test_variables_that_no_template_reads_are_named() -> None:
    asked = {"reasoning_effort": "low", "enable_thinking": True}
    assert unread_variables(asked, "{{ messages }}") == [f"chat_template_kwargs.{name}" for name in asked]
    assert unread_variables(asked, "{{ reasoning_effort }}") == []
    assert unread_variables({"enable_thinking": False}, "{{ messages }}") == []
    assert unread_variables(None, "") == []


async def test_reasoning_of_earlier_answers_reaches_the_template(served: Served, engine: FakeEngine) -> None:
    for field in ("reasoning", "reasoning_content"):
        answer = {"role": "assistant", "content": "yes", field: "hm"}
        assert (await served.post(CHAT, {"messages": [*HELLO, answer, *HELLO]})).status == 200
    assert [b"(hm)" in bytes(request.prompt_token_ids) for request in engine.requests] == [True, True]


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
async def test_parts_with_text_are_joined_by_line(served: Served, engine: FakeEngine, kind: str) -> None:
    parts = [{"type": kind, "text": "Summarise this:"}, {"type": kind, "text": "Doc."}, "Thanks."]
    await served.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert b"[user]Summarise this:\nDoc.\nThanks.\n" in bytes(engine.requests[0].prompt_token_ids)


async def test_refusal_parts_hold_text(served: Served, engine: FakeEngine) -> None:
    parts = [{"type": "refusal", "refusal": "I cannot"}]
    await served.post(CHAT, {"messages": [*HELLO, {"role": "assistant", "content": parts}, *HELLO]})
    assert b"[assistant]I cannot" in bytes(engine.requests[0].prompt_token_ids)


@each_case(
    ("path", "field", "value"),
    [
        (CHAT, "prompt", "a"),
        (TEXT, "messages", HELLO),
        (TEXT, "max_completion_tokens", 5),
        (TEXT, "top_logprobs", 1),
    ],
)
async def test_what_only_the_other_endpoint_has_is_refused(
    served: Served, path: str, field: str, value: Any
) -> None:
    check(await served.post(path, {**ASKED[path], field: value}), 400, "unsupported_parameter", field)
    answer = await served.post(path, {**ASKED[path], field: None})
    assert (answer.status, IGNORED in answer.headers) == (200, False)


async def test_what_templates_take_is_harmless_where_there_is_none(served: Served) -> None:
    fields = {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"a": 1},
    }
    answer = await served.post(TEXT, {"prompt": "a", **fields})
    assert (answer.status, IGNORED in answer.headers) == (200, False)


@each_case("path", [CHAT, TEXT])
@each_case("name", ["logprobs", "stream", "ignore_eos"])
async def test_a_word_for_a_boolean_is_refused_by_name(served: Served, path: str, name: str) -> None:
    answer = await served.post(path, {**ASKED[path], name: "yes"})
    assert (refused(answer)[0], answer.error["param"]) == ("invalid_value", name)
    wanted = "a valid integer" if (path, name) == (TEXT, "logprobs") else "true or false"
    assert re.fullmatch(f"{name} is 'yes'; .* {wanted}", answer.error["message"])


def test_the_page_of_fields_is_what_the_server_does() -> None:
    page = runpy.run_path(str(ROOT / "scripts/fields"))["page"]()
    written = (ROOT / "docs/compatibility.md").read_text().rstrip("\n")
    assert page == written, "run `make flags`"


def test_the_tables_of_the_api_are_what_the_server_declares() -> None:
    page = runpy.run_path(str(ROOT / "scripts/api"))["page"]()
    assert page == (ROOT / "docs/api.md").read_text(), "run `make flags`"
