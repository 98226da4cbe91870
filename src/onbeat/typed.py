"""Values of declared types from what files hold, and the words in which their faults are told.

A type is a `Table`, a dataclass or anything else that msgspec knows. Its annotations say what values may be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import inf
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, inspect

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.hints import likely_meant

T = TypeVar("T")

MOST = 10**18
"""Beyond any number of tokens or seconds; arithmetic on larger ones overflows."""
INFINITY = "inf"
"""How JSON has what it lacks."""

Count = Annotated[int, Meta(ge=0, lt=MOST)]
Whole = Annotated[int, Meta(gt=-MOST, lt=MOST)]
Size = Annotated[int, Meta(ge=1, lt=MOST)]
Number = Annotated[float, Meta(gt=-1e24, lt=1e24)]
"""Finite, as are the next two."""
Positive = Annotated[float, Meta(gt=0, lt=1e24)]
NotNegative = Annotated[float, Meta(ge=0, lt=1e24)]
Text = Annotated[str, Meta(min_length=1)]
Share = Annotated[float, Meta(gt=0, le=1)]

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_SAID = re.compile(r"(.*?)(?: - at (`key` in )?`\$(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_PLAIN_KINDS: dict[type, str] = {
    inspect.BoolType: "true or false",
    inspect.DictType: "a mapping",
    inspect.FloatType: "a number",
    inspect.IntType: "a whole number",
    inspect.NoneType: "null",
    inspect.StrType: "a text",
}


class Table(msgspec.Struct, forbid_unknown_fields=True):
    """A mapping of a file, with the fields of a subclass and no others."""


class NotJSON(ConfigError):
    """A text is not JSON at all."""


class _Unknown(ConfigError):
    """A field that a dataclass does not have."""


class Hash(bytes):
    """Bytes that a file has as hexadecimal digits."""


def decode(kind: type[T], text: str | bytes | msgspec.Raw, where: str, *, hint: str = "") -> T:
    """Return what a JSON text holds, as a value of a type.

    Parameters
    ----------
    kind : the type.
    where : the text stands, for errors: `FILE, line 3`.
    hint : what to do about an error, if its own words do not say: `; fetch the file again`.

    Raises
    ------
    ConfigError : a value is missing, unknown or wrong; names place, field, value and what it must be.
        `NotJSON` where the text is no JSON.
    """
    decoder, has_dataclass, _ = _described_once(kind)
    try:
        found = decoder.decode(text)
        return convert(kind, _any(text), where, hint=hint) if has_dataclass else found
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}{hint}") from error
    except msgspec.ValidationError as error:
        try:
            content = _any(text)
        except ValueError as own:
            raise NotJSON(f"{where} is not JSON ({own}): {quoted(text)}{hint}") from own
        convert(kind, content, where, hint=hint)
        raise _fault(kind, error, content, where, hint) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise NotJSON(f"{where} is not JSON ({error}): {quoted(text)}{hint}") from error


def convert(kind: type[T], content: Any, where: str, *, hint: str = "") -> T:
    """Return plain values (mappings, lists, texts, numbers) as a value of a type.

    Parameters
    ----------
    content : the plain values.
    kind, where, hint : as for `decode`.

    Raises
    ------
    ConfigError : as for `decode`.
    """
    _, has_dataclass, info = _described_once(kind)
    try:
        if has_dataclass:
            _refuse_unknown(info, content, "")
        found: T = msgspec.convert(content, kind, **_PLAIN)
    except _Unknown as error:
        raise ConfigError(f"{where}{error}{hint}") from error
    except (ConfigError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}{hint}") from error
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: {quoted(error.object)} has half of a character{hint}") from error
    except msgspec.ValidationError as error:
        raise _fault(kind, error, content, where, hint) from error
    return found


def take(kind: Any, table: Mapping[str, Any], key: str, where: str, *, hint: str = "") -> Any:
    """Return what stands under a key of a mapping, as a value of a type; None where nothing or null does.

    Parameters
    ----------
    where : the mapping is from, for errors: `config.json`.
    hint : as for `decode`.

    Raises
    ------
    ConfigError : as for `decode`.
    """
    value = table.get(key)
    return None if value is None else convert(dict[str, kind], {key: value}, where, hint=hint)[key]


def revive(kind: type[T], content: Any, where: str) -> T:
    """Return plain values as a value of a type that knows no bounds, no file and no JSON.

    JSON has infinity as `inf`, and bytes as hexadecimal digits. Numbers beyond any that can be counted with
    are refused.

    Raises
    ------
    ConfigError : as for `decode`.
    """
    try:
        plain = _revived(_described_once(kind)[2], content, "")
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    return convert(kind, plain, where)


def _revived(info: Any, value: Any, place: str) -> Any:
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        inner = ((key, _revived(_inner(info, value, key), each, _named(place, key))) for key, each in pairs)
        return dict(inner) if isinstance(value, dict) else [each for _, each in inner]
    if isinstance(value, str):
        for each in _members(info, value):
            if isinstance(each, inspect.FloatType) and value == INFINITY:
                return inf
            if isinstance(each, inspect.BytesType):
                return bytes.fromhex(value)
    elif isinstance(value, int | float) and not abs(value) < MOST:
        raise ValueError(f"{place} is {quoted(value)}; it must be a number below {MOST:g}")
    return value


def _any(text: str | bytes | msgspec.Raw) -> Any:
    return json.loads(text if isinstance(text, str) else bytes(text))


def _made(kind: type, value: Any) -> Any:
    """Return a value of a type that JSON has as a text."""
    if not isinstance(value, str):
        raise ValueError(f"{quoted(value)} is no text")  # noqa: TRY004 - msgspec tells its place
    made: Any = kind.fromhex if issubclass(kind, bytes) else kind
    return made(value)


_PLAIN: Any = {"dec_hook": _made, "str_keys": True, "builtin_types": (bytes,)}


def _described(kind: Any) -> tuple[Any, bool, Any]:
    """Return the decoder of a type, whether there is a dataclass in it, and what it is made of."""
    info = inspect.type_info(kind)
    return msgspec.json.Decoder(kind, dec_hook=_made), _has_dataclass(info), info


_described_once: Any = cache(_described)


def _has_dataclass(info: Any) -> bool:
    return isinstance(info, inspect.DataclassType) or any(map(_has_dataclass, _parts(info)))


def _parts(info: Any) -> Iterator[Any]:
    """Yield the types that a type is made of: one of a union, fields, keys, values, items."""
    for name in ("type", "key_type", "value_type", "item_type"):
        if isinstance(part := getattr(info, name, None), inspect.Type):
            yield part
    yield from getattr(info, "types", ())
    yield from getattr(info, "item_types", ())
    yield from (each.type for each in getattr(info, "fields", ()))


def _refuse_unknown(info: Any, content: Any, place: str) -> None:
    """Refuse fields that a dataclass does not have: msgspec passes over them."""
    if isinstance(content, dict):
        for each in _members(info, content):
            if isinstance(each, inspect.DataclassType) and (unknown := content.keys() - set(_names(each))):
                told = _unknown(min(map(str, unknown)), each)
                raise _Unknown(f": {place} {told}" if place else f" {told}")
    if not isinstance(content, dict | list):
        return
    for key, child in content.items() if isinstance(content, dict) else enumerate(content):
        if (inner := _inner(info, content, key)) is not None:
            _refuse_unknown(inner, child, _named(place, key))


def _fault(kind: Any, error: Exception, content: Any, where: str, hint: str) -> ConfigError:
    """Return the error of a value that is not of a type, with its place, the value and what it must be."""
    found = _SAID.fullmatch(str(error))
    assert found is not None, "any text matches"
    said, in_keys, path = found.groups()
    keys: list[Any] = []
    info, value = _described_once(kind)[2], content
    for name, index in _STEP.findall(path or ""):
        key = name or (int(index) if index != "..." else _at_fault(kind, content, keys, error))
        info = _inner(info, value, key)
        value = _child(value, key)
        keys.append(key)
    place = ""
    for key in keys:
        place = _named(place, key)
    if about := re.fullmatch("Object (contains unknown|missing required) field `(.*)`", said):
        is_missing, name = about[1].startswith("missing"), about[2]
        told = f"lacks {name}" if is_missing else _unknown(name, *_members(info, value))
        return ConfigError(f"{where}{f': {place}' if place else ''} {told}{hint}")
    if in_keys:
        key = quoted(_at_fault(kind, content, keys, error))
        told = (
            f"{place or 'a mapping'} has the key {key}; it must be {_wanted(getattr(info, 'key_type', None))}"
        )
    elif said.startswith(("Expected", "Invalid", "Number out of range")):
        shown = "is wrong (not shown here)" if _is_secret(info) else f"is {quoted(value)}"
        told = f"{place or 'it'} {shown}; it must be {_wanted(info)}"
        if (limit := re.search(r"< (\S+)$", said)) and float(limit[1]) >= MOST:
            told += f" and below {float(limit[1]):g}"
    else:
        told = f"{place} is {quoted(value)}: {said}" if place else said
    return ConfigError(f"{where}: {told}{hint}")


def _at_fault(kind: Any, content: Any, keys: Sequence[Any], error: Exception) -> Any:
    """Return the key of a mapping that an error is about, of which msgspec does not say more."""
    mapping = content
    for key in keys:
        mapping = _child(mapping, key)
    for key in mapping:
        try:
            msgspec.convert(_with(content, keys, {key: mapping[key]}), kind, **_PLAIN)
        except (msgspec.ValidationError, ConfigError) as own:
            if str(own) == str(error):
                return key
    return "..."


def _with(content: Any, keys: Sequence[Any], value: Any) -> Any:
    """Return content with another value in one place."""
    if not keys:
        return value
    changed = _with(content[keys[0]], keys[1:], value)
    if isinstance(content, dict):
        return {**content, keys[0]: changed}
    return [changed if index == keys[0] else each for index, each in enumerate(content)]


def _child(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except (KeyError, IndexError, TypeError):
        return None


def _members(info: Any, value: Any) -> Iterator[Any]:
    """Yield what a value of a type may be: the type itself, or those of its union that have its tag."""
    if isinstance(info, inspect.Metadata):
        yield from _members(info.type, value)
    elif isinstance(info, inspect.UnionType):
        for each in info.types:
            tag = getattr(each, "tag_field", None)
            if tag is None or (isinstance(value, dict) and value.get(tag) == getattr(each, "tag", None)):
                yield from _members(each, value)
    elif info is not None:
        yield info


def _is_secret(info: Any) -> bool:
    """Whether no message may repeat a value: its type is `writeOnly`, JSON Schema's word for it."""
    kinds = info.types if isinstance(info, inspect.UnionType) else (info,)
    return any((getattr(each, "extra_json_schema", None) or {}).get("writeOnly") for each in kinds)


