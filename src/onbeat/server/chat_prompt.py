"""Chats: the messages that a caller may send, and the text that the model's template makes of them."""

from __future__ import annotations

from typing import Annotated, Any, Protocol

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
)

from onbeat.core.errors import InvalidRequest
from onbeat.server.config import MAX_MESSAGES, MAX_VARIABLES_BYTES
from onbeat.server.errors import ApiError, unsupported
from onbeat.server.fields import ignorable
from onbeat.server.prompts import PromptEncoder
from onbeat.server.turns import Turns
from onbeat.text.chat_template import ChatTemplate

_START_MARK = "\ue000onbeat-start\ue000"
_END_MARK = "\ue000onbeat-continue\ue000"
"""No white space at either end: a template that trims a message leaves what is between them alone."""

_QUOTED_END = 40
"""Characters of a message and of a prompt that an error shows."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that hold text, and the field that does."""
_PART_FIELDS = frozenset(("type", "text", "refusal", "cache_control", "annotations"))


_LACKED = ("tool_calls", "tool_call_id", "function_call", "audio", "images", "prefix", "partial")
"""What messages may carry elsewhere and must not here: the last are Ollama's, DeepSeek's and Moonshot's."""


class ChatMessage(BaseModel):
    """One message. The fields that only tools or sound use must be empty; others than these are ignored."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[
        str,
        Field(min_length=1, max_length=64, json_schema_extra={"not": {"enum": ["tool", "function"]}}),
    ]
    """The template decides which it takes; those of tools are refused by name."""
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
    InvalidRequest : they contradict each other, set what the server sets, or are too large.
    """
    if body.continue_final_message and body.add_generation_prompt is not False:
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt to be false: the answer cannot both start "
            "anew and go on",
            param="continue_final_message",
        )
    variables = body.chat_template_kwargs or {}
    if reserved := _RESERVED_VARIABLES & variables.keys():
        raise InvalidRequest(
            f"chat_template_kwargs may not set {min(reserved)!r}, which the server sets",
            param="chat_template_kwargs",
        )
    try:
        num_bytes = len(orjson.dumps(variables))
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(
            f"chat_template_kwargs cannot be given to a chat template: {error}", param="chat_template_kwargs"
        ) from error
    if num_bytes > MAX_VARIABLES_BYTES:
        raise InvalidRequest(
            f"chat_template_kwargs takes {num_bytes} bytes of JSON; at most {MAX_VARIABLES_BYTES} are taken. "
            "Send less",
            param="chat_template_kwargs",
        )


async def render_chat(
    body: RenderedChat, encoder: PromptEncoder, template: ChatTemplate | None, caller: str
) -> str:
    """Return a chat as the text that the model completes.

    Parameters
    ----------
    body : the chat, and how it is to be rendered.
    encoder : has the template rendered.
    template : the model's, if it has one.
    caller : who shares the rendering with others (`HttpContext.caller`).

    Raises
    ------
    ApiError : the model has no chat template.
    InvalidRequest : fields contradict each other, a message has no content or carries what this server lacks
        (images, sound, tool calls), or the template refuses the chat or rewrites what it is to continue.
    PromptTooLong : the messages are longer than any text that fits the context.
    """
    _check_rendering(body)
    if template is None:
        raise ApiError(
            400,
            "this model has no chat template (it is a base model); use /v1/completions, or serve with "
            "--chat-template",
            code="no_chat_template",
        )
    messages, turns = list[dict[str, str]](), Turns()
    for index, message in enumerate(body.messages or ()):
        messages.append(_template_message(message, f"messages[{index}]"))
        await turns.rest()
    variables = {
        **(body.chat_template_kwargs or {}),
        "add_generation_prompt": body.add_generation_prompt is not False,
    }
    if not body.continue_final_message:
        return await encoder.render(template, messages, variables, caller)
    final = messages[-1]
    content = final["content"]
    # only where there is something to trim: templates may look at how a message starts
    marked = _START_MARK * content[:1].isspace() + content
    messages[-1] = {**final, "content": marked + _END_MARK}
    return _continued(await encoder.render(template, messages, variables, caller), marked, content)


def _continued(rendered: str, marked: str, content: str) -> str:
    """Drop what a template puts after the final message (its end token, a line feed), and the marks.

    Parameters
    ----------
    rendered : the chat with the end mark.
    marked : the final message as the template got it, without the end mark.
    content : the same without any mark, with which the prompt is to end.

    Raises
    ------
    InvalidRequest : the template does not show the message as it is.
    """
    shown, mark, _ = rendered.rpartition(_END_MARK)
    if not mark:
        raise InvalidRequest(
            "the chat template does not show the final message to its end, so it cannot be continued",
            param="continue_final_message",
        )
    if not shown.endswith(marked):
        end, written = content[-_QUOTED_END:], shown.replace(_START_MARK, "")[-_QUOTED_END:]
        what = "its beginning" if written == end else f"{end!r} to {written!r}"
        raise InvalidRequest(
            f"the chat template changes the final message ({what}), so it cannot be continued as it is. Send "
            "it as the template writes it, or a whole prompt to /v1/completions",
            param="continue_final_message",
        )
    return shown.removesuffix(marked) + content


def _template_message(message: ChatMessage, where: str) -> dict[str, str]:
    if message.role in ("tool", "function"):
        raise unsupported(f"{where}.role is {message.role!r}; this server has no tool calls", f"{where}.role")
    given = message.__dict__ | (message.model_extra or {})  # asking a model for what it lacks takes long
    for field in _LACKED:
        if given.get(field):
            raise unsupported(f"{where}.{field} is not supported by this server", f"{where}.{field}")
    result: dict[str, str] = {
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
