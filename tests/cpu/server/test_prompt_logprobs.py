"""Log-probabilities of prompts, echo, and the small fields beside them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cpu.server.asking import CHAT, TEXT, ask_chat, ask_text
from tests.cpu.server.running import HELLO, Served, serving
from tests.fakes_engine import BOS, LOGPROB, FakeEngine
from tests.many_cases import each_case

INVALID: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (TEXT, {"prompt_logprobs": 21}, "prompt_logprobs"),
    (TEXT, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (TEXT, {"logprobs": -1}, "logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (TEXT, {"prompt_logprobs": -2}, "prompt_logprobs"),
    (TEXT, {"max_tokens": 0}, "max_tokens"),
    (TEXT, {"max_tokens": 0, "echo": True, "logprobs": 1, "logprob_token_ids": [5]}, "max_tokens"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"echo": True}, "echo"),
    (TEXT, {"logprob_token_ids": [5]}, "logprob_token_ids"),
    (CHAT, {"logprob_token_ids": [5]}, "logprob_token_ids"),
    (TEXT, {"logprobs": 1, "logprob_token_ids": [99999]}, "logprob_token_ids"),
    (TEXT, {"logprobs": 1, "logprob_token_ids": [5] * 129}, "logprob_token_ids"),
    (TEXT, {"truncation_side": "middle"}, "truncation_side"),
    (TEXT, {"bad_words": [" "]}, "bad_words"),
]


@each_case(("path", "fields", "param"), INVALID)
async def test_contradictions_are_named(
    served: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "ab"}
    answer = await served.post(path, {**prompt, **fields})
    assert answer.status == 400, answer.body
    assert answer.error["param"].startswith(param), answer.error


async def test_prompt_logprobs_have_vllms_shape(served: Served, engine: FakeEngine) -> None:
    body = await ask_text(served, prompt=["ab", "c"], n=2, prompt_logprobs=3, max_tokens=2)
    first = {
        "97": {"logprob": -1.0, "rank": 2, "decoded_token": "a"},
        "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        "99": {"logprob": -9999.0, "rank": 3, "decoded_token": "c"},
    }
    scores = [choice["prompt_logprobs"] for choice in body["choices"]]
    assert scores[0][:2] == [None, first]
    assert list(scores[0][1]) == ["97", "98", "99"], "its own token first"
    assert [len(each) for each in scores] == [3, 3, 2, 2]
    assert scores[0] == scores[1]
    asked = [request.num_prompt_logprobs for request in engine.requests]
    assert asked == [3, None, 3, None], "the choices of a prompt share them"
    chat = await ask_chat(served, prompt_logprobs=0, max_tokens=2)
    assert chat["prompt_logprobs"][0] is None
    assert [len(each) for each in chat["prompt_logprobs"][1:]] == [1] * (chat["usage"]["prompt_tokens"] - 1)


async def test_without_them_the_fields_are_null(served: Served) -> None:
    (choice,) = (await ask_text(served))["choices"]
    assert (choice["prompt_logprobs"], choice["token_ids"], choice["prompt_token_ids"]) == (None, None, None)
    assert (await ask_chat(served))["prompt_logprobs"] is None


async def test_a_prompt_of_one_token_has_a_null_alone(served: Served) -> None:
    (choice,) = (await ask_text(served, prompt=[97], prompt_logprobs=1, echo=True, logprobs=1, max_tokens=1))[
        "choices"
    ]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"] == [None, LOGPROB]


ECHO = {
    "tokens": ["<bos>", "a", "b", "H", "e"],
    "token_logprobs": [None, -1.0, -2.0, LOGPROB, LOGPROB],
    "text_offset": [0, 0, 1, 2, 3],
}


async def test_echo_with_logprobs_begins_with_the_prompt(served: Served) -> None:
    fields = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 2}
    (choice,) = (await ask_text(served, **fields))["choices"]
    assert choice["text"] == "abHe"
    logprobs = choice["logprobs"]
    tops = logprobs.pop("top_logprobs")
    assert logprobs == ECHO
    assert tops == [None, {"a": -1.0, "b": -0.5}, {"b": -2.0, "c": -0.5}, {"H": LOGPROB}, {"e": LOGPROB}]
    events = await served.events(TEXT, fields)
    streamed: dict[str, list[Any]] = {name: [] for name in ECHO}
    for event in events[:-1]:
        for name, values in streamed.items():
            values += event["choices"][0]["logprobs"][name]
    assert streamed == ECHO


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_alone(served: Served, stream: bool) -> None:
    fields = {"prompt": ["ab", "c"], "echo": True, "logprobs": 0, "max_tokens": 0}
    if stream:
        fields["stream_options"] = {"include_usage": True}
        events = await served.events(TEXT, fields)
        choices = sorted((event["choices"][0] for event in events[:2]), key=lambda each: each["index"])
        usage = events[2]["usage"]
    else:
        body = await ask_text(served, **fields)
        choices, usage = body["choices"], body["usage"]
    assert [choice["text"] for choice in choices] == ["ab", "c"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    assert choices[0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert choices[0]["logprobs"]["top_logprobs"] == [None, {"a": -1.0}, {"b": -2.0}]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 0)


async def test_offsets_count_the_text_that_is_shown(served: Served) -> None:
    for prompt, offsets in (
        ("ä", [0, 0, 0]),  # two tokens of one character, behind the start token
        ([BOS, 97, 98], [0, 5, 6]),
        ("<eos>", [0, 0, 1, 2, 3, 4]),
    ):
        body = await ask_text(served, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
        assert body["choices"][0]["logprobs"]["text_offset"] == offsets, prompt


async def test_tokens_may_be_named_by_their_ids(served: Served) -> None:
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    (choice,) = (await ask_text(served, prompt="a", echo=True, logprobs=1, **fields))["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{BOS}", "token_id:97", "token_id:72"]
    assert list(choice["logprobs"]["top_logprobs"][1]) == ["token_id:97", "token_id:98"]
    (choice,) = (await ask_chat(served, logprobs=True, top_logprobs=1, **fields))["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert (entry["token"], entry["bytes"], entry["top_logprobs"][0]["token"]) == (
        "token_id:72",
        [72],
        "token_id:72",
    )


async def test_the_first_tokens_may_be_kept(served: Served, engine: FakeEngine) -> None:
    for side in ("right", "left"):
        await ask_text(served, prompt=[1, 2, 3, 4], truncate_prompt_tokens=2, truncation_side=side)
    assert [request.prompt_token_ids for request in engine.requests] == [(1, 2), (3, 4)]
    body = {"prompt": "abcd", "add_special_tokens": False, "truncate_prompt_tokens": 2}
    tokens = (await served.post("/tokenize", {**body, "truncation_side": "right"})).json["tokens"]
    assert tokens == [97, 98]


async def test_fields_of_the_sampling_reach_the_engine(served: Served, engine: FakeEngine) -> None:
    await ask_text(served, bad_words=["x", " yz"], logprobs=5, logprob_token_ids=[7, 8, 7])
    sampling = engine.requests[0].sampling
    assert sampling.bad_words == ((120,), (121, 122))
    assert sampling.logprob_token_ids == (7, 8)


async def test_without_a_cap_the_whole_vocabulary_may_be_asked_for() -> None:
    engine = FakeEngine()
    async with serving(engine, max_logprobs=-1) as served:
        await ask_text(served, prompt="ab", prompt_logprobs=-1, logprobs=-1)
        answer = await served.post(TEXT, {"prompt": [5] * 2000, "prompt_logprobs": 4000})
    request = engine.requests[0]
    vocab_size = engine.info.vocab_size
    assert (request.num_prompt_logprobs, request.sampling.num_logprobs) == (vocab_size, vocab_size)
    assert (answer.status, answer.error["code"]) == (400, "answer_too_large")


async def test_the_tokenizer_is_described(served: Served) -> None:
    info = (await served.get("/tokenizer_info")).json
    assert info["tokenizer_class"] == "ByteTokenizer"
    assert (info["bos_token"], info["model_max_length"]) == ("<bos>", 2048)
