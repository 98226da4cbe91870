"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API as another form of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest, quoted
from onbeat.server.answer import AnswerResponse
from onbeat.server.answer_format import AnswerHead, Extras, WholeChoice, WholePart, new_head
from onbeat.server.answer_models import AnthropicErrorBody, AnthropicMessage, TokenCount
from onbeat.server.answer_report import usage_of
from onbeat.server.body import WHOLE, read_body
from onbeat.server.chat import ChatCompletionRequest, chat_prompt, chat_requests
from onbeat.server.choices import ChoiceDelta, ShownToken
from onbeat.server.errors import ErrorReply, anthropic_error, unsupported
from onbeat.server.generation_request import GenerationRequest, StopString
from onbeat.server.middleware import context_of
from onbeat.server.openapi import generation_route, tokenizer_route
from onbeat.server.pieces import Piece
from onbeat.server.server_config import MAX_MESSAGES, MAX_STOP_STRINGS
from onbeat.server.services import Services
from onbeat.server.streamed_parts import StreamedParts, named_event
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

    @property
    def num_logprobs(self) -> int | None:
        return None

    @property
    def continues_prompt(self) -> bool:
        return False

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


_NAMES = (
    (r"^stop\b", "stop_sequences"),
    (r"^user\b", "metadata.user_id"),
    (r"response_format(\.json_schema)?\b", "output_config.format"),
    (r"reasoning_effort\b", "output_config.effort"),
    (r"(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function\b", r"\1"),
    (r"tool_choice\.function\b", "tool_choice"),
    (r"continue_final_message\b", "messages"),
)
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
    match choice.get("type"):
        case None | "auto" | "none" as kind:
            return kind
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case kind:
            raise unsupported(
                f"tool_choice.type is {quoted(kind)}; it should be auto, any, tool or none",
                "tool_choice.type",
            )


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


def message_routes(services: Services) -> APIRouter:
    """Return the routes of the Messages API."""
    router = APIRouter()

    @router.post("/v1/messages", **generation_route(MessageRequest, AnthropicMessage, AnthropicErrorBody))
    async def messages(request: Request) -> Response:
        """Answer with a message."""
        services.lifecycle.check_open()
        body = await read_body(request, MessageRequest)
        head = new_head("msg", services.check_model(body.model), joint="_")
        async with _chat_of(body, request) as chat:
            requests, options = await chat_requests(chat, request, head, services)
        return AnswerResponse(chat, requests, options, MessageFormat(head), services, ping=PING)

    @router.post(
        "/v1/messages/count_tokens", **tokenizer_route(CountTokensRequest, TokenCount, AnthropicErrorBody)
    )
    async def count_tokens(request: Request) -> Response:
        """Return how many tokens the prompt of a message has."""
        body = await read_body(request, CountTokensRequest)
        services.check_model(body.model)
        async with _chat_of(body, request) as chat:
            prompt = await chat_prompt(chat, request, services)
        return Response(orjson.dumps({"input_tokens": len(prompt)}), media_type="application/json")

    return router


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
