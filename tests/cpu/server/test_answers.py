"""Whole answers: fields, defaults and what reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.core.request import TokenLogprobs
from onbeat.server.chat import ChatCompletionRequest
from tests import fakes_engine
from tests.cpu.server.asking import CHAT, TEXT, ask_chat, ask_text
from tests.cpu.server.running import HELLO, Served, serving
from tests.fakes_engine import BOS, EOS, ByteTokenizer, FakeEngine, LeadingSpaceTokenizer
from tests.many_cases import each_case


async def test_defaults_are_openais(served: Served, engine: FakeEngine) -> None:
    await ask_text(served)
    await ask_chat(served)
    text, chat = (request.sampling for request in engine.requests)
    assert (text.max_tokens, text.temperature, text.top_p, text.top_k, text.num_logprobs) == (
        16,
        1,
        1,
        0,
        None,
    )
    assert text.stop_token_ids == (EOS,)
    assert chat.max_tokens == 2048 - 20
    assert text.seed != chat.seed


async def test_what_the_model_recommends_is_for_requests_that_state_nothing() -> None:
    engine = FakeEngine()
    engine.sampling_defaults |= {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    engine.sampling_defaults |= {"repetition_penalty": 1.05, "max_tokens": 99}
    async with serving(engine) as served:
        await ask_text(served)
        await ask_chat(served)
        for path, body in (
            ("/v1/responses", {"input": "hi"}),
            ("/v1/messages", {"model": "fake/model", "messages": HELLO, "max_tokens": 7}),
        ):
            assert (await served.post(path, body)).status == 200
        num_silent = len(engine.requests)
        await ask_chat(served, temperature=0, top_k=0, top_p=1, repetition_penalty=1, max_tokens=5)
    *silent, stated = (request.sampling for request in engine.requests)
    assert num_silent == 4
    for each in silent:
        assert (each.temperature, each.top_k, each.top_p, each.repetition_penalty) == (0.6, 20, 0.95, 1.05)
        assert type(each.top_k) is int
    assert [each.max_tokens for each in silent] == [16, 99, 99, 7]
    assert (stated.temperature, stated.top_k, stated.top_p, stated.repetition_penalty) == (0, 0, 1, 1)
    assert stated.max_tokens == 5


async def test_sampling_fields_reach_the_engine(served: Served, engine: FakeEngine) -> None:
    await ask_text(
        served,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        seed=-1,
        max_tokens=7,
        min_tokens=2,
        stop_token_ids=[33],
        ignore_eos=True,
        logit_bias={"5": 100, "6": -1.5},
        allowed_token_ids=[5, 6, 5],
        cache_salt="s",
        priority=0,
    )
    request = engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        1,
        -1,
        1.1,
    )
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_token_ids) == (7, 2, (33,))
    assert (sampling.logit_bias, sampling.allowed_token_ids) == (((5, 100.0), (6, -1.5)), (5, 6))
    assert sampling.seed == 2**63 - 1
    assert request.cache_salt == "s"
    assert request.arrival > 0


async def test_prompts_of_all_kinds(served: Served, engine: FakeEngine) -> None:
    await ask_text(served, prompt="ab")
    await ask_text(served, prompt="ab", add_special_tokens=False)
    await ask_text(served, prompt=[1, 2, 3])
    body = await ask_text(served, prompt=["ab", "c"], n=2, max_tokens=3)
    await ask_text(served, prompt=[[1], [2, 3]])
    prompts = [request.prompt_token_ids for request in engine.requests]
    ab, c = (BOS, 97, 98), (BOS, 99)
    assert prompts == [ab, ab[1:], (1, 2, 3), ab, ab, c, c, (1,), (2, 3)]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 12


async def test_truncation_keeps_the_end(served: Served, engine: FakeEngine) -> None:
    await ask_text(served, prompt=[1, 2, 3, 4], truncate_prompt_tokens=2)
    await ask_text(served, prompt=[5] * 5000, truncate_prompt_tokens=-1, max_tokens=48)
    await ask_text(served, prompt=[5] * 5000, truncate_prompt_tokens=-1)
    long_chat = [{"role": "user", "content": "a" * 5000}]
    await ask_chat(served, messages=long_chat, truncate_prompt_tokens=-1)
    sizes = [(len(request.prompt_token_ids), request.sampling.max_tokens) for request in engine.requests]
    assert sizes == [(2, 16), (2000, 48), (2032, 16), (2047, 1)]
    assert engine.requests[0].prompt_token_ids == (3, 4)


async def test_echo_goes_first_in_whole_and_streamed_answers(served: Served) -> None:
    body = await ask_text(served, prompt=["ab", "c"], echo=True, max_tokens=2)
    assert [choice["text"] for choice in body["choices"]] == ["abHe", "cHe"]
    body = await ask_text(served, prompt=[97, 99], echo=True, max_tokens=2)
    assert body["choices"][0]["text"] == "acHe"
    events = await served.events(TEXT, {"prompt": "ab", "echo": True, "max_tokens": 2})
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["abH", "e"]


async def test_echo_shows_what_truncation_left(served: Served) -> None:
    body = await ask_text(served, prompt=["abc", "d"], echo=True, max_tokens=2, truncate_prompt_tokens=2)
    assert [choice["text"] for choice in body["choices"]] == ["bcHe", "dHe"]
    assert body["usage"]["prompt_tokens"] == 4
    body = await ask_text(served, prompt=[97, 98, 99], echo=True, max_tokens=2, truncate_prompt_tokens=2)
    assert body["choices"][0]["text"] == "bcHe"
    body = await ask_text(served, prompt="abc", echo=True, max_tokens=2, truncate_prompt_tokens=-1)
    assert body["choices"][0]["text"] == "abcHe"


async def test_what_goes_on_keeps_its_leading_space(engine: FakeEngine) -> None:
    """Vocabularies that strip a text's first space: an answer to a chat is a text, a continuation is none."""
    engine.script.text = " Paris"
    async with serving(engine, tokenizer=LeadingSpaceTokenizer()) as served:
        (choice,) = (await ask_text(served, prompt="is", echo=True))["choices"]
        assert choice["text"] == "is Paris"
        (choice,) = (await ask_text(served, prompt="is", logprobs=0))["choices"]
        assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == " Paris"
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]
        (choice,) = (await ask_text(served, prompt="is", stop=[" Paris"]))["choices"]
        assert (choice["text"], choice["stop_reason"]) == ("", " Paris")
        (choice,) = (await ask_text(served, prompt=[BOS]))["choices"]
        assert choice["text"] == "Paris", "nothing goes before it"
        (choice,) = (await ask_chat(served))["choices"]
        assert choice["message"]["content"] == "Paris"
        messages = [*HELLO, {"role": "assistant", "content": "is"}]
        go_on = {"add_generation_prompt": False, "continue_final_message": True}
        (choice,) = (await ask_chat(served, messages=messages, **go_on))["choices"]
        assert choice["message"]["content"] == " Paris"


