"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Protocol

from pydantic import Field

from onbeat.core.errors import InvalidRequest
from onbeat.server.config import ServerConfig
from onbeat.server.messages import ChatMessages
from onbeat.server.sampling_fields import SamplingFields, Whole

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


class ChatCompletionRequest(SamplingFields):
    """OpenAI's chat completion, with vLLM's extra fields."""

    messages: ChatMessages
    max_completion_tokens: Whole | None = Field(None, ge=1)
    """Goes before the deprecated `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Go on writing the last message instead of answering it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def check_chat(body: ChatCompletionRequest, config: ServerConfig) -> None:
    """Check the fields that only chat has.

    Raises
    ------
    InvalidRequest : values contradict each other or exceed this server's caps.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(
            "top_logprobs is given without logprobs; set logprobs to true or leave it out",
            param="top_logprobs",
        )
    if (body.top_logprobs or 0) > config.max_logprobs:
        raise InvalidRequest(
            f"top_logprobs is {body.top_logprobs}; this server allows at most {config.max_logprobs}",
            param="top_logprobs",
        )
    check_rendering(body)


def check_rendering(body: RenderedChat) -> None:
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
