"""Calls whose parameters stand between tags: `<function=f><parameter=k>v</parameter></function>`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onbeat.text.reply.body import StepReader, end_of_space, is_json, refuse, to_json
from onbeat.text.reply.calls import Calls

_FUNCTION, _PARAMETER, _END_FUNCTION, _END_PARAMETER = (
    *("<function=", "<parameter="),
    *("</function>", "</parameter>"),
)
_TAGS = (_FUNCTION, _PARAMETER, _END_FUNCTION, _END_PARAMETER)
_ENDS_OF_VALUES = (_END_PARAMETER, _PARAMETER, _END_FUNCTION)


class XmlParams(StepReader):
    """Reads a parameter once it is complete, as its schema has it.

    Its value ends at `</parameter>`, or where that is missing at the next tag.

    Parameters
    ----------
    calls : where they go.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls, self._between)
        self._tag = ""
        self._name = ""
        """In a tag: of the function or the parameter."""
        self._schema: Any = None
        self._key = ""
        self._num_parameters = 0
        self._value: list[str] = []

    @property
    def is_in_text(self) -> bool:
        return self._step in (self._in_value, self._in_value_tag)

    def take(self, character: str) -> bool:
        """Begin a tag: what stands here is no mark."""
        if self._step != self._between or character != "<":
            return False
        self._keep(character)
        self._tag, self._step = character, self._in_tag
        return True

    def close(self, *, final: bool) -> None:
        if self._calls.is_open and not final:
            self._end_arguments()
        self._calls.end()

    def _between(self, text: str, at: int) -> int:
        end = end_of_space(text, at)
        self._keep(text[at:end])
        return end

    def _in_tag(self, text: str, at: int) -> int:
        tag = self._tag + text[at]
        if not any(each.startswith(tag) for each in _TAGS):
            return at
        self._tag = tag
        self._keep(text[at])
        if tag in _TAGS:
            self._on_tag(tag)
        return at + 1

    def _on_tag(self, tag: str) -> None:
        self._name = ""
        if tag == _FUNCTION:
            self._step = self._in_name
        elif not self._calls.is_open:
            self._step = refuse
        elif tag == _PARAMETER:
            self._step = self._in_key
        else:
            self._step = self._between
            if tag == _END_FUNCTION:
                self._end_arguments()
                self._calls.end()

    def _in_name(self, text: str, at: int) -> int:
        end = self._read_name(text, at)
        if end < len(text):
            if self._name not in self._calls.tools:
                self._step = refuse
                return end
            if self._calls.is_open:
                self._end_arguments()
                self._calls.end()
            self._calls.start(self._name)
            self._raw.clear()
            self._schema, self._num_parameters = self._calls.tools[self._name], 0
            self._step = self._between
            end += 1
        return end

    def _in_key(self, text: str, at: int) -> int:
        end = self._read_name(text, at)
        if end < len(text):
            self._key, self._value, self._step = self._name, [], self._in_value
            end += 1
        return end

    def _read_name(self, text: str, at: int) -> int:
        """Take what stands before `>`, and return where that is, or the end of the text."""
        end = text.find(">", at)
        end = len(text) if end < 0 else end
        self._name += text[at:end]
        self._keep(text[at:end])
        return end

    def _in_value(self, text: str, at: int) -> int:
        end = text.find("<", at)
        if end < 0:
            self._value.append(text[at:])
            return len(text)
        self._value.append(text[at:end])
        self._tag, self._step = "<", self._in_value_tag
        return end + 1

    def _in_value_tag(self, text: str, at: int) -> int:
        tag = self._tag + text[at]
        if not any(end.startswith(tag) for end in _ENDS_OF_VALUES):
            self._value.append(self._tag)
            self._step = self._in_value
            return at
        self._tag = tag
        if tag in _ENDS_OF_VALUES:
            self._end_value()
            self._on_tag(tag)
        return at + 1

    def _end_value(self) -> None:
        value = "".join(self._value).removeprefix("\n").removesuffix("\n")
        schema = _property(self._schema, self._key)
        self._calls.add(", " if self._num_parameters else "{")
        self._calls.add(f"{to_json(self._key)}: {_json_of(value, schema)}")
        self._num_parameters += 1

    def _end_arguments(self) -> None:
        self._calls.add("}" if self._num_parameters else "{}")

    def _keep(self, text: str) -> None:
        if not self._calls.is_open:
            self._raw.append(text)


def _property(schema: Any, key: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def _json_of(value: str, schema: Any) -> str:
    """Return the JSON of a parameter that was written as text."""
    types = types_of(schema)
    word = value.strip().lower()
    if word in ("true", "false") and "boolean" in types:
        return word
    if word in ("null", "none") and "null" in types:
        return "null"
    if "string" not in types and word not in ("null", "none") and is_json(value):
        return value.strip()
    return to_json(value)


def types_of(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows, as far as it says so; one that says nothing allows text."""
    if not isinstance(schema, Mapping):
        return frozenset(("string",))
    found: set[str] = set()
    types = schema.get("type")
    listed = types if isinstance(types, list) else [types]
    found.update(each for each in listed if isinstance(each, str))
    for name in ("anyOf", "oneOf"):
        alternatives = schema.get(name, ())
        found.update(*map(types_of, alternatives if isinstance(alternatives, list) else ()))
    values = schema.get("enum", [schema["const"]] if "const" in schema else ())
    for value in values if not found and isinstance(values, list) else ():
        found.add({str: "string", type(None): "null", bool: "boolean"}.get(type(value), "number"))
    return frozenset(found or ("string",))
