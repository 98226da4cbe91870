"""Chats: the messages that a caller may send, and the text that the model's template makes of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
)

from onbeat.core.errors import InvalidRequest
from onbeat.server.config import MAX_MESSAGES
from onbeat.server.errors import ApiError, unsupported
from onbeat.server.fields import ignorable
from onbeat.server.prompts import PromptEncoder
from onbeat.text.chat_template import ChatTemplate

_CONTINUE_MARK = "\ue000onbeat-continue\ue000 "

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that hold text, and the field that does."""
_PART_FIELDS = frozenset(("type", "text", "refusal", "cache_control", "annotations"))


class ChatMessage(BaseModel):
    """One message. The fields that only tools or sound use must be empty; others than these are ignored."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        WithJsonSchema({"enum": ["system", "developer", "user", "assistant"]}),
    ]
    """Those of tools are refused by name."""
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
    if value == []:
        raise ValueError("messages is empty; send at least one message")
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


def _note_unknown_fields(messages: list[ChatMessage], info: ValidationInfo) -> list[ChatMessage]:
    """Add the names that no message and no part is known to have to those that are ignored."""
    extra = [name for message in messages for name in message.model_extra or ()]
    contents = (message.content for message in messages if isinstance(message.content, list))
    parts = (part for content in contents for part in content if isinstance(part, dict))
    of_parts = [name for part in parts for name in part if name not in _PART_FIELDS]
    ignored_fields = info.context
    assert isinstance(ignored_fields, list), "`body.read_body` gives it"
    ignored_fields += ignorable(dict.fromkeys(extra).keys(), ChatMessage.model_fields, where="messages[].")
    ignored_fields += ignorable(dict.fromkeys(of_parts).keys(), _PART_FIELDS, where="messages[].content[].")
    return messages


ChatMessages = Annotated[
    list[ChatMessage],
    Field(max_length=MAX_MESSAGES, fail_fast=True, json_schema_extra={"minItems": 1}),
    BeforeValidator(_within_count),
    AfterValidator(_note_unknown_fields),
]
"""The messages of a chat: one or more, not too many."""


_RESERVED_VARIABLES = frozenset(
    (
        *("self", "messages", "add_generation_prompt", "bos_token", "eos_token"),
        *("tools", "documents", "raise_exception", "strftime_now"),
    )
)


class RenderedChat(Protocol):
    """A body with a chat that is to become a prompt."""

    @property
    def messages(self) -> ChatMessages | None: ...

    @property
    def add_generation_prompt(self) -> bool | None: ...

    @property
    def continue_final_message(self) -> bool | None: ...

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


def _check_rendering(body: RenderedChat) -> None:
    """Check the fields that say how a chat becomes a prompt.

    Raises
    ------
    InvalidRequest : they contradict each other, or set what the server sets.
    """
    if body.continue_final_message and body.add_generation_prompt is not False:
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt to be false: the answer cannot both start "
            "anew and go on",
            param="continue_final_message",
        )
    if reserved := _RESERVED_VARIABLES & (body.chat_template_kwargs or {}).keys():
        raise InvalidRequest(
            f"chat_template_kwargs may not set {min(reserved)!r}, which the server sets",
            param="chat_template_kwargs",
        )


async def render_chat(body: RenderedChat, encoder: PromptEncoder, template: ChatTemplate | None) -> str:
    """Return a chat as the text that the model completes.

    Raises
    ------
    ApiError : the model has no chat template.
    InvalidRequest : fields contradict each other, a message has no content or carries what this server lacks
        (images, sound, tool calls), or the template refuses the chat.
    """
    _check_rendering(body)
    messages = body.messages or []
    return await chat_prompt(
        encoder,
        template,
        [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=body.chat_template_kwargs,
    )


async def chat_prompt(
    encoder: PromptEncoder,
    template: ChatTemplate | None,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    variables: dict[str, Any] | None = None,
) -> str:
    """Return a chat as the text that the model completes.

    Raises
    ------
    ApiError : the model has no chat template.
    InvalidRequest : the template refuses these messages.
    """
    if template is None:
        raise ApiError(
            400,
            "this model has no chat template (it is a base model); use /v1/completions, or serve with "
            "--chat-template",
            code="no_chat_template",
        )
    named = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
    if not continue_final_message:
        return await encoder.render(template, messages, named)
    final = {**messages[-1], "content": messages[-1]["content"] + _CONTINUE_MARK}
    return _cut_at_mark(await encoder.render(template, [*messages[:-1], final], named))


def _cut_at_mark(rendered: str) -> str:
    """Drop what a template puts after the final message: its end token, a line feed."""
    mark = _CONTINUE_MARK.rstrip()
    start = rendered.rfind(mark)
    if start < 0:
        raise InvalidRequest(
            "the chat template does not show the final message, so it cannot be continued",
            param="continue_final_message",
        )
    text = rendered[:start]
    # A template that strips messages took the mark's trailing space; it would have stripped the text's too.
    return text if rendered.startswith(_CONTINUE_MARK, start) else text.rstrip()


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
