"""Patterns of JSON schemas, which are ECMA-262's, as the library's regular expressions read them.

The library takes a class that has all control characters, or all but the line feed, for one that also has the
quotation mark and the backslash, since JSON escapes all of these. So no class here has U+0000. And `[`, `&&`,
`--` and `~~` are characters of a class in ECMA-262, but operators in the library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from onbeat.core.errors import InvalidRequest

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
