"""Calls whose parameters stand between tags: `<function=f><parameter=k>v</parameter></function>`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import unquote

from onbeat.text.reply.body import Body, end_of_name, end_of_space, is_json, refuse, to_json
from onbeat.text.reply.calls import Calls

_FUNCTION, _PARAMETER, _END_FUNCTION, _END_PARAMETER = (
    *("<function=", "<parameter="),
    *("</function>", "</parameter>"),
)
_TAGS = (_FUNCTION, _PARAMETER, _END_FUNCTION, _END_PARAMETER)
_ENDS_OF_VALUES = (_END_PARAMETER, _PARAMETER, _END_FUNCTION)


class XmlParams(Body):
    """Reads a parameter once it is complete, as its schema has it.

    Its value ends at `</parameter>`, or where that is missing at the next tag. Within a line `</parameter>`
    is a part of the value where no tag or mark stands behind it, and so is any tag inside of a JSON text.

    Parameters
    ----------
    calls : where they go.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls, self._between)
        self._tag = ""
        self._name = ""
        """In a tag: of the function or the parameter."""
        self._function = ""
        """One that has been named, and is a call as soon as a tag or a mark follows."""
        self._tool: Any = None  # the schema of the call's arguments
        self._keys: set[str] = set()  # of the parameters that the call has
        self._types: Collection[str] = ()
        self._value: list[str] = []
        self._ending = ""
        """The tag that may have ended the value, and the white space behind it."""

    @property
    def is_in_text(self) -> bool:
        return self._step in (self._in_value, self._in_value_tag)

    def take(self, character: str) -> bool:
        """Begin a tag: what stands here is no mark. What is no tag either goes on with a value."""
        if self._step == self._between and character == "<":
            self._keep(character)
            self._tag, self._step = character, self._in_tag
            return True
        self._function = ""
        if not self._ending:
            return False
        self._go_on(self._ending + self._tag * (self._step == self._in_tag))
        self.push(character, 0)
        return True

    def close(self, *, final: bool) -> None:
        if self._ending:
            self._end_value()
        if not final:
            self._end_call()
        self._calls.end()

    def _between(self, text: str, at: int) -> int:
        end = end_of_space(text, at)
        self._keep(text[at:end])
        self._ending += text[at:end] * bool(self._ending)
        return end

    def _in_tag(self, text: str, at: int) -> int:
        tag = self._tag + text[at]
        if not any(each.startswith(tag) for each in _TAGS):
            return at
        self._tag = tag
        self._keep(text[at])
        if tag in _TAGS:
            if self._ending:
                self._end_value()
            self._on_tag(tag)
        return at + 1

    def _on_tag(self, tag: str) -> None:
        self._name = ""
        if tag == _FUNCTION:
            if self._begins_call():
                self._end_call()
                self._keep(tag)
            self._step = self._in_name
        elif not self._begins_call():
            self._step = refuse
        elif tag == _PARAMETER:
            self._step = self._in_key
        else:
            self._step = self._between
            if tag == _END_FUNCTION:
                self._end_call()

    def _in_name(self, text: str, at: int) -> int:
        end = end_of_name(text, at)
        self._name += text[at:end]
        self._keep(text[at:end])
        if end == len(text):
            return end
        if text[end] != ">" or self._name not in self._calls.tools:
            self._step = refuse
            return end
        self._function, self._step = self._name, self._between
        self._keep(text[end])
        return end + 1

    def _begins_call(self) -> bool:
        """Begin the call of a function that was named; return whether there is a call that goes on."""
        if self._function:
            self._calls.start(self._function)
            self._raw.clear()
            self._keys, self._tool = set(), self._calls.tools[self._function]
            self._function = ""
        return self._calls.is_open

    def _in_key(self, text: str, at: int) -> int:
        end = text.find(">", at)
        self._name += text[at : end if end >= 0 else len(text)]
        if end < 0:
            return len(text)
        self._value, self._step = [], self._in_value
        properties = merged(self._tool, self._tool).get("properties")
        schema = properties.get(self._name) if isinstance(properties, dict) else None
        self._types = types_of(schema, self._tool)
        return end + 1

    def _in_value(self, text: str, at: int) -> int:
        end = text.find("<", at)
        self._value.append(text[at : end if end >= 0 else len(text)])
        if end < 0:
            return len(text)
        self._tag, self._step = "<", self._in_value_tag
        return end + 1

    def _in_value_tag(self, text: str, at: int) -> int:
        tag = self._tag + text[at]
        if not any(end.startswith(tag) for end in _ENDS_OF_VALUES):
            self._go_on(self._tag)
            return at
        self._tag = tag
        if tag in _ENDS_OF_VALUES:
            self._value = [value := "".join(self._value)]
            is_in_line = not value.endswith("\n")
            plain = value.replace(r"\\", "").replace(r"\"", "")
            if is_in_line and "string" not in self._types and plain.count('"') % 2:
                self._go_on(tag)  # it stands in a text of JSON, which has no line ends
            elif is_in_line and tag == _END_PARAMETER:
                self._ending, self._step = tag, self._between
            else:
                self._end_value()
                self._on_tag(tag)
        return at + 1

    def _go_on(self, text: str) -> None:
        """Take what is no tag as a part of the value."""
        self._value.append(text)
        self._ending, self._step = "", self._in_value

    def _end_value(self) -> None:
        """Write the parameter; of two with one name, the first."""
        self._ending = ""
        value = "".join(self._value).removeprefix("\n").removesuffix("\n")
        written = _json_of(value, self._types)
        if written and self._name not in self._keys:
            self._calls.add(", " if self._keys else "{")
            self._calls.add(f"{to_json(self._name)}: {written}")
            self._keys.add(self._name)

    def _end_call(self) -> None:
        if self._begins_call():
            self._calls.add("}" if self._keys else "{}")
            self._calls.end()

    def _keep(self, text: str) -> None:
        if not self._calls.is_open:
            self._raw.append(text)


