"""How answers look as Anthropic's messages, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from onbeat.server.answer_format import AnswerHead, Extras, WholeChoice, WholePart
from onbeat.server.answer_report import usage_of
from onbeat.server.choices import ChoiceDelta, ShownToken
from onbeat.server.errors import ErrorReply, anthropic_error
from onbeat.server.pieces import Piece
from onbeat.server.streamed_parts import StreamedParts, named_event

PING = named_event("ping", {})
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class MessageFormat:
    """Writes one message.

    Parameters
    ----------
    head : its id and model.
    """

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._parts: StreamedParts | None = None

    def columns(self, tokens: Sequence[ShownToken]) -> Sequence[bytes]:  # noqa: ARG002 -- the format's
        """Return nothing: this API has no log-probabilities."""
        return ()

    def whole(self, choices: Sequence[WholeChoice], extras: Extras) -> Iterator[Piece]:
        (choice,) = choices
        assert extras.usage is not None, "a whole answer has its usage"
        fields = {**self._fields(extras.usage), **_ending(choice)}
        if extras.slo is not None:
            fields["slo"] = extras.slo
        yield orjson.dumps(fields)[:-1] + b',"content":['
        for index, part in enumerate(choice.parts or [WholePart("content", bytearray())]):
            if index:
                yield b","
            yield from _block(part)
        yield b"]}"

    def events(self, delta: ChoiceDelta, extras: Extras) -> bytes:  # noqa: ARG002 -- the last events have them
        out = b""
        if self._parts is None:
            self._parts = StreamedParts(delta.choice, 0, self)
            usage = {**usage_of([delta.choice], delta), "completion_tokens": 0}
            start = {**self._fields(usage), "stop_reason": None, "stop_sequence": None, "content": []}
            out = named_event("message_start", {"message": start})
        return out + self._parts.take(delta, ())

    def end(self, extras: Extras) -> bytes:
        assert self._parts is not None, "a stream begins with a delta"
        assert extras.usage is not None, "the end of a stream has its usage"
        fields: dict[str, Any] = {"delta": _ending(self._parts.whole), "usage": _usage(extras.usage)}
        if extras.slo is not None:
            fields["slo"] = extras.slo
        return named_event("message_delta", fields) + named_event("message_stop", {})

    def failed(self, reply: ErrorReply) -> bytes:
        return b"event: error\ndata: " + anthropic_error(reply) + b"\n\n"

    def part_begins(self, index: int, part: WholePart) -> bytes:
        block = orjson.Fragment(b"".join(_block(WholePart(part.kind, bytearray(), part.call))))
        # Anthropic's streams have a ping behind the first of these.
        return named_event("content_block_start", {"index": index, "content_block": block}) + PING * (
            not index
        )

    def part_grows(self, index: int, part: WholePart, text: str, columns: Sequence[bytes]) -> bytes:  # noqa: ARG002
        kind, name = {
            "reasoning": ("thinking_delta", "thinking"),
            "content": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[part.kind]
        return named_event("content_block_delta", {"index": index, "delta": {"type": kind, name: text}})

    def part_ends(self, index: int, part: WholePart, *, is_whole: bool) -> bytes:  # noqa: ARG002 -- as the API has it
        return named_event("content_block_stop", {"index": index})

    def _fields(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._head.completion_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "usage": _usage(usage),
        }


def _block(part: WholePart) -> Iterator[Piece]:
    if part.kind == "call":
        assert part.call is not None
        start = {"type": "tool_use", "id": part.call.call_id, "name": part.call.name}
        yield orjson.dumps(start)[:-1] + b',"input":' + _input(part) + b"}"
        return
    yield (
        b'{"type":"thinking","signature":"","thinking":"'
        if part.kind == "reasoning"
        else b'{"type":"text","text":"'
    )
    yield part.text
    yield b'"}'


def _input(part: WholePart) -> bytes:
    """Return the arguments of a call, which this API has as an object, cut off or not."""
    text = orjson.loads(b'"' + part.text + b'"')
    try:
        is_object = isinstance(orjson.loads(text or "{}"), dict)
    except orjson.JSONDecodeError:
        is_object = False
    # the name that Anthropic's documentation gives to what is no JSON
    return (text or "{}").encode() if is_object else orjson.dumps({"INVALID_JSON": text})


def _ending(choice: WholeChoice) -> dict[str, Any]:
    reason = _STOP_REASONS[choice.finish_reason or "stop"]
    stop = choice.choice.stop_reason
    if reason == "end_turn" and any(part.kind == "call" for part in choice.parts):
        reason = "tool_use"
    elif reason == "end_turn" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - num_cached,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }
