"""What a caller of OpenAI's Responses API asks for, as another form of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request

from onbeat.core.errors import InvalidRequest, quoted
from onbeat.server.chat import ChatCompletionRequest
from onbeat.server.errors import unsupported
from onbeat.server.fields import WHOLE, Closed, Flag
from onbeat.server.generation_request import GenerationRequest
from onbeat.server.server_config import MAX_MESSAGES
from onbeat.server.translation import PlacedMessages, as_chat, function_tools, text_field, tool_choice_of

_LOGPROBS = "message.output_text.logprobs"
_TAKEN_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools.tools[].function": "tool_choice.tools[]",
    "tool_choice.allowed_tools": "tool_choice",
    "tools[].function": "tools[]",
}
"""Of fields, in place of a chat's."""


class TextSettings(Closed):
    """What the text of a response is like."""

    format: dict[str, Any] | None = None
    """`{"type": "text"}`, `json_object`, or `json_schema` with `name`, `schema` and `strict`."""
    verbosity: Literal["medium"] | None = None
    """It asks for nothing."""


class ResponseRequest(GenerationRequest):
    """OpenAI's request for a response, with the extra fields that chat completions have."""

    prompt_field = "input"

    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    """Text, or items: messages, calls of functions and their outputs, reasoning."""
    instructions: str | None = None
    """The first system message."""
    max_output_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    top_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None
    include: list[str] | None = None
    text: TextSettings | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    metadata: dict[str, str] | None = None
    """Kept in the answer; `slo_ttft_ms` and the like state objectives."""
    chat_template_kwargs: dict[str, Any] | None = None
    store: Flag | None = None
    """False: the response is not kept."""
    previous_response_id: str | None = None
    """Of a response that is kept: its input and output come before `input`."""
    background: Flag | None = None
    """The response is made whether or not somebody is connected."""
    conversation: str | dict[str, Any] | None = None
    """Refused, and so is the next one."""
    prompt: dict[str, Any] | None = None
    truncation: str | None = None
    """Only `disabled`."""
    max_tool_calls: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Of built-in tools, of which there are none."""

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.wants_logprobs else None

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    def check_response(self) -> None:
        """Refuse what asks for things that are not kept here, and what chat completions do otherwise.

        Raises
        ------
        InvalidRequest : a field asks for what this server lacks.
        """
        for name in ("conversation", "prompt"):
            if getattr(self, name):
                raise unsupported(f"{name} is not supported; send the items of it in input", name)
        if self.background and self.store is False:
            raise InvalidRequest(
                "background needs a response that is kept; leave out store, or background", param="background"
            )
        if self.truncation not in (None, "disabled"):
            raise unsupported(
                f"truncation is {quoted(self.truncation)}; this server never drops items. Leave it out",
                "truncation",
            )
        if self.max_tokens is not None:
            raise InvalidRequest("max_tokens is called max_output_tokens here", param="max_tokens")
        if self.num_choices > 1:
            raise InvalidRequest("n is above 1; a response has one answer", param="n")
        for each in self.include or ():
            if each not in _TAKEN_INCLUDES:
                raise unsupported(
                    f"include names {quoted(each)}; this server has {' and '.join(_TAKEN_INCLUDES)}",
                    "include",
                )
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequest(
                f"top_logprobs is given without {_LOGPROBS!r} in include; add it or leave top_logprobs out",
                param="top_logprobs",
            )

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of the chat that it stands for, but for its messages and what both have.

        Raises
        ------
        InvalidRequest : a tool is of a kind that this server lacks.
        """
        effort = (self.reasoning or {}).get("effort")
        return {
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": True if self.wants_logprobs else None,
            "top_logprobs": self.top_logprobs,
            "response_format": _response_format(self.text.format if self.text else None),
            "reasoning_effort": effort,
            "tools": function_tools(self.tools, "parameters"),
            "tool_choice": tool_choice_of(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


Items = Sequence[dict[str, Any]]


def chat_of(
    body: ResponseRequest, before: Items, request: Request
) -> AbstractAsyncContextManager[ChatCompletionRequest]:
    """Return the chat that a response stands for, see `as_chat`, with the items before its input."""
    body.check_response()
    messages = messages_of(body.input, body.instructions, before)
    return as_chat(body, body.chat_fields(), messages, body.metadata, _NAMES, request)


def items_of(given: str | Items) -> Items:
    """Return the items of a response's input."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def listed_item(item: dict[str, Any], item_id: str) -> dict[str, Any]:
    """Return an item as lists have it, with an id, a type, and parts for its content."""
    given = {name: value for name, value in item.items() if value is not None}
    if isinstance(content := given.get("content"), str):
        kind = "output_text" if given.get("role") == "assistant" else "input_text"
        given["content"] = [{"type": kind, "text": content}]
    return {"id": item_id, "type": "message", "status": "completed", **given}


def messages_of(given: str | Items, instructions: str | None, before: Items = ()) -> PlacedMessages:
    """Return the items of a response's input, and those before them, as the messages of a chat.

    Reasoning, text and calls of the model that stand beside one another are one message.

    Raises
    ------
    InvalidRequest : an item is of a kind that this server lacks.
    """
    messages: PlacedMessages = []
    if instructions:
        messages.append(("instructions", {"role": "system", "content": instructions}))
    placed = [("previous_response_id", item) for item in before]
    placed += [
        ("input" if isinstance(given, str) else f"input[{index}]", item)
        for index, item in enumerate(items_of(given))
    ]
    own: dict[str, Any] | None = None  # the model's message that the next item may belong to
    for where, item in placed:
        added = _message_of(item, where)
        if added["role"] != "assistant":
            own = None
        elif own is not None and not own.keys() & added.keys() - {"role", "tool_calls"}:
            own["tool_calls"] = [*own.get("tool_calls", ()), *added.pop("tool_calls", ())]
            own.update(added)
            if "content" in added:
                messages[-1] = (where, own)
            continue
        else:
            own = added
        messages.append((where, added))
    for _, message in messages:
        if message.get("tool_calls") == []:
            del message["tool_calls"]
    return messages


def _message_of(item: dict[str, Any], where: str) -> dict[str, Any]:
    match item.get("type") or "message":
        case "message" if isinstance(item.get("role"), str):
            return {"role": item["role"], "content": item.get("content")}
        case "message":
            raise InvalidRequest(f"{where} has no role; send 'user', 'assistant' or 'system'", param=where)
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            if not isinstance(parts, list):
                raise InvalidRequest(
                    f"{where} has {quoted(parts)} for its content; it should be an array", param=where
                )
            texts = (part.get("text") for part in parts if isinstance(part, dict))
            return {"role": "assistant", "reasoning_content": "".join(t for t in texts if isinstance(t, str))}
        case "function_call":
            function = {name: text_field(item, name, where) for name in ("name", "arguments")}
            call = {"id": text_field(item, "call_id", where), "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            call_id = text_field(item, "call_id", where)
            return {"role": "tool", "tool_call_id": call_id, "content": item.get("output")}
        case kind:
            raise unsupported(
                f"{where}.type is {quoted(kind)}; this server takes message, reasoning, function_call and "
                "function_call_output",
                f"{where}.type",
            )


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") != "json_schema":
        return given
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in given.items() if name != "type"},
    }
