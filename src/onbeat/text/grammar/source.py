"""From JSON schemas, regular expressions, choices and Lark texts to a `Grammar`; pure, compiles nothing.

The texts are in llguidance's variant of Lark: rules in lower case, terminals in upper case, patterns between
slashes, `%json {...}` for a value by a JSON schema, `<|name|>` for a special token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onbeat.core.request import Grammar
from onbeat.text.grammar.limits import check_schema, check_size
from onbeat.text.grammar.patterns import with_rust_patterns

Schema = Mapping[str, Any] | bool
"""A JSON schema: an object, or true (any value) or false (none)."""

WHITE_SPACE = r"[ \t\n\r]{1,16}"
"""Between the parts of JSON. Bounded: a small model would write line ends up to `max_tokens`."""
OPTIONS_KEY = "x-guidance"
"""Field of a schema that llguidance takes options from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonStyle:
    """How JSON is written, and what becomes of schema keywords that cannot be enforced."""

    white_space: str | None = WHITE_SPACE
    """Regular expression of what may stand between the parts; None allows none."""
    is_lenient: bool = False
    """Ignore keywords that cannot be enforced; else compiling refuses the schema."""

    def options(self) -> dict[str, Any]:
        """Return llguidance's options."""
        white_space: dict[str, Any] = {"whitespace_flexible": False}
        if self.white_space is not None:
            white_space = {"whitespace_pattern": self.white_space}
        return {**white_space, "lenient": self.is_lenient, "coerce_one_of": self.is_lenient}


COMPACT = JsonStyle(white_space=None)
"""No white space: the fewest tokens."""


_ANY_SPELLING = '\n%llguidance {"no_forcing": true}\n'
"""Text that is forced may come in any tokens that spell it. Else the library would allow one spelling alone
when asked for all tokens, and each of them when asked for one."""


def json_grammar(schema: Schema, style: JsonStyle = JsonStyle()) -> Grammar:
    """Return the grammar of a JSON value by a schema."""
    return lark_grammar("start: " + embedded_json(schema, style))


def lark_grammar(text: str) -> Grammar:
    """Return the grammar of a Lark text, which begins at its rule `start`; see `embedded_json`.

    Raises
    ------
    TooComplex : it is too long; nobody copies or hashes it.
    """
    check_size(text)
    return Grammar.of(text + _ANY_SPELLING)


def embedded_json(schema: Schema, style: JsonStyle = JsonStyle()) -> str:
    """Return what stands in a Lark rule for a JSON value by a schema: `call: "<call>" %json {...}`.

    Raises
    ------
    TooComplex : the schema, or how it is written, is too long or too deep.
    """
    whole = _with_options(schema, style)
    check_schema(whole)
    text = json.dumps(whole, ensure_ascii=False)
    if '"pattern' in text:
        text = json.dumps(with_rust_patterns(whole), ensure_ascii=False)
    return "%json " + text


def lark_text(text: str) -> str:
    """Return what stands in a Lark rule for a text, to the letter; for an empty one, nothing."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") if text else ""


def lark_pattern(pattern: str) -> str:
    """Return what stands in a Lark rule for a regular expression, which the whole text must match."""
    return f"/{''.join(_slashes_escaped(pattern))}/" if pattern else ""


def regex_grammar(pattern: str) -> Grammar:
    """Return the grammar of the texts that a regular expression matches as a whole."""
    check_size(pattern)
    return lark_grammar(f"start: {lark_pattern(pattern)}")


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """Return the grammar of one of several texts."""
    return lark_grammar("start: " + " | ".join(map(lark_text, choices)))


def _with_options(schema: Schema, style: JsonStyle) -> dict[str, Any]:
    """Return a schema as an object that names our options; they go before those of its author."""
    if isinstance(schema, bool):
        schema = {} if schema else {"allOf": [False]}
    return {**schema, OPTIONS_KEY: style.options()}


def _slashes_escaped(pattern: str) -> list[str]:
    """Return a pattern without the slashes and line ends that would end it in Lark."""
    parts: list[str] = []
    is_escaped = False
    for character in pattern:
        if character == "\n":
            parts.append("n" if is_escaped else r"\n")
        else:
            parts.append(rf"\{character}" if character == "/" and not is_escaped else character)
        is_escaped = character == "\\" and not is_escaped
    return parts
