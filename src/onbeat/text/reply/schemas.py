"""What a schema says of a value where its references, `allOf` and alternatives are followed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

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
