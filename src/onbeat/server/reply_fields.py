"""Fields of a chat: its messages, the tools that it may call, and how much the model is to reason.

Of the messages it is what a caller may send, and what a template gets of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationInfo, model_validator

from onbeat.core.errors import InvalidRequest, quoted
from onbeat.server.body import JsonReader, is_nested_too_deep
from onbeat.server.errors import unsupported
from onbeat.server.fields import Closed, Flag, Open, note_unknown
from onbeat.server.server_config import MAX_MESSAGES
from onbeat.text.reply.grammar import WantedCalls

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


MAX_TOOLS = 128
"""Most tools of one request (OpenAI's)."""

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class FunctionSpec(Open):
    """A function that the model may call."""

    place = "tools[].function."

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object; any object if absent."""
    strict: Flag | None = None
    """Whether arguments always keep to the schema."""


class ToolSpec(Open):
    """A tool; of type `function`, the only one that there is."""

    place = "tools[]."

    type: Literal["function"] = "function"
    function: FunctionSpec


class ToolChoiceName(Closed):
    name: ToolName


class NamedTool(Closed):
    """The tool that must be called, or one that may be."""

    type: Literal["function"]
    function: ToolChoiceName


class AllowedTools(Closed):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(Closed):
    """Of the tools only some may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


_ManyTools = Field(max_length=MAX_TOOLS, fail_fast=True)


class TemplateFields(BaseModel):
    """The fields of a body with a chat that becomes a prompt."""

    messages: ChatMessages | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    """Go on writing the last message instead of answering it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template, which go before what other fields ask of it."""

    @property
    def tool_use(self) -> ToolUse | None:
        """What the model may call, and how; None where it may call nothing."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that a model may call in an answer."""

    tools: Sequence[ToolSpec]
    is_required: bool
    """Whether it must call one or more."""
    named: str | None
    """The one that it must call, once."""
    is_single: bool
    """Whether it may call no more than one."""

    @property
    def wanted(self) -> WantedCalls:
        """What a grammar is to allow."""
        return WantedCalls(
            schemas=self.schemas,
            strict=frozenset(tool.function.name for tool in self.tools if tool.function.strict),
            is_required=self.is_required,
            is_single=self.is_single,
        )

    @property
    def schemas(self) -> dict[str, Any]:
        """The JSON schema of each tool's arguments."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The tools as chat templates get them."""
        return [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}, include=_SHOWN)
            for tool in self.tools
        ]


_SHOWN: Any = {"type": True, "function": {"name", "description", "parameters"}}
_Choice = Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None


def _tool_use(specs: Sequence[ToolSpec], choice: _Choice, *, is_single: bool) -> ToolUse | None:
    """Return what a choice leaves of the tools, None where it leaves none.

    Raises
    ------
    InvalidRequest : a name stands twice, or the choice names a tool that is not there.
    """
    names = [spec.function.name for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidRequest(f"tools has {twice!r} twice; give each its own name", param="tools")
    if choice == "none":
        return None
    wanted: list[str] = []
    if isinstance(choice, NamedTool):
        wanted = [choice.function.name]
    elif isinstance(choice, AllowedChoice):
        wanted = [tool.function.name for tool in choice.allowed_tools.tools]
    if missing := next((name for name in wanted if name not in names), None):
        raise InvalidRequest(
            f"tool_choice names {missing!r}, which is not among the tools", param="tool_choice"
        )
    return ToolUse(
        tools=[spec for spec in specs if not wanted or spec.function.name in wanted],
        is_required=isinstance(choice, NamedTool)
        or choice == "required"
        or (isinstance(choice, AllowedChoice) and choice.allowed_tools.mode == "required"),
        named=wanted[0] if isinstance(choice, NamedTool) else None,
        is_single=is_single or isinstance(choice, NamedTool),
    )


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_EMPTY_IS_NONE = BeforeValidator(lambda value: value or None)

EFFORT, SWITCH = "reasoning_effort", "enable_thinking"
"""Variables of chat templates: how much to reason, and whether to."""


class ThinkingSettings(Open):
    """Anthropic's `thinking`."""

    place = "thinking."

    type: Literal["enabled", "disabled", "adaptive"]


class ChatFields(TemplateFields):
    """The fields of a chat that its template is told of."""

    tools: Annotated[list[ToolSpec], _ManyTools] | None = None
    """Null and an empty list mean none."""
    tool_choice: _Choice = None
    """Auto unless given."""
    parallel_tool_calls: Flag | None = None
    """False ends an answer with its first call."""
    reasoning_effort: Annotated[Effort | None, _EMPTY_IS_NONE] = None
    """Other than `none` also sets the template's `enable_thinking`; so in the next."""
    thinking: Flag | ThinkingSettings | None = None

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """What the model may call, and how; None where it may call nothing.

        Raises
        ------
        InvalidRequest : the fields contradict each other.
        """
        if self.tools:
            return _tool_use(self.tools, self.tool_choice, is_single=self.parallel_tool_calls is False)
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest(
                "tool_choice asks for a call, but there are no tools; send tools", param="tool_choice"
            )
        return None

    @model_validator(mode="after")
    def _tell_template(self) -> ChatFields:
        """Add what they ask for to the template's variables."""
        if asked := self._asked:
            self.chat_template_kwargs = {**asked, **(self.chat_template_kwargs or {})}
        return self

    @property
    def _asked(self) -> dict[str, Any]:
        effort, thinking = self.reasoning_effort, self.thinking
        if isinstance(thinking, ThinkingSettings):
            thinking = thinking.type != "disabled"
        by_effort = None if effort is None else effort != "none"
        stated = {switch for switch in (thinking, by_effort) if switch is not None}
        if len(stated) > 1:
            raise InvalidRequest(
                "some fields ask for reasoning and others for none; send {field} alone", param=EFFORT
            )
        return {
            **({} if effort is None else {EFFORT: effort}),
            **dict.fromkeys({SWITCH} if stated else (), True in stated),
        }


def unread_variables(variables: dict[str, Any] | None, source: str) -> list[str]:
    """Return the variables that ask for reasoning, if a template reads neither of them.

    Parameters
    ----------
    variables : that it is given.
    source : the template.
    """
    if not (variables or {}).get(SWITCH) or SWITCH in source or EFFORT in source:
        return []
    return [f"chat_template_kwargs.{name}" for name in (EFFORT, SWITCH) if name in (variables or {})]
