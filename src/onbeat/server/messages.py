"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API as another form of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Literal

import orjson
from msgspec import UNSET, Struct, UnsetType
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest, quoted
from onbeat.server.answer import AnswerResponse
from onbeat.server.answer_report import AnswerTokens, SLOReport, counts_up_to
from onbeat.server.body import read_body
from onbeat.server.chat import ChatCompletionRequest, chat_prompt, chat_requests
from onbeat.server.choices import ChoiceDelta, ShownToken
from onbeat.server.errors import AnthropicErrorBody, ErrorReply, anthropic_error, unsupported
from onbeat.server.fields import WHOLE
from onbeat.server.generation_request import GenerationRequest, StopString, read_request
from onbeat.server.middleware import context_of
from onbeat.server.openapi import Routes
from onbeat.server.pen import AnswerHead, Extras, Part, StreamedParts, WholeChoice, event_bytes
from onbeat.server.pieces import json_response, list_of, written
from onbeat.server.server_config import MAX_MESSAGES, MAX_STOP_STRINGS
from onbeat.server.services import Services
from onbeat.server.translation import PlacedMessages, as_chat, function_tools, readable, text_field

_BILLING = "x-anthropic-billing-header"
"""How a system block begins that changes with each request of one client, and would spoil every prefix."""

Blocks = str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class CountTokensRequest(GenerationRequest):
    """A message to answer, whose tokens are to be counted."""

    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Blocks | None = None
    """Text, or blocks of it, which become lines."""
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = (
        None
    )
    tools: list[dict[str, Any]] | None = None
    """With `name`, `description`, `input_schema` and `strict`."""
    tool_choice: dict[str, Any] | None = None
    """Of type `auto`, `any`, `tool` or `none`; `disable_parallel_tool_use` allows one call."""
    thinking: dict[str, Any] | None = None
    """Whether the template has the model think. A budget is ignored."""
    output_config: dict[str, Any] | None = None
    """`format` is a schema of the answer."""
    metadata: dict[str, Any] | None = None
    """`user_id` is the tenant where nothing else says it; `slo_ttft_ms` and the like state objectives."""
    chat_template_kwargs: dict[str, Any] | None = None

    def chat_fields(self, messages: PlacedMessages) -> dict[str, Any]:
        """Return the fields of the chat that it stands for, but for its messages and what both have.

        Raises
        ------
        InvalidRequest : a tool is of a kind that this server lacks.
        """
        if self.num_choices > 1:
            raise InvalidRequest("n is above 1; a message has one answer", param="n")
        choice = self.tool_choice or {}
        config = self.output_config or {}
        return {
            **(_CONTINUED if _is_to_be_continued(messages) else {}),
            "stop": self.stop_sequences,
            "tools": function_tools(self.tools, "input_schema"),
            "tool_choice": _tool_choice(choice),
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "response_format": _response_format(config.get("format")),
            "reasoning_effort": config.get("effort"),
            "thinking": self.thinking,
            "chat_template_kwargs": self.chat_template_kwargs,
            "user": (self.metadata or {}).get("user_id") if self.user is None else None,
        }


class MessageRequest(CountTokensRequest):
    """Anthropic's request for a message, with the extra fields that chat completions have."""

    max_tokens: Annotated[int, Field(ge=1), WHOLE]


_CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


_NAMES = {
    "user": "metadata.user_id",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function": "tools[]",
    "tool_choice.function": "tool_choice",
    "continue_final_message": "messages",
}
"""Of fields, in place of a chat's."""


def _chat_of(
    body: CountTokensRequest, request: Request
) -> AbstractAsyncContextManager[ChatCompletionRequest]:
    left_out = context_of(request.scope).ignored_fields
    given = [*(readable(message, left_out) for message in body.messages[:-1]), body.messages[-1]]
    messages = messages_of(given, body.system)
    return as_chat(body, body.chat_fields(messages), messages, body.metadata, _NAMES, request)


def _is_to_be_continued(messages: PlacedMessages) -> bool:
    """Return whether the answer goes on with the last message: it is the beginning of that answer."""
    last = messages[-1][1] if messages else {}
    return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last


def messages_of(
    given: Sequence[Mapping[str, Any]], system: str | list[dict[str, Any]] | None
) -> PlacedMessages:
    """Return Anthropic's messages as those of a chat.

    Raises
    ------
    InvalidRequest : a block is of a kind that this server lacks.
    """
    messages: PlacedMessages = []
    if system:
        blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
        texts = [_text(block, f"system[{index}]") for index, block in enumerate(blocks)]
        shown = "\n".join(text for text in texts if not text.startswith(_BILLING))
        messages += [("system", {"role": "system", "content": shown})] if shown else []
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if message.get("role") not in ("user", "assistant", "system"):
            raise InvalidRequest(
                f"{where}.role is {quoted(message.get('role'))}; send 'user' or 'assistant'",
                param=f"{where}.role",
            )
        messages += [(where, each) for each in _chat_messages(message, where)]
    return messages


def _chat_messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return one message as those of a chat: results of tools come first, each as its own."""
    role, content = message["role"], message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    results, texts, calls, thoughts = [], [], [], []
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        match kind, role:
            case "text", _:
                texts.append({"type": "text", "text": _text(block, place)})
            case "thinking", "assistant":
                thoughts.append(text_field(block, "thinking", place))
            case "redacted_thinking", "assistant":
                pass
            case "tool_use", "assistant":
                arguments = orjson.dumps(block.get("input") or {}).decode()
                function = {"name": text_field(block, "name", place), "arguments": arguments}
                calls.append({"id": text_field(block, "id", place), "type": "function", "function": function})
            case "tool_result", "user":
                results.append(_tool_message(block, place))
            case _:
                raise unsupported(
                    f"{place}.type is {quoted(kind)}, not taken from {role!r}; send text, tool_use and "
                    "tool_result",
                    f"{place}.type",
                )
    own: dict[str, Any] = {"role": role, "content": texts or ("" if role == "assistant" else None)}
    if thoughts:
        own["reasoning_content"] = "".join(thoughts)
    if calls:
        own["tool_calls"] = calls
    return [*results, own] if texts or thoughts or calls or not results else results


def _tool_message(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        parts = [_text(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
        content = "\n".join(parts)
    if block.get("is_error"):
        content = f"Error: {content or ''}"
    call_id = text_field(block, "tool_use_id", where)
    return {"role": "tool", "tool_call_id": call_id, "content": content or ""}


def _text(block: Any, where: str) -> str:
    if not isinstance(block, dict) or block.get("type") != "text":
        kind = block.get("type") if isinstance(block, dict) else block
        raise unsupported(f"{where}.type is {quoted(kind)}; this server takes text only", f"{where}.type")
    return text_field(block, "text", where)


def _tool_choice(choice: Mapping[str, Any]) -> str | dict[str, Any] | None:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in (None, "auto", "none", "any"):
        raise unsupported(
            f"tool_choice.type is {quoted(kind)}; it should be auto, any, tool or none", "tool_choice.type"
        )
    return "required" if kind == "any" else kind


def _response_format(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind != "json_schema" or not isinstance(given, Mapping):
        raise unsupported(
            f"output_config.format.type is {quoted(kind)}; this server has json_schema",
            "output_config.format",
        )
    schema = {"name": "answer", "schema": given.get("schema"), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


class Block(Struct):
    """A part of a message."""

    type: Literal["thinking", "text", "tool_use"]
    signature: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class MessageDelta(Struct):
    """What an event adds to a block, or to the message."""

    type: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class AnthropicUsage(Struct):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class AnthropicMessage(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    usage: AnthropicUsage
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    stop_sequence: str | None = None
    slo: SLOReport | UnsetType = UNSET
    content: list[Block] = []


class MessageEvent(Struct):
    """An event of a stream; `type` says what it tells."""

    type: str
    message: AnthropicMessage | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Block | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    usage: AnthropicUsage | UnsetType = UNSET
    slo: SLOReport | UnsetType = UNSET


class TokenCount(Struct):
    input_tokens: int


def message_routes(services: Services) -> Routes:
    """Return the routes of the Messages API."""
    router = Routes()

    @router.post(
        "/v1/messages",
        **router.generating(MessageRequest, AnthropicMessage, MessageEvent, AnthropicErrorBody),
    )
    async def messages(request: Request) -> Response:
        """Answer with a message."""
        body, head = await read_request(request, MessageRequest, services, "msg", joint="_")
        async with _chat_of(body, request) as chat:
            requests, options = await chat_requests(chat, request, services)
        return AnswerResponse(chat, requests, options, MessagePen(head), services, ping=event_bytes([_PING]))

    @router.post(
        "/v1/messages/count_tokens", **router.taking(CountTokensRequest, TokenCount, AnthropicErrorBody)
    )
    async def count_tokens(request: Request) -> Response:
        """Return how many tokens the prompt of a message has."""
        body = await read_body(request, CountTokensRequest)
        services.check_model(body.model)
        async with _chat_of(body, request) as chat:
            prompt = await chat_prompt(chat, request, services)
        return json_response(TokenCount(len(prompt)))

    return router


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_PING = MessageEvent("ping")


class MessagePen:
    """Writes one message.

    Parameters
    ----------
    head : its id and model.
    """

    end_mark = b""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._parts: StreamedParts | None = None

    def columns(self, tokens: Sequence[ShownToken]) -> Sequence[bytes]:  # noqa: ARG002 -- the pen's
        """Return nothing: this API has no log-probabilities."""
        return ()

    def whole(self, choices: Sequence[WholeChoice], extras: Extras) -> AnthropicMessage:
        (choice,) = choices
        message = self._message(extras.counts)
        message.stop_reason, message.stop_sequence = _ending(choice)
        message.slo = extras.slo
        message.content = list_of(map(_block, choice.parts or [Part("content", bytearray())]))
        return message

    def events(self, delta: ChoiceDelta, extras: Extras) -> Iterator[Struct]:  # noqa: ARG002 -- the last have them
        if self._parts is None:
            self._parts = StreamedParts(delta.choice, 0, self)
            counts = counts_up_to(delta)._replace(output=0)
            yield MessageEvent("message_start", message=self._message(counts))
        yield from self._parts.take(delta, ())

    def end(self, extras: Extras) -> Iterator[Struct]:
        assert self._parts is not None, "a stream begins with a delta"
        reason, sequence = _ending(self._parts.whole)
        ending, usage = MessageDelta(stop_reason=reason, stop_sequence=sequence), _usage(extras.counts)
        yield MessageEvent("message_delta", delta=ending, usage=usage, slo=extras.slo)
        yield MessageEvent("message_stop")

    def failed(self, reply: ErrorReply) -> Iterator[Struct]:
        yield anthropic_error(reply)

    def part_begins(self, index: int, part: Part) -> Iterator[Struct]:
        block = _block(Part(part.kind, bytearray(), part.call))
        yield MessageEvent("content_block_start", index=index, content_block=block)
        if not index:  # Anthropic's streams have one here
            yield _PING

    def part_grows(self, index: int, part: Part, text: str, columns: Sequence[bytes]) -> Struct:  # noqa: ARG002
        match part.kind:
            case "reasoning":
                delta = MessageDelta("thinking_delta", thinking=text)
            case "content":
                delta = MessageDelta("text_delta", text=text)
            case "call":
                delta = MessageDelta("input_json_delta", partial_json=text)
        return MessageEvent("content_block_delta", index=index, delta=delta)

    def part_ends(self, index: int, part: Part, *, is_whole: bool) -> Iterator[Struct]:  # noqa: ARG002 -- as the API has it
        yield MessageEvent("content_block_stop", index=index)

    def _message(self, counts: AnswerTokens | None) -> AnthropicMessage:
        return AnthropicMessage(id=self._head.completion_id, model=self._head.model, usage=_usage(counts))


def _block(part: Part) -> Block:
    match part.kind:
        case "call":
            return Block(
                "tool_use", id=part.known_call.call_id, name=part.known_call.name, input=_input(part)
            )
        case "reasoning":
            return Block("thinking", signature="", thinking=part.json)
        case "content":
            return Block("text", text=part.json)


def _input(part: Part) -> Any:
    """Return the arguments of a call, which this API has as an object, cut off or not."""
    text = orjson.loads(b'"' + part.text + b'"')
    try:
        is_object = isinstance(orjson.loads(text or "{}"), dict)
    except orjson.JSONDecodeError:
        is_object = False
    # the name that Anthropic's documentation gives to what is no JSON
    return written((text or "{}").encode()) if is_object else {"INVALID_JSON": text}


def _ending(choice: WholeChoice) -> tuple[Any, str | None]:
    """Return why a message ended, and the stop sequence that ended it."""
    reason = _STOP_REASONS[choice.finish_reason or "stop"]
    stop = choice.choice.stop_reason
    if reason == "end_turn" and any(part.kind == "call" for part in choice.parts):
        reason = "tool_use"
    elif reason == "end_turn" and isinstance(stop, str):
        return "stop_sequence", stop
    return reason, None


def _usage(counts: AnswerTokens | None) -> AnthropicUsage:
    assert counts is not None, "a whole answer and the end of a stream have them"
    return AnthropicUsage(counts.prompt - counts.cached, counts.cached, 0, counts.output)
