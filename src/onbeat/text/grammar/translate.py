"""Other forms of grammars in ours: GBNF, structural tags, and schemas as they are meant to be read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from onbeat.core.errors import InvalidRequest
from onbeat.text.grammar.gbnf import gbnf_to_lark
from onbeat.text.grammar.limits import check_schema, check_size, schemas_in
from onbeat.text.grammar.patterns import DATA, changed, with_rust_patterns
from onbeat.text.grammar.source import JsonStyle, Schema, embedded_json, lark_text

_ANY_TEXT = r"TEXT: /(.|\n)*/"


def lark_of(text: str) -> str:
    """Return a grammar as Lark: GBNF, which has `::=`, is translated.

    Raises
    ------
    InvalidRequest : it is no GBNF, or too long.
    """
    check_size(text)
    if "::=" not in text:
        parts, end = list[str](), 0
        for start, after, schema in schemas_in(text):
            parts += (text[end:start], json.dumps(with_rust_patterns(schema), ensure_ascii=False))
            end = after
        return "".join((*parts, text[end:]))
    try:
        return gbnf_to_lark(text)
    except RecursionError as error:
        why = "the grammar is not valid GBNF: it is nested too deep"
        raise InvalidRequest(why, code="invalid_value") from error


@dataclass(frozen=True, slots=True)
class TaggedJson:
    """JSON between two texts, inside of free text."""

    begin: str
    schema: Schema
    end: str


def tagged_lark(tags: Sequence[TaggedJson], triggers: Sequence[str], style: JsonStyle) -> str:
    """Return the grammar of free text in which each trigger begins one of the tags.

    Parameters
    ----------
    triggers : each begins at least one tag; the text in between holds none of them.

    Raises
    ------
    InvalidRequest : a tag begins with no trigger, or a trigger begins no tag.
    """
    rules, starts = [], []
    left = list(tags)
    for index, trigger in enumerate(triggers):
        here = [tag for tag in left if trigger and tag.begin.startswith(trigger)]
        if not here:
            raise InvalidRequest(f"the trigger {trigger[:50]!r} begins no structure; leave it out")
        left = [tag for tag in left if tag not in here]
        bodies = [
            " ".join(
                (
                    lark_text(tag.begin[len(trigger) :]),
                    embedded_json(tag.schema, style),
                    lark_text(tag.end),
                )
            )
            for tag in here
        ]
        starts.append(f"tag_{index}")
        rules.append(f"trigger_{index}[lazy]: TEXT {lark_text(trigger)}")
        rules.append(f"tag_{index}: trigger_{index} ({' | '.join(bodies)})")
    if left:
        raise InvalidRequest(f"the structure that begins with {left[0].begin[:50]!r} has no trigger; add one")
    return "\n".join((f"start: ({' | '.join(starts)})* rest", "rest: TEXT", _ANY_TEXT, *rules))


def renamed(text: str, name: str) -> str:
    """Return a Lark text whose rule `start` has another name, so that it may stand inside of another text.

    What is said to the library (`%llguidance`) is left out: only the whole text says it.
    """
    text = _OPTIONS.sub("", text)
    parts, end = list[str](), 0
    for found in _WORDS.finditer(text):
        if found.start() < end:
            continue  # inside of a schema
        parts.append(text[end : found.start()])
        end = found.end()
        word = found.group()
        if word.startswith("%json"):
            with suppress(ValueError):  # the library says what is wrong
                _, end = json.JSONDecoder().raw_decode(text, end)
                word = text[found.start() : end]
        parts.append(name if word == "start" else word)
    return "".join((*parts, text[end:]))


_OPTIONS = re.compile(r"%llguidance\s*\{[^}]*\}")
_WORDS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|%json\s*|\b\w+\b')


def closed(schema: Any) -> Any:
    """Return a schema whose objects have the properties that they name, and no others unless they say so.

    Members of an `allOf` stay open: together they name an object's properties.

    Raises
    ------
    TooComplex : the schema is too long or too deep.
    """
    check_schema(schema)
    return changed(schema, _closed, DATA | {"allOf"})


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema
