"""Chat messages to a prompt, by the model's own Jinja template in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onbeat.core.errors import ConfigError, InvalidRequest
from onbeat.core.protocols import Tokenizer

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
            self._template = _environment().from_string(source)
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
        InvalidRequest : the template refuses these messages, or cannot be evaluated with them.
        """
        if not self._knows_developer:
            messages = [_as_system(message) for message in messages]
        variables = {**self._variables, **variables}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _format_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> Callable[..., Any]:
    raise jinja2.TemplateError(message)


def _format_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
