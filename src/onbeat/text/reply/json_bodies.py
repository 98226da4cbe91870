"""Calls that are written as JSON: objects with a name and arguments, or arguments behind a name."""

from __future__ import annotations

import json
import re
from abc import abstractmethod

from onbeat.text.reply import body
from onbeat.text.reply.calls import Calls

_TEXT_RUN = re.compile(r'[^"\\]*')
_NESTED_RUN = re.compile(r'[^"{}\[\]<`]*')
_LITERAL_RUN = re.compile(r'[^"{}\[\]<`,\s]*')
"""Outside of texts a mark may begin with `<` or a back-tick."""

_BEHIND_NAME = re.compile(r"\s*(\[CALL_ID\][\w.:-]*)?\s*(\[ARGS\])?\s*")
"""What may stand between a name and its arguments."""
_ARGUMENTS = frozenset(("arguments", "parameters"))


class JsonValue:
    """Finds the end of one JSON value; what stands between its brackets is not judged."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_escaped = False
        self._is_literal = False
        self.is_in_text = False
        self.is_over = False

    def push(self, text: str, at: int) -> int:
        """Take text from a position on and return where the value ended, or stopped before a mark perhaps."""
        while at < len(text) and not self.is_over:
            if self.is_in_text:
                at = self._push_text(text, at)
                continue
            run = _NESTED_RUN if self._depth else _LITERAL_RUN
            end = _end_of(run, text, at)
            self._is_literal |= end > at and not self._depth
            at = end
            if at == len(text):
                break
            if self._is_literal and not self._depth:
                self.is_over = True
            elif text[at] in "<`" or (not self._depth and text[at] in f",]}}{body.SPACE}"):
                break
            else:
                self._bracket(text[at])
                at += 1
        return at

    def _push_text(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        at = _end_of(_TEXT_RUN, text, at)
        if at < len(text):
            self._is_escaped = text[at] == "\\"
            self.is_in_text = self._is_escaped
            self.is_over = not self.is_in_text and not self._depth
            at += 1
        return at

    def _bracket(self, character: str) -> None:
        if character == '"':
            self.is_in_text = True
        elif character in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            self.is_over = not self._depth


class _JsonBody(body.Body):
    """Reads values of JSON."""

    def __init__(self, calls: Calls, first: body.Step) -> None:
        super().__init__(calls, first)
        self._value = JsonValue()

    @property
    def is_in_text(self) -> bool:
        return self._value.is_in_text

    def take(self, character: str) -> bool:
        if self._step != self._in_value:
            return False
        self._add(character)
        return True

    @abstractmethod
    def _in_value(self, text: str, at: int) -> int:
        """Take the value of arguments, or another."""

    def _add(self, text: str) -> None:
        """Add to the arguments of the call."""
        self._calls.add(text)


class JsonCalls(_JsonBody):
    """Objects with the keys `name` and `arguments` (or `parameters`), in any order, one or more or an array.

    Arguments before the name wait for it; once it is known they are passed on as they come.

    Parameters
    ----------
    calls : where they go.
    needs_arguments : whether an object without arguments is no call.
    """

    def __init__(self, calls: Calls, *, needs_arguments: bool = False) -> None:
        super().__init__(calls, self._between)
        self._needs_arguments = needs_arguments
        self._is_array = False
        self._is_call = False
        """Whether the object has become a call."""
        self._held: list[str] = []
        """The key or value that is being read."""
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None

    def _between(self, text: str, at: int) -> int:
        """Before an object: white space, what separates, the brackets of an array."""
        character, has_calls = text[at], self._has_calls
        is_start = character == "[" and not (self._is_array or has_calls)
        if character == "{":
            self._name, self._arguments, self._is_call = None, None, False
            self._step = self._before_key
        elif character == "]" and self._is_array:
            self._step = self._behind
        elif not is_start and character not in ",;}"[: 3 if has_calls else 2] + body.SPACE:
            return at
        self._is_array |= is_start
        if has_calls:
            self._raw.clear()
        if character == "{" or not has_calls:
            self._raw.append(character)
        return at + 1

    def _before_key(self, text: str, at: int) -> int:
        end = body.end_of_space(text, at)
        character = text[end : end + 1]
        if character == '"':
            self._begin(self._in_key)
        elif character == "}":
            end += 1
            self._step = self._between
        elif character == ",":
            end += 1
        self._keep(text[at:end])
        if character == "}" and self._name is not None and not (self._is_call or self._needs_arguments):
            self._start(self._name)
            self._calls.add("{}")
            self._calls.end()
        elif character == "}" and self._has_calls and not self._is_call:
            self._others.append("".join(self._raw))
            self._raw.clear()
        return end

    def _in_key(self, text: str, at: int) -> int:
        end = self._value.push(text, at)
        self._add(text[at:end])
        if self._value.is_over:
            self._key = _decoded("".join(self._held)) or ""
            self._step = self._before_value
        return end

    def _before_value(self, text: str, at: int) -> int:
        end = body.end_of_space(text, at)
        character = text[end : end + 1]
        end += character == ":"
        self._keep(text[at:end])
        if character and (character in '"{[-' or character.isalnum()):
            self._begin(self._in_value)
            is_known = self._key in _ARGUMENTS and self._name is not None and not self._is_call
            if is_known and character in "{[":
                self._start(self._name or "")
        return end

    def _in_value(self, text: str, at: int) -> int:
        end = self._value.push(text, at)
        self._add(text[at:end])
        if self._value.is_over:
            self._step = self._before_key
            self._end_value("".join(self._held))
        return end

    def _begin(self, step: body.Step) -> None:
        self._value, self._step, self._held = JsonValue(), step, []

    def _start(self, name: str) -> None:
        self._calls.start(name)
        self._raw.clear()
        self._is_call = True

    def _keep(self, text: str) -> None:
        if not self._is_call:
            self._raw.append(text)

    def _add(self, text: str) -> None:
        """Add to the key or value that is being read, or to the arguments of the call."""
        if self._calls.is_open:
            self._calls.add(text)
        elif not self._is_call:
            self._raw.append(text)
            self._held.append(text)

    def _end_value(self, value: str) -> None:
        if self._is_call:
            self._calls.end()
            return
        if self._key == "name" and self._name is None:
            self._name = _decoded(value)
            if self._name not in self._calls.tools:
                self._name = None
                self._step = self._step if self._has_calls else body.refuse
        elif self._key in _ARGUMENTS and self._arguments is None:
            self._arguments = _as_object(value)
        if self._name is not None and self._arguments is not None:
            self._start(self._name)
            self._calls.add(self._arguments)
            self._calls.end()


class NamedJson(_JsonBody):
    """A name and an object of arguments: `name{...}`, `name[ARGS]{...}`, `name[CALL_ID]id[ARGS]{...}`.

    Parameters
    ----------
    calls : where they go.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls, self._between)
        self._name = self._behind_name = ""

    def _between(self, text: str, at: int) -> int:
        end = body.end_of_space(text, at)
        self._raw.append(text[at:end])
        if text[end : end + 1] in body.NAME_CHARACTERS:
            self._name = self._behind_name = ""
            self._step = self._in_name
        return end

    def _in_name(self, text: str, at: int) -> int:
        end = body.end_of_name(text, at)
        self._name += text[at:end]
        self._raw.append(text[at:end])
        if end < len(text):
            self._step = self._before_value if self._name in self._calls.tools else body.refuse
        return end

    def _before_value(self, text: str, at: int) -> int:
        if text[at] != "{":
            self._behind_name += text[at]
            self._raw.append(text[at])
            return at + 1
        if not _BEHIND_NAME.fullmatch(self._behind_name):
            self._step = body.refuse
            return at
        self._calls.start(self._name)
        self._raw.clear()
        self._value, self._step = JsonValue(), self._in_value
        return at

    def _in_value(self, text: str, at: int) -> int:
        end = self._value.push(text, at)
        self._calls.add(text[at:end])
        if self._value.is_over:
            self._calls.end()
            self._step = self._between
        return end


def _end_of(run: re.Pattern[str], text: str, at: int) -> int:
    found = run.match(text, at)
    return at if found is None else found.end()


def _decoded(value: str) -> str | None:
    """Return what a JSON text says; None for any other value."""
    if not value.startswith('"'):
        return None
    try:
        return str(json.loads(value, strict=False))
    except ValueError:
        return None


def _as_object(value: str) -> str:
    """Return arguments as the caller gets them: an object in a text is that object, and null is empty."""
    if value == "null":
        return "{}"
    inner = _decoded(value)
    is_object = (
        inner is not None
        and inner.lstrip().startswith("{")
        and body.is_json(inner)
        and body.is_unicode(inner)
    )
    return inner if inner is not None and is_object else value
