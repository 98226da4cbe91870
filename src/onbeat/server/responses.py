"""How the answers of POST /v1/responses look, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from onbeat.server.answer_report import AnswerTokens, SLOReport
from onbeat.server.choices import ChoiceDelta, ShownToken
from onbeat.server.errors import ErrorReply
from onbeat.server.logprobs import LogprobWriter, TokenLogprob
from onbeat.server.pen import AnswerHead, Extras, Part, StreamedParts, WholeChoice
from onbeat.server.pieces import Piece, list_of, written
from onbeat.server.response_request import ResponseRequest

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
_ID_PREFIX = {"reasoning": "rs", "content": "msg", "call": "fc"}


class Content(Struct):
    """Reasoning, or text."""

    type: Literal["reasoning_text", "output_text"]
    text: str
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class Item(Struct):
    """A part of a response."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    type: Literal["reasoning", "message", "function_call"]
    role: Literal["assistant"] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    encrypted_content: str | UnsetType | None = UNSET
    content: list[Content] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class InputDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ModelResponse(Struct, kw_only=True):
    """OpenAI's response. From `instructions` to `user` it repeats what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    background: bool
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    user: str | None
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    usage: ResponseUsage | None = None
    slo: SLOReport | UnsetType = UNSET
    output: list[Item] = []


class ResponseEvent(Struct):
    """An event of a stream; `type` says what it tells."""

    type: str
    sequence_number: int
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    response: ModelResponse | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    part: Content | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class ResponsePen:
    """Writes one response.

    Parameters
    ----------
    head : its id, time and model.
    body : what was asked for, some of which the answer repeats.
    writer : of log-probabilities.
    """

    end_mark = b""

    def __init__(self, head: AnswerHead, body: ResponseRequest, writer: LogprobWriter) -> None:
        self._head = head
        self._body = body
        self._writer = writer
        self._parts: StreamedParts | None = None
        self._num_events = 0
        _, _, self._suffix = head.completion_id.partition("_")

    def columns(self, tokens: Sequence[ShownToken]) -> Sequence[bytes]:
        return self._writer.chat_columns(tokens) if self._body.wants_logprobs else ()

    def whole(self, choices: Sequence[WholeChoice], extras: Extras) -> ModelResponse:
        return self._ended(choices[0], extras)

    def events(self, delta: ChoiceDelta, extras: Extras) -> Iterator[Struct]:  # noqa: ARG002 -- the last has them
        columns = self.columns(delta.tokens)
        if self._parts is None:
            self._parts = StreamedParts(delta.choice, len(columns), self)
            response = self._response()
            if not self._num_events:
                yield self._event("created", response=response)
            yield self._event("in_progress", response=response)
        yield from self._parts.take(delta, columns)

    def end(self, extras: Extras) -> Iterator[Struct]:
        assert self._parts is not None, "a stream begins with a delta"
        response = self._ended(self._parts.whole, extras)
        yield self._event(response.status, response=response)

    def failed(self, reply: ErrorReply) -> Iterator[Struct]:
        response = self._so_far("failed")
        response.error = {"code": reply.code, "message": reply.error.message}
        yield self._event("failed", response=response)

    def begin(self) -> Struct:
        """Return the first event of a response that has yet to be begun."""
        return self._event("created", response=self._response(status="queued"))

    def cancelled(self) -> Iterator[Struct]:
        """Return the last events of a stream that its client has ended."""
        yield self._event("cancelled", response=self._so_far("cancelled"))

    def part_begins(self, index: int, part: Part) -> Iterator[Struct]:
        empty = Part(part.kind, bytearray(), part.call)
        item = self._item(index, empty, "in_progress")
        yield self._event("output_item.added", output_index=index, item=item)
        if part.kind != "call":
            yield self._event("content_part.added", **self._place(index, part), part=_content(empty))

    def part_grows(self, index: int, part: Part, text: str, columns: Sequence[bytes]) -> Struct:
        place = self._place(index, part)
        match part.kind:
            case "call":
                return self._event("function_call_arguments.delta", **place, delta=text)
            case "reasoning":
                return self._event("reasoning_text.delta", **place, delta=text)
            case "content":
                logprobs = written(b"[", *columns, b"]") if columns else []
                return self._event("output_text.delta", **place, delta=text, logprobs=logprobs)

    def part_ends(self, index: int, part: Part, *, is_whole: bool) -> Iterator[Struct]:
        place = self._place(index, part)
        match part.kind:
            case "call":
                told = {"name": part.known_call.name, "arguments": part.json}
                yield self._event("function_call_arguments.done", **place, **told)
            case "reasoning":
                yield self._event("reasoning_text.done", **place, text=part.json)
            case "content":
                yield self._event("output_text.done", **place, text=part.json, logprobs=[])
        if part.kind != "call":
            yield self._event("content_part.done", **place, part=_content(part))
        item = self._item(index, part, "completed" if is_whole else "incomplete")
        yield self._event("output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        self._num_events += 1
        return ResponseEvent(f"response.{kind}", self._num_events - 1, **fields)

    def _place(self, index: int, part: Part) -> dict[str, Any]:
        place = {"item_id": self._id(index, part), "output_index": index}
        return place if part.kind == "call" else {**place, "content_index": 0}

    def _id(self, index: int, part: Part) -> str:
        return f"{_ID_PREFIX[part.kind]}_{self._suffix}{index}"

    def _ended(self, choice: WholeChoice, extras: Extras) -> ModelResponse:
        is_cut = choice.finish_reason == "length"
        response = self._response(choice, "incomplete" if is_cut else "completed")
        response.incomplete_details = {"reason": "max_output_tokens"} if is_cut else None
        assert extras.counts is not None, "a whole answer and the end of a stream have them"
        response.usage, response.slo = _usage(extras.counts), extras.slo
        return response

    def _so_far(self, status: Status) -> ModelResponse:
        return self._response(None if self._parts is None else self._parts.whole, status)

    def _response(self, choice: WholeChoice | None = None, status: Status = "in_progress") -> ModelResponse:
        """Return a response with what there is of its answer."""
        head, body = self._head, self._body
        response = ModelResponse(
            id=head.completion_id,
            created_at=head.created,
            status=status,
            model=head.model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            background=bool(body.background),
            store=body.store is not False,
            reasoning={"effort": (body.reasoning or {}).get("effort"), "summary": None},
            temperature=body.temperature,
            text={
                "format": (body.text.format if body.text else None) or {"type": "text"},
                "verbosity": "medium",
            },
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=body.top_p,
            user=body.user,
        )
        if choice is not None:
            response.output = list_of(self._output(choice, is_cut=status == "incomplete"))
        return response

    def _output(self, choice: WholeChoice, *, is_cut: bool) -> Iterator[Item]:
        parts = choice.parts or [Part("content", bytearray())]
        unsent: Sequence[Piece] = choice.columns
        for index, part in enumerate(parts):
            is_whole = not is_cut or index < len(parts) - 1
            columns, unsent = (unsent, ()) if part.kind == "content" else ((), unsent)
            yield self._item(index, part, "completed" if is_whole else "incomplete", columns)

    def _item(
        self,
        index: int,
        part: Part,
        status: Literal["in_progress", "completed", "incomplete"],
        columns: Sequence[Piece] = (),
    ) -> Item:
        item_id, content = self._id(index, part), list[Content]()
        if status != "in_progress" and part.kind != "call":
            content = [_content(part, columns)]
        match part.kind:
            case "call":
                call_id, name = part.known_call.call_id, part.known_call.name
                return Item(item_id, status, "function_call", call_id=call_id, name=name, arguments=part.json)
            case "reasoning":
                return Item(item_id, status, "reasoning", summary=[], encrypted_content=None, content=content)
            case "content":
                return Item(item_id, status, "message", role="assistant", content=content)


def _content(part: Part, columns: Sequence[Piece] = ()) -> Content:
    if part.kind == "reasoning":
        return Content("reasoning_text", part.json)
    return Content("output_text", part.json, [], written(b"[", *columns, b"]"))


def _usage(counts: AnswerTokens) -> ResponseUsage:
    return ResponseUsage(
        counts.prompt,
        InputDetails(counts.cached, 0),
        counts.output,
        OutputDetails(counts.reasoning),
        counts.prompt + counts.output,
    )
