"""The messages of a chat: what a caller may send, and what a template gets of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from onbeat.core.errors import InvalidRequest, quoted
from onbeat.server.body import JsonReader, is_nested_too_deep
from onbeat.server.errors import unsupported
from onbeat.server.fields import Open, note_unknown
from onbeat.server.server_config import MAX_MESSAGES

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that hold text, and the field that does."""
_PART_FIELDS = frozenset(("type", "text", "refusal", "cache_control", "annotations", "logprobs"))


_LACKED = {"audio": "leave it out", "function_call": "send tool_calls"}
"""What messages may carry elsewhere and must not here, and the cure."""


class CalledFunction(Open):
    """What an assistant has called."""

    place = "messages[].tool_calls[].function."

    name: str
    arguments: str | dict[str, Any] | None = None
    """JSON; an object, as some clients send, is one already."""


class ToolCall(Open):
    """A call of a tool that an assistant has made."""

    place = "messages[].tool_calls[]."

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Of a stream; clients that join one send it back."""


class ChatMessage(Open):
    """One message. `audio` and `function_call` must be empty; other fields than these are ignored."""

    place = "messages[]."

    role: Annotated[str, Field(min_length=1, max_length=64)]
    """The template decides which it takes."""
    content: str | Annotated[list[str | dict[str, Any]], Field(fail_fast=True)] | None = None
    """Text, or content parts of type `text`, which become lines, as vLLM joins them."""
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, as vLLM answers it."""
    refusal: str | None = None
    annotations: list[Any] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


def _within_count(value: Any) -> Any:
    """Count before anything is made of a message."""
    if value == []:
        raise ValueError("{field} is empty; send at least one message")
    num_messages = len(value) if isinstance(value, list) else 0
    if 0 < num_messages <= MAX_MESSAGES:
        contents = [message.get("content") for message in value if isinstance(message, dict)]
        contents += [message.get("tool_calls") for message in value if isinstance(message, dict)]
        num_messages += sum(len(content) for content in contents if isinstance(content, list))
    if num_messages > MAX_MESSAGES:
        raise ValueError(
            f"{{field}} holds {num_messages} messages, parts of contents and calls; at most {MAX_MESSAGES} "
            "are taken. Join some"
        )
    return value


def _note_unknown_fields(messages: list[ChatMessage], info: ValidationInfo) -> list[ChatMessage]:
    """Note the names that no part of a content is known to have."""
    contents = (message.content for message in messages if isinstance(message.content, list))
    parts = (part for content in contents for part in content if isinstance(part, dict))
    if names := [name for part in parts for name in part if name not in _PART_FIELDS]:
        note_unknown(info, "messages[].content[].", _PART_FIELDS, names)
    return messages


ChatMessages = Annotated[
    list[ChatMessage],
    Field(max_length=MAX_MESSAGES, fail_fast=True, json_schema_extra={"minItems": 1}),
    BeforeValidator(_within_count),
    AfterValidator(_note_unknown_fields),
]
"""The messages of a chat: one or more, not too many."""


class MessageReader:
    """Makes of the messages of one chat, in their order, what its template gets."""

    def __init__(self) -> None:
        self._json = JsonReader("the arguments of the calls in messages")
        self._names: dict[str, str] = {}
        """Of the tools that have been called, by the ids of the calls."""

    def read(self, message: ChatMessage, where: str) -> dict[str, Any]:
        """Return a message for the template.

        Parameters
        ----------
        where : the message's path, which errors name.

        Raises
        ------
        InvalidRequest : it has no content, or carries what this server lacks.
        ApiError : the arguments of its calls, and of those before, hold too much (413).
        """
        for field, cure in _LACKED.items():
            if getattr(message, field):
                raise unsupported(f"{{field}} is not supported; {cure}", f"{where}.{field}")
        calls = message.tool_calls or ()
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        is_result = message.role == "tool"
        result: dict[str, Any] = {"role": message.role, "content": text_of(message, f"{where}.content")}
        name = message.name
        if is_result and message.tool_call_id is not None:
            name = name or self._names.get(message.tool_call_id)
            result["tool_call_id"] = message.tool_call_id
        for field, value in (("name", name), ("reasoning_content", reasoning)):
            if value is not None:
                result[field] = value
        if calls:
            self._names |= {call.id: call.function.name for call in calls if call.id is not None}
            result["tool_calls"] = list(map(self._template_call, calls))
        return result

    def _template_call(self, call: ToolCall) -> dict[str, Any]:
        """Return a call for the template, its arguments as an object if they are one, as templates expect."""
        function = {"name": call.function.name, "arguments": self._as_object(call.function.arguments)}
        return {**({} if call.id is None else {"id": call.id}), "type": "function", "function": function}

    def _as_object(self, arguments: str | dict[str, Any] | None) -> str | dict[str, Any]:
        if not isinstance(arguments, str):
            return arguments or {}
        try:
            parsed = self._json.read(arguments or "{}")
        except orjson.JSONDecodeError:  # a model may have been cut off, or have written no JSON
            return arguments
        return parsed if isinstance(parsed, dict) and not is_nested_too_deep(parsed) else arguments


def text_of(message: ChatMessage, where: str) -> str:
    """Return the text of a message, which may have none beside calls, reasoning or a result.

    Raises
    ------
    InvalidRequest : it has none and needs one, or holds what is no text.
    """
    others = (message.tool_calls, message.reasoning, message.reasoning_content)
    content = message.refusal if message.content is None else message.content
    if content is None and (message.role == "tool" or any(other not in (None, []) for other in others)):
        return ""
    return _content_text(content, where)


def _content_text(content: str | list[str | dict[str, Any]] | None, where: str) -> str:
    if content is None:
        raise InvalidRequest("{field} is missing; send text", param=where)
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: str | dict[str, Any], where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise unsupported(
            f"{{field}} is {quoted(kind)}; this server takes parts of type 'text' only",
            f"{where}.type",
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequest("{field} is not of the form {'type': 'text', 'text': '...'}", param=where)
    return text