def _json_of(value: str, types: Collection[str]) -> str:
    """Return the JSON of a parameter that was written as text; empty where it is none, and can be no text."""
    word = value.strip().lower()
    if word in ("true", "false") and "boolean" in types:
        return word
    if word in ("null", "none") and "null" in types:
        return "null"
    if "string" in types:
        return to_json(value)
    if not word:
        return "null" * ("null" in types)
    return value.strip() if word not in ("null", "none") and is_json(value) else to_json(value)


_MOST_PARTS = 64  # of one schema, and alternatives: references may lead in circles
# what a schema without `type` is about
_KEYWORDS = {"properties": "object", "additionalProperties": "object", "items": "array"}


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows, as far as it says so; one that says nothing allows text.

    Parameters
    ----------
    root : the whole schema, in which references are looked up.
    """
    found, waiting = set[str](), [schema]
    for alternative in waiting:
        whole = merged(alternative, root)
        own, more = _own_types(whole), [*_list(whole, "anyOf"), *_list(whole, "oneOf")]
        if own or not more:
            found |= own or {"string"}
        elif len(waiting) < _MOST_PARTS:
            waiting += more
    return frozenset(found or ("string",))


def merged(schema: Any, root: Any) -> dict[str, Any]:
    """Return a schema as one without `allOf` and the references that lead somewhere."""
    result: dict[str, Any] = {}
    waiting = [schema]
    for part in waiting:
        if not isinstance(part, Mapping) or len(waiting) > _MOST_PARTS:
            continue
        target = _target(part.get("$ref"), root)
        waiting += [each for each in (target, *_list(part, "allOf")) if each not in waiting]
        for key, value in part.items():
            known = result.get(key)
            if key == "properties" and isinstance(known, dict) and isinstance(value, dict):
                result[key] = value | known
            elif key == "required" and isinstance(known, list) and isinstance(value, list):
                result[key] = known + value
            elif key != "allOf" and (key != "$ref" or target is None):
                result.setdefault(key, value)
    return result


def _target(reference: Any, root: Any) -> Any:
    """Return what a reference inside of the root leads to, None if nothing."""
    try:
        start, *steps = unquote(reference).split("/")
        value: Any = root if start == "#" else None
        for step in steps:
            key = step.replace("~1", "/").replace("~0", "~")
            value = value[int(key)] if isinstance(value, list) else value[key]
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
    return value


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema itself names, or its values or other keywords have."""
    types, values = schema.get("type"), schema.get("enum", [schema["const"]] if "const" in schema else ())
    found = {each for each in (types if isinstance(types, list) else [types]) if isinstance(each, str)}
    names = {str: "string", type(None): "null", bool: "boolean"}
    found = found or {names.get(type(value), "number") for value in values if isinstance(values, list)}
    return found or {_KEYWORDS[key] for key in _KEYWORDS if key in schema}
