"""The parts of an answer as chat completions write them: reasoning, content, calls of tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from onbeat.server.answer_format import WholeChoice, WholePart
from onbeat.server.choices import ChoiceDelta
from onbeat.server.pieces import Piece
from onbeat.server.reply_fields import ToolUse
from onbeat.text.reply.events import CallStart, CallText, ContentText, ReasoningText, ReplyEvent


def finish_reason(finished: ChoiceDelta | WholeChoice, use: ToolUse | None) -> str | None:
    """Return why a choice ended, in OpenAI's words, which tell a call that the model chose."""
    reason = finished.finish_reason
    if reason != "stop" or use is None or use.named is not None or not finished.choice.num_calls:
        return reason
    return "tool_calls"


def event_delta(events: Sequence[ReplyEvent]) -> bytes:
    """Return the `delta` of a chunk."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case ReasoningText(text=text):
                for name in ("reasoning", "reasoning_content"):
                    delta[name] = delta.get(name, "") + text
            case ContentText(text=text):
                delta["content"] = delta.get("content", "") + text
            case CallStart(index=index, call_id=call_id, name=name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case CallText(index=index, text=text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return orjson.dumps(delta)


def whole_message(role: str, parts: Sequence[WholePart]) -> Iterator[Piece]:
    """Yield the message of a whole answer, in pieces."""
    calls = [part for part in parts if part.kind == "call"]
    has_content = not calls or any(part.kind == "content" for part in parts)
    # no null `refusal`: clients send the message back, and some make a field of their own out of it
    yield b'{"role":' + orjson.dumps(role) + b',"content":'
    yield from _text(parts, "content") if has_content else (b"null",)
    for name in ("reasoning", "reasoning_content") if any(part.kind == "reasoning" for part in parts) else ():
        yield b',"' + name.encode() + b'":'
        yield from _text(parts, "reasoning")
    if calls:
        yield b',"tool_calls":['
        for index, part in enumerate(calls):
            assert part.call is not None, "calls have one"
            yield b"," * bool(index) + b'{"id":' + orjson.dumps(part.call.call_id)
            yield b',"type":"function","function":'
            yield from _function(part)
            yield b"}"
        yield b"]"
    yield b"}"


def _text(parts: Sequence[WholePart], kind: str) -> Iterator[Piece]:
    yield b'"'
    yield from (part.text for part in parts if part.kind == kind)
    yield b'"'


def _function(part: WholePart) -> Iterator[Piece]:
    assert part.call is not None, "calls have one"
    yield b'{"name":' + orjson.dumps(part.call.name) + b',"arguments":"'
    yield part.text
    yield b'"}'
