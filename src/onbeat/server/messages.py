"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API as another form of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from onbeat.core.errors import InvalidRequest, quoted
from onbeat.server.answer import AnswerResponse
from onbeat.server.answer_format import new_head
from onbeat.server.answer_models import AnthropicErrorBody, AnthropicMessage, TokenCount
from onbeat.server.body import WHOLE, read_body
from onbeat.server.chat import chat_prompt, chat_requests
from onbeat.server.config import MAX_MESSAGES, MAX_STOP_STRINGS
from onbeat.server.errors import unsupported
from onbeat.server.generation_request import GenerationRequest, StopString
from onbeat.server.messages_format import PING, MessageFormat
from onbeat.server.openapi import error_answers, generation_route, json_body
from onbeat.server.services import Services
from onbeat.server.translation import chat_of, function_tools, text_field

_BILLING = "x-anthropic-billing-header"
"""How a system block begins that changes with each request of one client, and would spoil every prefix."""

Blocks = str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class CountTokensRequest(GenerationRequest):
    """A message to answer, whose tokens are to be counted."""

    model: str
    messages: Annotated[
        list[dict[str, Any]],
        Field(max_length=MAX_MESSAGES, fail_fast=True, json_schema_extra={"minItems": 1}),
    ]
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

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of the chat that it stands for, but for those that both have.

        Raises
        ------
        InvalidRequest : a block or a tool is of a kind that this server lacks.
        """
        if self.num_choices > 1:
            raise InvalidRequest("n is above 1; a message has one answer", param="n")
        choice = self.tool_choice or {}
        config = self.output_config or {}
        return {
            "messages": messages_of(self.messages, self.system),
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


def messages_of(
    given: Sequence[Mapping[str, Any]], system: str | list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return Anthropic's messages as those of a chat.

    Raises
    ------
    InvalidRequest : a block is of a kind that this server lacks.
    """
    messages: list[dict[str, Any]] = []
    if system:
        blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
        texts = [_text(block, f"system[{index}]") for index, block in enumerate(blocks)]
        shown = "\n".join(text for text in texts if not text.startswith(_BILLING))
        messages += [{"role": "system", "content": shown}] if shown else []
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if message.get("role") not in ("user", "assistant", "system"):
            raise InvalidRequest(
                f"{where}.role is {quoted(message.get('role'))}; send 'user' or 'assistant'",
                param=f"{where}.role",
            )
        messages += _chat_messages(message, where)
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
    own: dict[str, Any] = {"role": role, "content": texts or None}
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


def _response_format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise unsupported(
            f"output_config.format.type is {quoted(given.get('type'))}; this server has json_schema",
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
        chat = await chat_of(body, body.chat_fields(), body.metadata, request)
        requests, options = await chat_requests(chat, request, head, services)
        return AnswerResponse(chat, requests, options, MessageFormat(head), services, ping=PING)

    @router.post(
        "/v1/messages/count_tokens",
        tags=["tokenizer"],
        response_model=TokenCount,
        responses=error_answers(400, 401, 404, 413, model=AnthropicErrorBody),
        openapi_extra=json_body(CountTokensRequest),
    )
    async def count_tokens(request: Request) -> Response:
        """Return how many tokens the prompt of a message has."""
        body = await read_body(request, CountTokensRequest)
        services.check_model(body.model)
        chat = await chat_of(body, body.chat_fields(), body.metadata, request)
        prompt = await chat_prompt(chat, request, services)
        return Response(orjson.dumps({"input_tokens": len(prompt)}), media_type="application/json")

    return router