async def test_completion_logprobs_have_the_legacy_form(served: Served, engine: FakeEngine) -> None:
    engine.script.text = "é!"
    body = await ask_text(served, logprobs=4, max_tokens=3)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [r"bytes:\xc3", r"bytes:\xa9", "!"]
    assert logprobs["token_logprobs"] == pytest.approx([-0.5] * 3)
    assert logprobs["text_offset"] == [0, 0, 1]
    parts = [r"bytes:\xc3", r"bytes:\xc4", r"bytes:\xc5", r"bytes:\xc6"]
    assert list(logprobs["top_logprobs"][0]) == parts, "each has a name of its own"
    assert logprobs["top_logprobs"][2] == pytest.approx({"!": -0.5, '"': -1.5, "#": -2.5, "$": -9999.0})


class PairTokenizer(ByteTokenizer):
    """An even token and the next one stand for the same byte."""

    def token_bytes(self, token_id: int) -> bytes:
        return super().token_bytes(token_id & ~1 if token_id < EOS else token_id)


async def test_tokens_of_one_name_show_the_sampled_ones_value_or_the_likelier_ones(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = ord("b"), ord("d")
    engine.script.text = chr(a + 1)
    entry = TokenLogprobs(a + 1, -35.97, (a, b, b + 1), (-0.53, -1.5, -2.5))
    monkeypatch.setattr(fakes_engine, "_logprobs", lambda _request, token_ids: [entry for _ in token_ids])
    async with serving(engine, tokenizer=PairTokenizer()) as served:
        logprobs = (await ask_text(served, logprobs=3, max_tokens=1))["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["token_logprobs"]) == (["b"], [-35.97])
    assert logprobs["top_logprobs"] == [{"b": -35.97, "d": -1.5}]


async def test_logprobs_of_zero_report_the_sampled_token(served: Served, engine: FakeEngine) -> None:
    body = await ask_text(served, logprobs=0, max_tokens=1)
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"H": -0.5}]
    assert engine.requests[0].sampling.num_logprobs == 0


