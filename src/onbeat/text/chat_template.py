"""Chat messages to a prompt, by the model's own Jinja template in a sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from onbeat.core.errors import ConfigError, InvalidRequest
from onbeat.core.protocols import Tokenizer
from onbeat.text.template_sandbox import ChatSandbox, budget_variables

Messages = list[dict[str, Any]]


class ChatTemplate:
    """Renders chats as Hugging Face's `apply_chat_template` does.

    The `developer` role is shown to the template as `system` unless the template itself speaks of it.

    Parameters
    ----------
    source : Jinja template.
    bos_token, eos_token : special tokens as text, which templates may write out.

    Raises
    ------
    ConfigError : the template is not valid Jinja.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self._variables = {"bos_token": bos_token, "eos_token": eos_token}
        self._knows_developer = "developer" in source
        try:
            self._template = ChatSandbox().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid: {error}") from error

    def render(self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return the prompt of a chat.

        Parameters
        ----------
        messages : each with at least `role` and `content`.
        add_generation_prompt : whether the prompt ends where the assistant's answer begins.
        variables : more that the template may look at (`chat_template_kwargs`).

        Raises
        ------
        InvalidRequest : the template refuses these messages, fails on them, or computes too much.
        RecursionError : messages or variables are nested deeper than the template can follow.
        """
        if not self._knows_developer:
            messages = [_as_system(message) for message in messages]
        variables = {**self._variables, **variables, **budget_variables()}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            ArithmeticError,
            AttributeError,
        ) as error:
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", param="messages"
            ) from error


def load_chat_template(tokenizer: Tokenizer, override: Path | None) -> ChatTemplate | None:
    """Return the template in a file, or else the model's own, or None for a model without one.

    Raises
    ------
    ConfigError : the file cannot be read, or the template is not valid.
    """
    source = tokenizer.chat_template
    if override is not None:
        try:
            source = override.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the chat template {override}: {error}") from error
    if source is None:
        return None
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_ids
    return ChatTemplate(
        source,
        bos_token="" if bos is None else tokenizer.token_text(bos),
        eos_token=tokenizer.token_text(eos[0]) if eos else "",
    )


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message.get("role") == "developer" else message
