"""How the parts of a chat's answers are told apart: by the model's family, and as one request wants it."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial
from string import ascii_letters, digits
from typing import NamedTuple

from onbeat.core.errors import ConfigError
from onbeat.core.request import Grammar
from onbeat.core.tokenizer import Tokenizer
from onbeat.server.choices import TextOptions
from onbeat.server.errors import unsupported
from onbeat.server.reply_fields import ToolUse
from onbeat.server.server_config import ServerConfig
from onbeat.server.structured import Constraint
from onbeat.text.chat_template import ChatTemplate
from onbeat.text.reply.families import FAMILIES, family_named, family_of, reasoning_named, reasoning_of
from onbeat.text.reply.grammar import WantedCalls, answer_grammar
from onbeat.text.reply.harmony import new_reader
from onbeat.text.reply.parser import ReplyOptions, ReplyStyle, opens_in_reasoning

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


class ReplyPlan(NamedTuple):
    """How the answers of a request are made."""

    options: TextOptions
    """How tokens become text, and the text parts."""
    constraint: Constraint | None
    """What they must match, reasoning and calls included."""


def plan_reply(
    style: ReplyStyle,
    asked: ReplyPlan,
    use: ToolUse | None,
    prompt: str,
    continued: str | None,
    *,
    drops_reasoning: bool,
) -> ReplyPlan:
    """Return how a chat's answers are made, so that their parts are told apart where they have any.

    Parameters
    ----------
    style : of the model.
    asked : how the caller wants its text, and what the text must match.
    use : what the model may call; None where it may call nothing.
    prompt : as the template has rendered it.
    continued : the final message, if the answer goes on with it.
    drops_reasoning : whether the caller does not want to see it.

    Raises
    ------
    InvalidRequest : there are tools, and the server was told to read no calls.
    """
    if use is not None and style.family is None:
        raise unsupported(
            "tools are not read by this server (--tool-call-parser none); leave them out", "tools"
        )
    if use is None and style.reasoning is None:
        return asked
    options, constraint = asked
    opens = opens_in_reasoning(prompt, style.reasoning, continued)
    calls = None if use is None else use.wanted
    must_call = calls is not None and bool(calls.is_required or calls.strict)
    if is_guided := must_call or constraint is not None:
        style = style.guided
        make = partial(_grammar, style, text=constraint, opens_in_reasoning=opens)
        parts = [] if constraint is None else [constraint]
        if calls is not None:
            for name, schema in calls.schemas.items():
                alone = partial(make, replace(calls, schemas={name: schema}), text=None)
                parts.append(Constraint("tools", alone, whose=f", the function {name!r}"))
        field = "tools" if use is not None or constraint is None else constraint.field
        constraint = Constraint(field, partial(make, calls), parts)
    reply = ReplyOptions(
        tools={} if use is None else use.schemas,
        new_call_id=partial(_call_id, is_short=style.family is not None and style.family.has_short_ids),
        opens_in_reasoning=opens,
        is_single=use is not None and use.is_single,
        drops_reasoning=drops_reasoning,
        is_guided=is_guided,
    )
    return ReplyPlan(replace(options, new_reader=partial(new_reader, style, reply)), constraint)


def _grammar(
    style: ReplyStyle, calls: WantedCalls | None, *, text: Constraint | None, opens_in_reasoning: bool
) -> Grammar:
    given = None if text is None else text.make()
    return answer_grammar(style, calls, given, opens_in_reasoning=opens_in_reasoning)


def _call_id(*, is_short: bool) -> str:
    """Return the id of a call; short ones are as Mistral's templates want them."""
    return (
        "".join(secrets.choice(_SHORT_ID) for _ in range(9)) if is_short else f"call_{secrets.token_hex(12)}"
    )
