"""The messages of a chat: what a caller may send, and what a chat template gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from onbeat.core.errors import InvalidRequest
from onbeat.server.config import MAX_MESSAGES
from onbeat.server.errors import unsupported
from onbeat.server.fields import ignorable
from onbeat.server.middleware import HttpContext

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that hold text, and the field that does."""
_PART_FIELDS = frozenset(("type", "text", "refusal", "cache_control", "annotations"))


class ChatMessage(BaseModel):
    """One message. The fields that only tools or sound use must be empty; others than these are ignored."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[str | dict[str, Any]], Field(fail_fast=True)] | None = None
    """Text, or content parts of type `text`, which become lines, as vLLM joins them."""
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, as vLLM answers it."""
    refusal: str | None = None
    annotations: list[Any] | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


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
    list[ChatMessage],
    Field(max_length=MAX_MESSAGES, fail_fast=True, json_schema_extra={"minItems": 1}),
    BeforeValidator(_within_count),
]
"""The messages of a chat, not too many."""


def template_messages(messages: Sequence[ChatMessage], context: HttpContext) -> list[dict[str, Any]]:
    """Return messages as a chat template wants them, their content as one text.

    Parameters
    ----------
    messages : the caller's.
    context : gets the names of the fields that are ignored.

    Raises
    ------
    InvalidRequest : a message has no content, has a misspelt field, or carries what this server lacks
        (images, sound, tool calls).
    """
    if not messages:
        raise InvalidRequest("messages is empty; send at least one message", param="messages")
    context.ignored_fields += _unknown_fields(messages)
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
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    for field, value in (("name", message.name), ("reasoning_content", reasoning)):
        if value is not None:
            result[field] = value
    return result


def _unknown_fields(messages: Sequence[ChatMessage]) -> list[str]:
    """Return the names that no message and no part is known to have; each name once."""
    extra = [name for message in messages for name in message.model_extra or ()]
    contents = (message.content for message in messages if isinstance(message.content, list))
    parts = (part for content in contents for part in content if isinstance(part, dict))
    of_parts = [name for part in parts for name in part if name not in _PART_FIELDS]
    return [
        *ignorable(dict.fromkeys(extra).keys(), ChatMessage.model_fields, where="messages[]."),
        *ignorable(dict.fromkeys(of_parts).keys(), _PART_FIELDS, where="messages[].content[]."),
    ]


def _content_text(content: str | list[str | dict[str, Any]] | None, where: str) -> str:
    if content is None:
        raise InvalidRequest(f"{where} is missing; send text", param=where)
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: str | dict[str, Any], where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise unsupported(
            f"{where}.type is {str(kind)[:50]!r}; this server takes parts of type 'text' only",
            f"{where}.type",
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"{where} is not of the form {{'type': 'text', 'text': '...'}}", param=where)
    return text
