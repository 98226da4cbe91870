"""From JSON schemas, regular expressions, choices and Lark texts to a `Grammar`; pure, compiles nothing.

The texts are in llguidance's variant of Lark: rules in lower case, terminals in upper case, patterns between
slashes, `%json {...}` for a value by a JSON schema, `<|name|>` for a special token.

Patterns of JSON schemas are ECMA-262's, rewritten as the library reads them. It takes a class that has all
control characters, or all but the line feed, for one that also has the quotation mark and the backslash,
since JSON escapes all of these. So no class here has U+0000. And `[`, `&&`, `--` and `~~` are characters of a
class in ECMA-262, but operators in the library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from onbeat.core.errors import InvalidRequest
from onbeat.core.request import Grammar
from onbeat.text.grammar.limits import check_schema, check_size

_TOKEN = re.compile(
    r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u\{\w+\}|\\u\w{4}|\\x\w\w|\\c[a-zA-Z]|\\[pP]\{[^}]*\}|\\."
    r"|\{\d+(?:,\d*)?\}|.",
    re.DOTALL,
)
_NOTHING = re.compile(r"\\?\x00|\\0|\\x00|\\u0000|\\u\{0+\}")
_SPACE = "\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_OTHERS = {r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]", r"\<": "<", r"\>": ">"}
"""What the library reads as something else, anywhere."""
_OUTSIDE = {**_OTHERS, ".": "[^\n\r\u2028\u2029]", "{": r"\{", "}": r"\}"}
_INSIDE = {**_OTHERS, r"\b": r"\x08", r"\0": r"\x00", **{each: rf"\{each}" for each in "[&~-^"}}

_SET = re.compile(r"\[|\\[dDwWpP]")


def rust_pattern(pattern: str) -> str:
    """Return a pattern that matches in JSON what this one matches in a text, if that has no U+0000.

    Raises
    ------
    InvalidRequest : it asks for U+0000, or a class has no end.
    """
    tokens = iter(_TOKEN.findall(pattern))
    parts = []
    for token in tokens:
        if _NOTHING.fullmatch(token):
            raise _not_held(pattern, "asks for U+0000, which no answer may have")
        if token == "[":
            token = _class(pattern, tokens)
        elif token[:2] in (r"\p", r"\P"):
            token = rf"[{token}--\x00]"
        parts.append(_OUTSIDE.get(token) or _escape(token))
    return "".join(parts)


def _class(pattern: str, tokens: Iterator[str]) -> str:
    """Return a class whose opening bracket has been taken."""
    inside = []
    for token in tokens:
        if token == "]":
            break
        inside.append(token)
    else:
        raise _not_held(pattern, "has a class without an end; close its bracket")
    is_negated = inside[:1] == ["^"]
    members, parts = inside[is_negated:], []
    while members:
        parts.append(_member(members.pop(0)))
        if members[:1] == ["-"] and len(members) > 1:
            end = _member(members[1])
            is_range = not (_SET.match(parts[-1]) or _SET.match(end))
            parts += ["-" if is_range else r"\-", end]
            del members[:2]
    if not parts:
        return r"[^\x00]" if is_negated else "[a&&b]"
    return rf"[[{'^' * is_negated}{''.join(parts)}]--\x00]"


def _not_held(pattern: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"the pattern {pattern[:100]!r} {why}", code="unsupported_schema")


def _member(token: str) -> str:
    return _INSIDE.get(token) or _escape(token)


def _escape(token: str) -> str:
    """Return an escape that the library lacks as one that it has."""
    if token[:2] == r"\c":
        return rf"\x{ord(token[2]) % 32:02x}"
    if token[:2] == r"\u" and len(token) == 12:  # the halves of a character
        return token.encode().decode("unicode_escape").encode("utf-16", "surrogatepass").decode("utf-16")
    return token


_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
DATA = frozenset(("enum", "const", "default", "examples"))
"""Keywords that hold no schemas."""
Change = Callable[[dict[str, Any]], dict[str, Any]]


def changed(schema: Any, change: Change, others: frozenset[str] = DATA) -> Any:
    """Return a schema in which each schema is changed, those inside of it first.

    Parameters
    ----------
    others : keywords whose values stay as they are.
    """
    if isinstance(schema, list):
        return [changed(each, change, others) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inside = {
        key: value
        if key in others
        else {name: changed(each, change, others) for name, each in value.items()}
        if key in _BY_NAME and isinstance(value, dict)
        else changed(value, change, others)
        for key, value in schema.items()
    }
    return change(inside)


def with_rust_patterns(schema: Any) -> Any:
    """Return a schema whose patterns are written for the library; see `rust_pattern`."""
    return changed(schema, _written)


def _written(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = rust_pattern(pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {rust_pattern(name): each for name, each in patterns.items()}
    return schema


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
        if self.white_space is not None and bounds_white_space():
            white_space = {"whitespace_pattern": self.white_space}
        elif self.white_space is not None:
            space = f"(?:{self.white_space})?"
            white_space |= {"item_separator": f"{space},{space}", "key_separator": f"{space}:{space}"}
        return {**white_space, "lenient": self.is_lenient, "coerce_one_of": self.is_lenient}


@cache
def bounds_white_space() -> bool:
    """Return whether the library keeps to a pattern of white space; before 1.9 one may follow another."""
    return tuple(map(int, version("llguidance").split(".")[:2])) >= (1, 9)


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


def regex_grammar(pattern: str) -> Grammar:
    """Return the grammar of the texts that a regular expression matches as a whole."""
    check_size(pattern)
    return lark_grammar("start: " + (f"/{''.join(_slashes_escaped(pattern))}/" if pattern else ""))


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
