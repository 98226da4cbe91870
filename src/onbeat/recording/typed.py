"""Values of declared types from the JSON of a record: files are edited by hand, checked here."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from onbeat.core.errors import quoted

MOST = 10**18
"""Beyond any number of tokens or seconds; arithmetic on larger ones overflows."""
INFINITY = "inf"
"""How JSON has what it lacks."""


def typed(kind: Any, value: Any) -> Any:
    """Return a value of a type from what JSON has of it.

    Parameters
    ----------
    kind : a dataclass, an enumeration, a literal, a union, a sequence, a mapping with texts as keys, or a
        plain type.

    Raises
    ------
    ValueError : it is none of that type; says what it is.
    """
    origin, kinds = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return _one_of(kinds, value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value)
    if isinstance(origin, type) and isinstance(value, dict) and issubclass(origin, Mapping):
        return {key: typed(kinds[1], each) for key, each in value.items()}
    if isinstance(origin, type) and isinstance(value, list) and issubclass(origin, Sequence):
        return _sequence(kinds, value)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(value)
    if kind is float and value == INFINITY:
        return inf
    if not _is_plain(kind, value):
        raise ValueError(f"{quoted(value)} is no {getattr(kind, '__name__', kind)}")
    return value


def _is_plain(kind: Any, value: Any) -> bool:
    """Whether a value is of a type that JSON has."""
    if get_origin(kind) is Literal:
        return isinstance(value, str | int) and value in get_args(kind)
    if kind is float:
        return type(value) in (int, float) and abs(value) < MOST
    if kind is int:
        return type(value) is int and abs(value) < MOST
    # JSON has hashes as texts, and replicas compare these.
    return kind is Any or type(value) is (str if kind is bytes else kind)


def _one_of(kinds: Sequence[Any], value: Any) -> Any:
    if value is None and type(None) in kinds:
        return None
    wrong: ValueError | None = None
    for kind in kinds:
        if kind is not type(None):
            try:
                return typed(kind, value)
            except ValueError as error:
                wrong = error
    raise wrong or ValueError(f"{quoted(value)} is not null")


def _sequence(kinds: Sequence[Any], values: list[Any]) -> tuple[Any, ...]:
    if len(kinds) == 1 or kinds[1:] == (...,):
        return tuple([typed(kinds[0], each) for each in values])
    if len(kinds) != len(values):
        raise ValueError(f"{quoted(values)} has {len(values)} values, not {len(kinds)}")
    return tuple([typed(kind, each) for kind, each in zip(kinds, values, strict=True)])


def _dataclass(kind: type, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{quoted(value)} is no {kind.__name__}")  # noqa: TRY004 - one kind of fault
    hints = _hints(kind)
    fields = {}
    for name, each in value.items():
        if name not in hints:
            raise ValueError(f"{kind.__name__} has no {quoted(name)}")
        try:
            fields[name] = typed(hints[name], each)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{kind.__name__} lacks a field ({error})") from error


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
