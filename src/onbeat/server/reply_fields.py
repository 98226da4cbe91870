"""Fields of a chat that shape its reply: the tools that it may call, and how much the model is to reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from onbeat.core.errors import InvalidRequest
from onbeat.server.chat_messages import ChatMessages
from onbeat.server.fields import Closed, Flag, Open
from onbeat.text.reply.grammar import WantedCalls

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
    def has_strict(self) -> bool:
        """Whether arguments of any must keep to its schema."""
        return any(tool.function.strict for tool in self.tools)

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