def _inner(info: Any, value: Any, key: Any) -> Any:
    """Return the type of what stands under a key or an index; None where nobody says."""
    for each in _members(info, value):
        if hasattr(each, "fields"):
            fields = {field.encode_name: field.type for field in each.fields}
            if isinstance(key, int):
                return list(fields.values())[key] if key < len(fields) else None
            if key in fields:
                return fields[key]
        for name in ("value_type", "item_type"):
            if hasattr(each, name):
                return getattr(each, name)
        if isinstance(each, inspect.TupleType):
            return each.item_types[key] if key < len(each.item_types) else None
    return None


def _names(info: Any) -> list[str]:
    tag = getattr(info, "tag_field", None)
    names = [getattr(each, "encode_name", "") or each.name for each in getattr(info, "fields", ())]
    return [*([tag] if tag else ()), *names]


def _named(place: str, key: Any) -> str:
    if isinstance(key, int):
        return f"{place}[{key}]"
    return f"{place}.{key}" if place else str(key)


def _unknown(name: str, *infos: Any) -> str:
    known = [each for info in infos for each in _names(info)]
    near = likely_meant(name, known)
    cure = f"did you mean {near}? " if near else ""
    return f"has an unknown field {quoted(name)}: {cure}known are {', '.join(known)}"


