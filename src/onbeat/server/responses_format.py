"""How answers look as OpenAI's responses, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from onbeat.server.answer_format import AnswerHead, Extras, WholeChoice, WholePart
from onbeat.server.chat import TokenWriter
from onbeat.server.choices import ChoiceDelta, ShownToken
from onbeat.server.errors import ErrorReply
from onbeat.server.pieces import Piece
from onbeat.server.streamed_parts import StreamedParts, named_event

if TYPE_CHECKING:
    from onbeat.server.responses import ResponseRequest

_ID_PREFIX = {"reasoning": "rs", "content": "msg", "call": "fc"}


class ResponseFormat:
    """Writes one response.

    Parameters
    ----------
    head : its id, time and model.
    body : what was asked for, some of which the answer repeats.
    writer : of log-probabilities.
    prompt : as the model sees it, where that is asked for.
    """

    def __init__(
        self, head: AnswerHead, body: ResponseRequest, writer: TokenWriter, prompt: str = ""
    ) -> None:
        self._head = head
        self._prompt = prompt
        self._has_logprobs = body.wants_logprobs
        self._has_messages = bool(body.enable_response_messages)
        self._writer = writer
        self._repeated = _repeated(body)
        self._parts: StreamedParts | None = None
        self._num_events = 0

    def columns(self, tokens: Sequence[ShownToken]) -> Sequence[bytes]:
        return (b",".join(map(self._writer.entry, tokens)),) if self._has_logprobs else ()

    def whole(self, choices: Sequence[WholeChoice], extras: Extras) -> Iterator[Piece]:
        (choice,) = choices
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        yield from self._response(status, choice, extras)

    def events(self, delta: ChoiceDelta, extras: Extras) -> bytes:  # noqa: ARG002 -- the last event has them
        columns, out = self.columns(delta.tokens), b""
        if self._parts is None:
            self._parts = StreamedParts(delta.choice, len(columns), self)
            start = b"".join(self._response("in_progress", None, Extras()))
            out = self._event_of("response.created", start) + self._event_of("response.in_progress", start)
        return out + self._parts.take(delta, columns)

    def end(self, extras: Extras) -> bytes:
        assert self._parts is not None, "a stream begins with a delta"
        choice = self._parts.whole
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        return self._event_of(f"response.{status}", b"".join(self._response(status, choice, extras)))

    def failed(self, reply: ErrorReply) -> bytes:
        choice = None if self._parts is None else self._parts.whole
        error = {"code": reply.code, "message": orjson.loads(reply.body)["error"]["message"]}
        pieces = self._response("failed", choice, Extras(), error=error)
        return self._event_of("response.failed", b"".join(pieces))

    def part_begins(self, index: int, part: WholePart) -> bytes:
        empty = WholePart(part.kind, bytearray(), part.call)
        item = b"".join(self._item(index, empty, "in_progress", ()))
        out = self._event(
            "response.output_item.added", {"output_index": index, "item": orjson.Fragment(item)}
        )
        if part.kind != "call":
            out += self._content_event(
                "response.content_part.added", index, part, {"part": _content(part.kind, "")}
            )
        return out

    def part_grows(self, index: int, part: WholePart, text: str, columns: Sequence[bytes]) -> bytes:
        if part.kind == "call":
            place = {"item_id": self._id(index, part), "output_index": index}
            return self._event("response.function_call_arguments.delta", {**place, "delta": text})
        if part.kind == "reasoning":
            return self._content_event("response.reasoning_text.delta", index, part, {"delta": text})
        logprobs = orjson.Fragment(b"[%b]" % b"".join(columns))
        return self._content_event(
            "response.output_text.delta", index, part, {"delta": text, "logprobs": logprobs}
        )

    def part_ends(self, index: int, part: WholePart, *, is_whole: bool) -> bytes:
        text = orjson.Fragment(b'"' + part.text + b'"')
        item = b"".join(self._item(index, part, "completed" if is_whole else "incomplete", ()))
        if part.kind == "call":
            assert part.call is not None
            done = {"item_id": self._id(index, part), "output_index": index, "name": part.call.name}
            out = self._event("response.function_call_arguments.done", {**done, "arguments": text})
        else:
            name = "reasoning_text" if part.kind == "reasoning" else "output_text"
            fields: dict[str, Any] = (
                {"text": text} if part.kind == "reasoning" else {"text": text, "logprobs": []}
            )
            out = self._content_event(f"response.{name}.done", index, part, fields)
            out += self._content_event(
                "response.content_part.done", index, part, {"part": _content(part.kind, text)}
            )
        return out + self._event(
            "response.output_item.done", {"output_index": index, "item": orjson.Fragment(item)}
        )

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        self._num_events += 1
        return named_event(kind, {"sequence_number": self._num_events - 1, **fields})

    def _event_of(self, kind: str, response: bytes) -> bytes:
        return self._event(kind, {"response": orjson.Fragment(response)})

    def _content_event(self, kind: str, index: int, part: WholePart, fields: dict[str, Any]) -> bytes:
        place = {"item_id": self._id(index, part), "output_index": index, "content_index": 0}
        return self._event(kind, {**place, **fields})

    def _id(self, index: int, part: WholePart) -> str:
        return f"{_ID_PREFIX[part.kind]}_{self._head.completion_id.partition('_')[2]}{index}"

    def _response(
        self, status: str, choice: WholeChoice | None, extras: Extras, *, error: dict[str, Any] | None = None
    ) -> Iterator[Piece]:
        """Yield a response with what there is of its answer."""
        is_cut = status == "incomplete"
        fields = {
            "id": self._head.completion_id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "model": self._head.model,
            **self._repeated,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": None if extras.usage is None else _usage(extras.usage),
        }
        if extras.slo is not None:
            fields["slo"] = extras.slo
        if choice is not None and self._has_messages:
            request, own = choice.choice.request, choice.choice.token_ids
            fields["input_messages"] = [_raw_message(request.prompt_token_ids, self._prompt)]
            fields["output_messages"] = [_raw_message(own, self._writer.text(own))]
        yield orjson.dumps(fields)[:-1] + b',"output":['
        if choice is not None:
            yield from self._output(choice, is_cut=is_cut)
        yield b"]}"

    def _output(self, choice: WholeChoice, *, is_cut: bool) -> Iterator[Piece]:
        parts = choice.parts or [WholePart("content", bytearray())]
        unsent: Sequence[Piece] = choice.columns
        for index, part in enumerate(parts):
            if index:
                yield b","
            is_whole = not is_cut or index < len(parts) - 1
            columns, unsent = (unsent, ()) if part.kind == "content" else ((), unsent)
            yield from self._item(index, part, "completed" if is_whole else "incomplete", columns)

    def _item(self, index: int, part: WholePart, status: str, columns: Sequence[Piece]) -> Iterator[Piece]:
        fields: dict[str, Any] = {"id": self._id(index, part), "status": status}
        if part.kind == "call":
            assert part.call is not None
            fields |= {"type": "function_call", "call_id": part.call.call_id, "name": part.call.name}
            yield orjson.dumps(fields)[:-1] + b',"arguments":"'
            yield part.text
            yield b'"}'
            return
        if part.kind == "reasoning":
            fields |= {"type": "reasoning", "summary": [], "encrypted_content": None}
        else:
            fields |= {"type": "message", "role": "assistant"}
        yield orjson.dumps(fields)[:-1] + b',"content":['
        if status != "in_progress":
            kind = b"reasoning_text" if part.kind == "reasoning" else b"output_text"
            yield b'{"type":"%b","text":"' % kind
            yield part.text
            yield b'"}' if part.kind == "reasoning" else b'","annotations":[],"logprobs":['
            if part.kind == "content":
                yield from columns
                yield b"]}"
        yield b"]}"


def _raw_message(token_ids: Sequence[int], text: str) -> dict[str, Any]:
    """Return a prompt or an answer as the model sees it."""
    return {"type": "raw_message_tokens", "message": text, "tokens": token_ids}


def _content(kind: str, text: str | orjson.Fragment) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }


def _repeated(body: ResponseRequest) -> dict[str, Any]:
    """Return the settings of a request that its answer repeats."""
    text = body.text
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "background": False,
        "store": False,
        "temperature": body.temperature,
        "text": {"format": (text.format if text else None) or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
