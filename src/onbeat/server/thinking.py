"""How much a chat asks the model to reason: fields of several APIs, and variables of its template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, model_validator

from onbeat.core.errors import InvalidRequest
from onbeat.server.body import Flag
from onbeat.server.fields import ignorable

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_EMPTY_IS_NONE = BeforeValidator(lambda value: value or None)

EFFORT, SWITCH = "reasoning_effort", "enable_thinking"
"""Variables of chat templates: how much to reason, and whether to."""


class ReasoningSettings(BaseModel):
    """What OpenRouter and SGLang call `reasoning`."""

    model_config = ConfigDict(extra="allow", strict=True)

    effort: Effort | None = None
    enabled: Flag | None = None


class ThinkingSettings(BaseModel):
    """What Anthropic and DeepSeek call `thinking`."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["enabled", "disabled", "adaptive"]


class ThinkingFields(BaseModel):
    """The fields of a chat that say how much to reason. The template decides what comes of them."""

    reasoning_effort: Annotated[Effort | None, _EMPTY_IS_NONE] = None
    """Other than `none` also sets `enable_thinking`; so in the next."""
    reasoning: Annotated[ReasoningSettings | None, _EMPTY_IS_NONE] = None
    thinking: Flag | ThinkingSettings | None = None
    enable_thinking: Flag | None = None
    think: Flag | Literal["low", "medium", "high"] | None = None
    """Ollama's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template, which go before the fields above."""

    @model_validator(mode="after")
    def _tell_template(self, info: ValidationInfo) -> ThinkingFields:
        """Add what they ask for to the template's variables."""
        ignored_fields = info.context
        assert isinstance(ignored_fields, list), "`body.read_body` gives it"
        for name in ("reasoning", "thinking"):
            settings = getattr(self, name)
            if isinstance(settings, BaseModel) and settings.model_extra:
                known = type(settings).model_fields
                ignored_fields += ignorable(settings.model_extra.keys(), known, where=f"{name}.")
        if asked := self._asked:
            self.chat_template_kwargs = {**asked, **(self.chat_template_kwargs or {})}
        return self

    @property
    def _asked(self) -> dict[str, Any]:
        settings = self.reasoning or ReasoningSettings()
        effort = self.reasoning_effort or settings.effort
        if isinstance(self.think, str):
            effort = effort or self.think
        thinking = self.thinking
        if isinstance(thinking, ThinkingSettings):
            thinking = thinking.type != "disabled"
        by_effort = None if effort is None else effort != "none"
        think = None if isinstance(self.think, str) else self.think
        switches = (self.enable_thinking, think, thinking, settings.enabled, by_effort)
        stated = {switch for switch in switches if switch is not None}
        if len(stated) > 1:
            raise InvalidRequest(
                "some fields ask for reasoning and others for none; send reasoning_effort alone",
                param=EFFORT,
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
