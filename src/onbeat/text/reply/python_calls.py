"""Calls that are written as a list of Python's: `[f(a=1), g()]`. Each is read once it is complete."""

from __future__ import annotations

import ast
import math
from typing import Any

from onbeat.text.reply.body import (
    NAME_CHARACTERS,
    SPACE,
    StepReader,
    end_of_name,
    end_of_space,
    refuse,
    to_json,
)
from onbeat.text.reply.calls import Calls

_JSON_WORDS = {"true": True, "false": False, "null": None}
"""Names that models write as in JSON."""
_COST, _COST_IN_TEXT, _MOST_COST = 40, 1, 400_000
"""Of a call's characters. Python's parser reads a call at once, where it holds up other requests: a thousand
characters of numbers or lists take it half a millisecond, and a text as long a tenth of that or less. A call
of more is no call, but text."""
_PLAIN = frozenset(map(chr, range(128))) - frozenset("'\"()[]{}<")
"""Outside of texts, what ends and begins nothing. A mark may begin with `<`."""


class PythonCalls(StepReader):
    """A list of calls whose arguments are literals with names.

    Parameters
    ----------
    calls : where they go.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls, self._before_list)
        self._item: list[str] = []
        self._quote = ""
        self._is_escaped = False
        self._depth = 0
        self._cost = 0

    @property
    def is_in_text(self) -> bool:
        return bool(self._quote)

    def take(self, character: str) -> bool:
        if self._step != self._in_arguments:
            return False
        self._keep(character)
        self._cost += _COST
        return True

    def _before_list(self, text: str, at: int) -> int:
        end = end_of_space(text, at)
        if text[end : end + 1] == "[":
            end += 1
            self._step = self._between
        self._raw.append(text[at:end])
        return end

    def _between(self, text: str, at: int) -> int:
        character, has_calls = text[at], self._has_calls
        if character in NAME_CHARACTERS:
            self._item = []
            self._cost = 0
            self._step = self._in_name
            if has_calls:
                self._raw.clear()
            return at
        if character == "]":
            self._step = self._behind
        elif character not in "," + SPACE:
            return at
        if not has_calls:
            self._raw.append(character)
        return at + 1

    def _in_name(self, text: str, at: int) -> int:
        end = end_of_name(text, at)
        self._keep(text[at:end])
        if text[end : end + 1] == "(":
            self._step = self._in_arguments
        return end

    def _in_arguments(self, text: str, at: int) -> int:
        end = at
        while end < len(text):
            character = text[end]
            self._cost += _COST_IN_TEXT if self._quote else _COST
            if self._cost > _MOST_COST:
                self._step = refuse
                break
            if self._quote:
                self._in_quote(character)
            elif character == "<":
                break
            elif character not in _PLAIN and self._bracket(character):
                self._keep(text[at : end + 1])
                self._end_item()
                return end + 1
            end += 1
        self._keep(text[at:end])
        return end

    def _in_quote(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == self._quote:
            self._quote = ""

    def _bracket(self, character: str) -> bool:
        """Take a quote or bracket outside of texts; return whether it ends the call."""
        if character in "'\"":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1
            return not self._depth
        return False

    def _end_item(self) -> None:
        called = _call_of("".join(self._item))
        self._step = self._between
        if called is None or called[0] not in self._calls.tools:
            self._step = refuse
            return
        self._raw.clear()
        self._calls.whole(*called)

    def _keep(self, text: str) -> None:
        self._raw.append(text)
        self._item.append(text)


def _call_of(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON, of a call; None if it is none."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        arguments = {keyword.arg: _value(keyword.value) for keyword in tree.keywords}
        if None in arguments:  # **kwargs
            return None
        return ast.unparse(tree.func), to_json(arguments)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _value(node: ast.expr) -> Any:
    """Return the value of a literal that JSON has, too.

    Raises
    ------
    ValueError : it is none.
    """
    match node:
        case ast.Constant(value=None | bool() | int() | str() as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.Name(id=name) if name in _JSON_WORDS:
            return _JSON_WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=values) | ast.Tuple(elts=values):
            return [_value(each) for each in values]
        case ast.Dict(keys=keys, values=values) if all(
            isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys
        ):
            return {key.value: _value(value) for key, value in zip(keys, values, strict=True)}  # type: ignore[union-attr]
    raise ValueError(ast.dump(node))
