"""How the parts of a chat's answers are told apart: by the model's family, and as one request wants it."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial
from string import ascii_letters, digits
from typing import NamedTuple

from onbeat.core.errors import ConfigError
from onbeat.core.protocols import Tokenizer
from onbeat.server.choices import TextOptions
from onbeat.server.config import ServerConfig
from onbeat.server.errors import unsupported
from onbeat.server.tools import ToolUse
from onbeat.text.chat_template import ChatTemplate
from onbeat.text.reply.families import FAMILIES, family_named, family_of, reasoning_named, reasoning_of
from onbeat.text.reply.parser import ReplyOptions, ReplyParser, ReplyStyle, opens_in_reasoning

_SHORT_ID = ascii_letters + digits


def reply_style(config: ServerConfig, template: ChatTemplate | None, tokenizer: Tokenizer) -> ReplyStyle:
    """Return how the model's answers to chats are written: as configured, or as its template shows.

    Raises
    ------
    ConfigError : the template says nothing of tools, and the configured family needs one that does.
    """
    if template is None:
        return ReplyStyle(None, None)
    special = {tokenizer.token_text(each) for each in tokenizer.special_token_ids}

    def has_token(text: str) -> bool:
        return text in special or len(tokenizer.encode(text, add_special_tokens=False)) == 1

    family = None
    if config.tool_call_parser == "auto":
        family = family_of(template.source) if template.knows_tools else FAMILIES["json"]
    elif config.tool_call_parser != "none":
        family = family_named(config.tool_call_parser)
    if family is not None and not (template.knows_tools or family.is_json):
        raise ConfigError(
            f"--tool-call-parser is {config.tool_call_parser}, but the chat template says nothing of tools; "
            "give --chat-template one that does, or leave the parser to auto"
        )
    reasoning = None
    if config.reasoning_parser == "auto":
        reasoning = reasoning_of(template.source, has_token)
    elif config.reasoning_parser != "none":
        reasoning = reasoning_named(config.reasoning_parser)
    return ReplyStyle(family, reasoning, tokenizer)


def read_as(
    style: ReplyStyle, options: TextOptions, use: ToolUse | None, place: PromptEnd, *, drops_reasoning: bool
) -> TextOptions:
    """Return how the text of a chat's answer is made, so that its parts are told apart where it has any.

    Parameters
    ----------
    style : of the model.
    options : as the caller wants its text.
    use : what the model may call; None where it may call nothing.
    place : where the answer begins.
    drops_reasoning : whether the caller does not want to see it.

    Raises
    ------
    InvalidRequest : there are tools, and the server was told to read no calls.
    """
    if use is not None and style.family is None:
        raise unsupported(
            "tools are not read by this server (--tool-call-parser none); leave them out", "tools"
        )
    if use is not None and (use.is_required or use.named or use.has_strict):
        what = "strict functions" if use.has_strict else "a call that must be made"
        raise unsupported(
            f"{what} cannot be promised by this server; leave the choice of a tool to auto, without strict",
            "tools" if use.has_strict else "tool_choice",
        )
    if use is None and style.reasoning is None:
        return options
    reply = ReplyOptions(
        tools={} if use is None else use.schemas,
        new_call_id=_short_id if style.family is not None and style.family.has_short_ids else _long_id,
        opens_in_reasoning=opens_in_reasoning(place.prompt, style.reasoning, place.continued),
        is_single=use is not None and use.is_single,
        drops_reasoning=drops_reasoning,
    )
    return replace(options, new_reader=partial(ReplyParser, style, reply))


class PromptEnd(NamedTuple):
    """Where an answer begins."""

    prompt: str
    """As the template has rendered it."""
    continued: str | None
    """The final message, if the answer goes on with it."""


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Return an id as Mistral's templates want it."""
    return "".join(secrets.choice(_SHORT_ID) for _ in range(9))
