"""Responses and messages with reasoning and calls: streamed and whole answers are the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.request import Request, SamplingParams
from onbeat.server.answer_report import counts_of
from onbeat.server.choices import Choice, ChoiceDelta
from onbeat.server.messages import MessagePen
from onbeat.server.pen import AnswerHead, Extras, Pen, WholeChoice, event_bytes
from onbeat.server.pieces import in_pieces
from onbeat.server.response_request import ResponseRequest
from onbeat.server.responses import ResponsePen
from onbeat.text.reply.calls import CallEnd, CallStart, CallText, ContentText, ReasoningText, ReplyEvent

HEAD = AnswerHead("resp_7", 1, "m")
EVENTS: list[ReplyEvent] = [
    *(
        ReasoningText("hm"),
        ReasoningText('"\n'),
        ContentText("I "),
        ContentText("look"),
        CallStart(0, "c1", "f"),
    ),
    *(CallText(0, '{"a"'), CallText(0, ': "\\u00e9"}'), CallEnd(0), CallStart(1, "c2", "g"), CallEnd(1)),
]


def responses() -> Pen:
    return ResponsePen(HEAD, ResponseRequest.model_validate({"input": "x"}), None)  # type: ignore[arg-type]


def messages() -> Pen:
    return MessagePen(HEAD)


def deltas(groups: list[list[ReplyEvent]], finish: str) -> list[ChoiceDelta]:
    request = Request(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=9), arrival=0)
    choice = Choice(index=0, prompt_index=0, request=request, is_streamed=True)
    return [
        ChoiceDelta(choice, "", [], [], finish if index == len(groups) - 1 else None, events=list(group))
        for index, group in enumerate(groups)
    ]


def whole(answer: Pen, given: list[ChoiceDelta]) -> Any:
    choice = WholeChoice(given[0].choice, 0)
    for delta in given:
        choice.add(delta, ())
    extras = Extras(counts_of([given[0].choice]))
    return orjson.loads(b"".join(in_pieces(answer.whole([choice], extras))))


def streamed(answer: Pen, given: list[ChoiceDelta]) -> list[dict[str, Any]]:
    extras = Extras(counts_of([given[0].choice]))
    data = b"".join(event_bytes(answer.events(delta, Extras())) for delta in given)
    data += event_bytes(answer.end(extras))
    return [
        orjson.loads(part.partition(b"\ndata: ")[2]) for part in data.removesuffix(b"\n\n").split(b"\n\n")
    ]


def rebuilt_message(events: list[dict[str, Any]]) -> Any:
    """Do what Anthropic's client does."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                index, delta = event["index"], event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[index] = inputs.get(index, "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    message["content"][index][name] += delta[name]
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    for index, text in inputs.items():
        message["content"][index]["input"] = orjson.loads(text)
    return message


@given(st.lists(st.integers(0, len(EVENTS)), max_size=4), st.sampled_from(["stop", "length"]))
def test_a_streamed_answer_is_the_whole_one(cuts: list[int], finish: str) -> None:
    bounds = [0, *sorted(cuts), len(EVENTS)]
    given_deltas = deltas([EVENTS[a:b] for a, b in pairwise(bounds)], finish)
    events = streamed(responses(), given_deltas)
    assert events[-1]["response"] == whole(responses(), given_deltas)
    assert events[-1]["response"]["output"] == [e["item"] for e in events if e["type"].endswith("item.done")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert rebuilt_message(streamed(messages(), given_deltas)) == whole(messages(), given_deltas)


def test_parts_are_items_and_blocks() -> None:
    given_deltas = deltas([EVENTS], "stop")
    reasoning, message, *calls = whole(responses(), given_deltas)["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": 'hm"\n'}]
    assert message["content"][0]["text"] == "I look"
    assert [(call["call_id"], call["name"], call["arguments"]) for call in calls] == [
        ("c1", "f", '{"a": "\\u00e9"}'),
        ("c2", "g", ""),
    ]
    answer = whole(messages(), given_deltas)
    assert answer["stop_reason"] == "tool_use"
    assert answer["content"] == [
        {"type": "thinking", "thinking": 'hm"\n', "signature": ""},
        {"type": "text", "text": "I look"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "é"}},
        {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
    ]


@pytest.mark.parametrize("text", ['{"a": ', "[1]"])
def test_arguments_that_are_no_object_are_not_lost(text: str) -> None:
    answer = whole(messages(), deltas([[CallStart(0, "c", "f"), CallText(0, text)]], "length"))
    assert answer["content"][0]["input"] == {"INVALID_JSON": text}


def test_an_empty_answer_is_an_empty_text() -> None:
    given_deltas = deltas([[]], "stop")
    assert whole(messages(), given_deltas)["content"] == [{"type": "text", "text": ""}]
    assert streamed(responses(), given_deltas)[-1]["response"] == whole(responses(), given_deltas)