def _wanted(info: Any) -> str:
    """Return in words what a type takes."""
    match info:
        case inspect.Metadata():
            return str((info.extra_json_schema or {}).get("description") or _wanted(info.type))
        case inspect.UnionType():
            kinds = [each for each in info.types if not isinstance(each, inspect.NoneType)]
            return " or ".join(dict.fromkeys(map(_wanted, kinds)))
        case inspect.LiteralType():
            return f"one of {', '.join(map(str, info.values))}"
        case inspect.EnumType():
            return f"one of {', '.join(str(each.value) for each in info.cls)}"
        case inspect.StructType() | inspect.DataclassType():
            return f"a mapping with {', '.join(_names(info))}"
        case inspect.NamedTupleType() | inspect.TupleType():
            parts = [each.type for each in info.fields] if hasattr(info, "fields") else info.item_types
            return f"a list of {len(parts)} values"
        case inspect.ListType() | inspect.VarTupleType():
            return "a list" + " with at least one value" * bool(info.min_length)
    words = _PLAIN_KINDS.get(type(info), "of another kind")
    bounds = {name: getattr(info, name, None) for name in _BOUNDS}
    told = [
        f"{_BOUNDS[name]} {bound if isinstance(bound, int) else format(bound, 'g')}"
        for name, bound in bounds.items()
        if bound is not None and abs(bound) < MOST
    ]
    return f"{words} {' and '.join(told)}".strip().replace("number at", "number of at")
