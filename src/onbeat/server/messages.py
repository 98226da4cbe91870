"""The messages of a chat: what a caller may send, and what a chat template gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from onbeat.core.errors import InvalidRequest
from onbeat.server.config import MAX_MESSAGES
from onbeat.server.errors import unsupported
from onbeat.server.fields import with_one_unknown


class ChatMessage(BaseModel):
    """One message. The fields that only tools, sound or refusals use must be empty."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[str | dict[str, Any]], Field(fail_fast=True)] | None = None
    """Text, or content parts of type `text`."""
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_few_unknown_fields(cls, value: Any) -> Any:
        return with_one_unknown(value, cls.model_fields)


def _within_count(value: Any) -> Any:
    """Count before anything is made of a message."""
    num_messages = len(value) if isinstance(value, list) else 0
    if 0 < num_messages <= MAX_MESSAGES:
        contents = [message.get("content") for message in value if isinstance(message, dict)]
        num_messages += sum(len(content) for content in contents if isinstance(content, list))
    if num_messages > MAX_MESSAGES:
        raise ValueError(
            f"messages holds {num_messages} messages and parts of their contents; at most {MAX_MESSAGES} are "
            "taken. Join some"
        )
    return value


ChatMessages = Annotated[
    list[ChatMessage], Field(max_length=MAX_MESSAGES, fail_fast=True), BeforeValidator(_within_count)
]
"""The messages of a chat, not too many."""


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as a chat template wants them, their content as one text.

    Raises
    ------
    InvalidRequest : a message has no content, or carries what this server lacks (images, sound, tool calls).
    """
    if not messages:
        raise InvalidRequest("messages is empty; send at least one message", param="messages")
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role in ("tool", "function"):
        raise unsupported(f"{where}.role is {message.role!r}; this server has no tool calls", f"{where}.role")
    for field in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if getattr(message, field):
            raise unsupported(f"{where}.{field} is not supported by this server", f"{where}.{field}")
    result: dict[str, Any] = {
        "role": message.role,
        "content": _content_text(message.content, f"{where}.content"),
    }
    for field in ("name", "reasoning_content"):
        if (value := getattr(message, field)) is not None:
            result[field] = value
    return result


def _content_text(content: str | list[str | dict[str, Any]] | None, where: str) -> str:
    if content is None:
        raise InvalidRequest(f"{where} is missing; send text", param=where)
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: str | dict[str, Any], where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind != "text":
        raise unsupported(
            f"{where}.type is {str(kind)[:50]!r}; this server takes parts of type 'text' only",
            f"{where}.type",
        )
    text = part.get("text")
    if not isinstance(text, str) or part.keys() - {"type", "text", "cache_control"}:
        raise InvalidRequest(f"{where} is not of the form {{'type': 'text', 'text': '...'}}", param=where)
    return text