async def test_a_stop_token_of_the_callers_ends_the_answer_unshown(served: Served) -> None:
    body = await ask_chat(served, stop_token_ids=[ord(",")], return_token_ids=True)
    choice = body["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "stop")
    assert choice["stop_reason"] == ord(",")
    assert choice["token_ids"] == list(b"Hello,")
    assert body["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("ends", [{}, {"stop_token_ids": [ord("!")]}], ids=str)
async def test_with_token_ids_the_end_token_has_its_logprob_too(served: Served, ends: dict[str, Any]) -> None:
    fields = {
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "max_tokens": 99,
        **ends,
    }
    (choice,) = (await ask_text(served, **fields))["choices"]
    names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert choice["logprobs"]["text_offset"] == list(range(len(names)))
    events = await served.events(TEXT, {"prompt": "a", **fields})
    shown = [event["choices"][0]["logprobs"]["tokens"] for event in events[:-1]]
    assert [name for part in shown for name in part] == names
    (plain,) = (await ask_text(served, **{**fields, "return_token_ids": False}))["choices"]
    assert plain["logprobs"]["tokens"] == names[:-1]
    chat = (await ask_chat(served, **{**fields, "logprobs": True}))["choices"][0]
    assert [entry["token"] for entry in chat["logprobs"]["content"]] == names


async def test_max_completion_tokens_goes_before_max_tokens(served: Served) -> None:
    body = await ask_chat(served, max_completion_tokens=2, max_tokens=5)
    assert body["choices"][0]["message"]["content"] == "He"


async def prompt_of(served: Served, engine: FakeEngine, **fields: Any) -> str:
    await ask_chat(served, **fields)
    return bytes(engine.requests[-1].prompt_token_ids).decode()


async def test_chat_prompts(served: Served, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    assert await prompt_of(served, engine, messages=messages) == "[system]be\n[user]a\nb\n[assistant]"
    assert await prompt_of(served, engine, add_generation_prompt=False) == "[user]hi\n"
    assert await prompt_of(served, engine, chat_template_kwargs={"loud": True}) == "[user]hi\n[assistant]!"


async def test_the_final_message_can_be_continued(served: Served, engine: FakeEngine) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert await prompt_of(served, engine, messages=messages, **fields) == "[user]hi\n[assistant]Well, "


async def test_an_answer_can_be_sent_back_as_it_came(served: Served) -> None:
    first = await served.client.chat.completions.create(model="fake/model", messages=HELLO)
    message: Any = first.choices[0].message.model_dump()
    second = await served.client.chat.completions.create(
        model="fake/model", messages=[*HELLO, message, {"role": "user", "content": "and?"}]
    )
    assert second.choices[0].finish_reason == "stop"


HARMLESS = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "parallel_tool_calls": True,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "length_penalty": 1.0,
    "use_beam_search": False,
    "bad_words": [],
    "temperature": None,
    "stop": None,
    "stream_options": None,
    "spaces_between_special_tokens": True,
}


@each_case("field", HARMLESS)
async def test_fields_that_ask_for_nothing_are_accepted(served: Served, field: str) -> None:
    await ask_chat(served, **{field: HARMLESS[field]})


async def test_best_of_n_is_accepted(served: Served) -> None:
    assert len((await ask_text(served, n=2, best_of=2))["choices"]) == 2


async def test_tokenize_and_back(served: Served) -> None:
    answer = await served.post("/tokenize", {"prompt": "é", "return_token_strs": True})
    assert answer.json == {
        "count": 3,
        "max_model_len": 2048,
        "tokens": [BOS, 0xC3, 0xA9],
        "token_strs": ["<bos>", "<195>", "<169>"],
    }
    assert (await served.post("/tokenize", {"prompt": "é"})).json["token_strs"] is None
    assert (await served.post("/tokenize", {"messages": HELLO})).json["count"] == 20
    assert (await served.post("/tokenize", {"prompt": "", "add_special_tokens": False})).json["tokens"] == []
    assert (await served.post("/detokenize", {"tokens": [BOS, 0xC3, 0xA9]})).json == {"prompt": "<bos>é"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"chat_template_kwargs": {"loud": True}},
        {"reasoning_effort": "none", "max_tokens": 3, "temperature": 0, "seed": 1, "tools": []},
        {"skip_special_tokens": False, "return_token_ids": True, "stop": ["x"], "n": 2, "slo": {}},
        {"truncate_prompt_tokens": 4, "max_completion_tokens": 2},
        {"truncate_prompt_tokens": -1, "max_completion_tokens": 2030},
    ],
    ids=str,
)
async def test_tokenize_counts_what_chat_takes(
    served: Served, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    body = {"messages": [*HELLO, {"role": "assistant", "content": "Well"}], **fields}
    tokens = (await served.post("/tokenize", body)).json["tokens"]
    assert (await served.post(CHAT, body)).json["usage"]["prompt_tokens"] == len(tokens)
    assert list(engine.requests[0].prompt_token_ids) == tokens


async def test_tokenize_takes_the_fields_of_a_chat_without_a_word(served: Served) -> None:
    fields = dict.fromkeys(ChatCompletionRequest.model_fields)
    answer = await served.post("/tokenize", {**fields, "messages": HELLO})
    assert answer.status == 200, answer.body
    assert "x-onbeat-ignored-fields" not in answer.headers
    answer = await served.post("/tokenize", {"messages": HELLO, "add_special_token": True})
    assert (answer.status, answer.error["code"]) == (400, "unknown_parameter")


async def test_tokenize_refuses_what_chat_refuses(served: Served) -> None:
    for fields, param in (
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"tools": [{}]}, "tools[0].function"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ):
        answer = await served.post("/tokenize", {"messages": HELLO, **fields})
        assert (answer.status, answer.error["param"]) == (400, param)
