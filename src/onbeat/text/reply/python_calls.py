"""Calls that are written as a list of Python's: `[f(a=1), g()]`. Each is read once it is complete."""

from __future__ import annotations

import ast
import re

from onbeat.text.reply import body
from onbeat.text.reply.calls import Calls

_COST, _COST_IN_TEXT, _MOST_COST = 40, 1, 400_000
"""Of a call's characters. Python's parser reads a call at once, where it holds up other requests: a thousand
characters of numbers or lists take it half a millisecond, and a text as long a tenth of that or less. A call
of more is no call, but text."""
# texts, what stands between, and what may separate arguments
_PART = re.compile(
    r"""'{3}(?:\\.|[^\\])*?'{3}|"{3}(?:\\.|[^\\])*?"{3}|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|"""
    r"""[^'"()\[\]{},=]+|.""",
    re.DOTALL,
)
_KEY = re.compile(r"\w\S*")
_PLAIN = frozenset(map(chr, range(128))) - frozenset("'\"()[]{}<")
"""Outside of texts, what ends and begins nothing. A mark may begin with `<`."""


class PythonCalls(body.Body):
    """A list of calls whose arguments are literals with names.

    Parameters
    ----------
    calls : where they go.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls, self._before_list)
        self._item: list[str] = []
        self._quote = self._run = ""
        """What ends the text, empty outside of one; and the quotes that stand just before."""
        self._is_escaped = False
        self._depth = 0
        self._cost = 0

    @property
    def is_in_text(self) -> bool:
        return bool(self._quote)

    def take(self, character: str) -> bool:
        if self._step != self._in_arguments:
            return False
        self._run = ""
        self._keep(character)
        self._cost += _COST
        return True

    def _before_list(self, text: str, at: int) -> int:
        end = body.end_of_space(text, at)
        if text[end : end + 1] == "[":
            end += 1
            self._step = self._between
        self._raw.append(text[at:end])
        return end

    def _between(self, text: str, at: int) -> int:
        character, has_calls = text[at], self._has_calls
        if character in body.NAME_CHARACTERS:
            self._item = []
            self._cost = 0
            self._step = self._in_name
            if has_calls:
                self._raw.clear()
            return at
        if character == "]":
            self._step = self._behind
        elif character not in "," + body.SPACE:
            return at
        if not has_calls:
            self._raw.append(character)
        return at + 1

    def _in_name(self, text: str, at: int) -> int:
        end = body.end_of_name(text, at)
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
                self._step = body.refuse
                break
            if self._quote or character in "'\"":
                self._in_quote(character)
            elif character == "<":
                break
            else:
                self._run = ""
                if character not in _PLAIN and self._bracket(character):
                    self._keep(text[at : end + 1])
                    self._end_item()
                    return end + 1
            end += 1
        self._keep(text[at:end])
        return end

    def _in_quote(self, character: str) -> None:
        """Take a character of a text, or the quote that begins one: three begin one that three end."""
        if not self._quote:
            self._quote = character * (3 if self._run == 2 * character else 1)
            self._run = character * (len(self._quote) == 1)
            return
        is_quote = character == self._quote[0] and not self._is_escaped
        self._run = self._run + character if is_quote else ""
        self._is_escaped = character == "\\" and not self._is_escaped
        if is_quote and (len(self._quote) == 1 or self._run == self._quote):
            self._quote = ""

    def _bracket(self, character: str) -> bool:
        """Take a bracket outside of texts; return whether it ends the call."""
        if character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1
            return not self._depth
        return False

    def _end_item(self) -> None:
        item = "".join(self._item)
        called = _call_of(item)
        self._step = self._between
        if called is not None and called[0] in self._calls.tools:
            self._calls.whole(*called)
        else:
            self._others.append(item)
        if self._has_calls:
            self._raw.clear()

    def _keep(self, text: str) -> None:
        self._raw.append(text)
        self._item.append(text)


def _call_of(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON, of a call; None if it is none.

    It is read as a dictionary, since names may be such as Python has not (`get-weather`, `from`).
    """
    name, *parts = _PART.findall(text)
    depth = num_arguments = 0
    for index, part in enumerate(parts):
        depth += (part in "([{") - (part in ")]}")
        if part == "=" and depth == 1:
            num_arguments += 1
            if not _KEY.fullmatch(key := parts[index - 1].strip()):
                return None
            parts[index - 1 : index + 1] = repr(key), ":"
    parts[0], parts[-1] = "{", "}" * (parts[-1] == ")")
    try:
        arguments = ast.literal_eval(_JsonWords().visit(ast.parse("".join(parts), mode="eval")))
        is_call = isinstance(arguments, dict) and len(arguments) == num_arguments
        return (name, body.to_json(arguments)) if is_call else None
    except (LookupError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return None


class _JsonWords(ast.NodeTransformer):
    """Puts values in place of names that models write as in JSON."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])
